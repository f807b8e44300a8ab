"""One answer, token by token, as the server makes it.

usage: python examples/stream.py [PROMPT] [--base-url URL] [--model NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import os

import fullbore


async def main(base_url: str, model: str, prompt: str) -> None:
    async with (
        fullbore.Client(base_url, model=model) as client,
        client.stream(prompt, max_tokens=96, temperature=0.4) as stream,
    ):
        async for delta in stream:
            print(delta, end="", flush=True)
    print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Tell me a short story about a lighthouse.")
    parser.add_argument(
        "--base-url", default=os.environ.get("FULLBORE_BASE_URL", "http://127.0.0.1:8000/v1")
    )
    parser.add_argument("--model", default=os.environ.get("FULLBORE_MODEL", "smollm2-135m"))
    options = parser.parse_args()
    asyncio.run(main(options.base_url, options.model, options.prompt))
