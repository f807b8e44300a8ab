"""Every prompt, as fast as the endpoint answers; results as they finish.

usage: python examples/map.py [PROMPT ...] [--base-url URL] [--model NAME] [--concurrency N]
"""

from __future__ import annotations

import argparse
import asyncio
import os

import fullbore

COUNTRIES = ("Portugal", "Kenya", "Japan", "Peru", "Norway", "Egypt", "Canada", "Vietnam")


async def main(base_url: str, model: str, prompts: list[str], concurrency: int) -> None:
    async with fullbore.Client(base_url, model=model, concurrency=concurrency) as client:
        async for result in client.map(prompts, max_tokens=32, temperature=0):
            print(result.index, result.text if result.ok else f"failed: {result.error}")
        print(client.ledger.summary())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="*", help="default: the capitals of eight countries")
    parser.add_argument(
        "--base-url", default=os.environ.get("FULLBORE_BASE_URL", "http://127.0.0.1:8000/v1")
    )
    parser.add_argument("--model", default=os.environ.get("FULLBORE_MODEL", "smollm2-135m"))
    parser.add_argument("--concurrency", type=int, default=32)
    options = parser.parse_args()
    prompts = options.prompts or [f"What is the capital of {name}?" for name in COUNTRIES]
    asyncio.run(main(options.base_url, options.model, prompts, options.concurrency))
