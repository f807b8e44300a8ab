"""The usual way to push many prompts through the OpenAI SDK; only `base_url` says that it is ours.

usage: python examples/openai_sdk.py [--base-url URL] [--model NAME] [--prompts N]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

from openai import AsyncOpenAI


async def main(base_url: str, model: str, number: int) -> None:
    client = AsyncOpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none needed"))
    semaphore = asyncio.Semaphore(32)

    async def ask(prompt: str) -> str:
        async with semaphore:
            stream = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=24,
                stream=True,
            )
            pieces = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
            return "".join(piece or "" for piece in pieces)

    began = time.perf_counter()
    answers = await asyncio.gather(
        *(ask(f"Say something about the number {n}.") for n in range(number))
    )
    seconds = time.perf_counter() - began
    await client.close()
    print(answers[0])
    print(f"{sum(map(bool, answers))} of {number} answered in {seconds:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=100)
    options = parser.parse_args()
    asyncio.run(main(options.base_url, options.model, options.prompts))
