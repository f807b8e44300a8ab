"""Does the adaptive limiter find the throughput that the best fixed concurrency has?

Starts `fullbore serve`, maps the same number of prompts at each fixed concurrency and at "auto", in
turn, `--repeat` times over, and reports the output tokens/s of "auto" against the best of the
sweep.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from record import circumstances, save

import fullbore
from fullbore_backend.server import BackgroundServer

PACKAGES = ("fullbore", "httpx2", "torch", "granian")
VOCABULARY = "anchor barn coast desert ember forest garden harbor island lantern meadow orchard"
WORDS = VOCABULARY.split()


def prompts(seed: int, count: int) -> list[str]:
    """Short prompts that share no prefix beyond the template's."""
    rng = random.Random(seed)
    return [f"{' '.join(rng.choices(WORDS, k=12))}: tell a story." for _ in range(count)]


async def measure(
    url: str, concurrency: int | str, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One run; the limiter starts from nothing each time."""
    async with fullbore.Client(
        f"{url}/v1",
        model="smollm2-135m",
        concurrency="auto" if concurrency == "auto" else int(concurrency),
    ) as client:
        run = client.map(
            prompts(seed, options.requests),
            max_tokens=options.output_tokens,
            min_tokens=options.output_tokens,
            ignore_eos=True,
            temperature=0,
        )
        results = await run
        limit = client.limiter.limit
    failed = [result.error for result in results if not result.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0]}")
    rate = run.stats.output_tokens_per_second
    print(f"concurrency {concurrency!s:>4}  {rate:7.1f} output tokens/s  limit {limit}", flush=True)
    return {"concurrency": concurrency, "output_tokens_per_s": round(rate, 2), "limit": limit}


async def sweep(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every concurrency and "auto", interleaved."""
    await measure(url, 8, 0, argparse.Namespace(requests=8, output_tokens=4))
    runs = []
    seed = 0
    for _ in range(options.repeat):
        for concurrency in (*options.concurrency, "auto"):
            seed += 1
            runs.append(await measure(url, concurrency, seed, options))
    return runs


def main(argv: list[str]) -> None:
    """Measure, print, and write the result down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    with BackgroundServer(on_line=print) as server:
        runs = asyncio.run(sweep(server.url, options))
    medians = {
        concurrency: statistics.median(
            run["output_tokens_per_s"] for run in runs if run["concurrency"] == concurrency
        )
        for concurrency in (*options.concurrency, "auto")
    }
    best = max(options.concurrency, key=lambda concurrency: medians[concurrency])
    share = medians["auto"] / medians[best]
    print(f"auto has {share:.1%} of the throughput of the best fixed concurrency, {best}")
    result = {
        "question": "the adaptive limiter's throughput against the best fixed concurrency's",
        **circumstances(PACKAGES),
        "medians": {str(key): value for key, value in medians.items()},
        "best_fixed": best,
        "auto_share_of_best": round(share, 4),
        "runs": runs,
    }
    print(f"written to {save('adaptive', result, options.output)}")


if __name__ == "__main__":
    main(sys.argv[1:])
