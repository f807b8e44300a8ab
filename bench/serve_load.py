"""Output tokens/s of a server under closed-loop chat load, at several concurrencies.

Starts `fullbore serve` in a process of its own, or loads the server at `--url`. The load: chat
completions, not streamed, greedy, each of the same number of output tokens, past any end token.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from record import circumstances, save

VOCABULARY = (
    "anchor apple barn bell brick candle clay coast copper cotton desert ember feather ferry "
    "field flute forest garden glass granite harbor honey island kettle ladder lantern lemon "
    "maple marble meadow mirror orchard paper pepper piano quarry ribbon river saddle silver "
    "spring stone thread timber valley violin wheel winter "
)
WORDS = VOCABULARY.split()
PACKAGES = ("fullbore", "torch", "granian", "starlette", "aiohttp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent: sizes in words of the prompt and in tokens of the output."""

    model: str
    output_tokens: int
    prompt_words: int = 48
    shared_words: int = 0

    def body(self, index: int) -> dict[str, Any]:
        """The request of this index; the same index gives the same prompt."""
        shared = " ".join(random.Random("shared").choices(WORDS, k=self.shared_words))
        words = " ".join(random.Random(index).choices(WORDS, k=self.prompt_words))
        return {
            "model": self.model,
            "messages": [
                {"role": "user", "content": f"{shared} Write a long story about {words}".strip()}
            ],
            "max_tokens": self.output_tokens,
            "min_tokens": self.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One closed loop at one concurrency; seconds, tokens."""

    concurrency: int
    requests: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    latency_p50: float
    latency_p99: float
    generator_lag_p99: float


async def closed_loop(
    session: aiohttp.ClientSession, load: Load, *, concurrency: int, requests: int, first: int
) -> Run:
    """Keep ``concurrency`` requests in flight until ``requests`` are done.

    ``first`` is the index of the first prompt, so that no run meets the prompts of another in the
    prefix cache.

    :raises RuntimeError: when an answer is an error or has not the number of tokens asked for.
    """
    indices = iter(range(first, first + requests))
    latencies: list[float] = []
    tokens = [0, 0]

    async def worker() -> None:
        for index in indices:
            began = time.perf_counter()
            async with session.post("chat/completions", json=load.body(index)) as response:
                answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"the server answered {response.status}: {answer}")
            usage = answer["usage"]
            if usage["completion_tokens"] != load.output_tokens:
                raise RuntimeError(f"asked for {load.output_tokens} output tokens, got {usage}")
            latencies.append(time.perf_counter() - began)
            tokens[0] += usage["prompt_tokens"]
            tokens[1] += usage["completion_tokens"]

    lags: list[float] = []
    watch = asyncio.create_task(_watch_loop(lags))
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    seconds = time.perf_counter() - began
    watch.cancel()
    return Run(
        concurrency=concurrency,
        requests=requests,
        seconds=round(seconds, 3),
        prompt_tokens=tokens[0],
        output_tokens=tokens[1],
        output_tokens_per_s=round(tokens[1] / seconds, 2),
        latency_p50=round(percentile(latencies, 50), 3),
        latency_p99=round(percentile(latencies, 99), 3),
        generator_lag_p99=round(percentile(lags, 99), 5),
    )


async def _watch_loop(lags: list[float], interval: float = 0.01) -> None:
    """How late the generator's own event loop is: its share of what is measured."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(interval)
        lags.append(time.perf_counter() - began - interval)


def percentile(values: list[float], q: float) -> float:
    """The smallest value that ``q`` percent of ``values`` do not exceed; 0 for none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * q / 100) - 1)] if ordered else 0.0


async def measure(url: str, load: Load, options: argparse.Namespace) -> list[Run]:
    """Warm up, then every concurrency in turn, ``--repeat`` times over."""
    runs: list[Run] = []
    async with aiohttp.ClientSession(
        base_url=f"{url}/v1/",
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        connector=aiohttp.TCPConnector(limit=0),
    ) as session:
        first = 1_000_000
        await closed_loop(session, load, concurrency=2, requests=2, first=first)
        for _ in range(options.repeat):
            for concurrency in options.concurrency:
                requests = options.requests or max(4, 3 * concurrency)
                first += 100_000
                run = await closed_loop(
                    session, load, concurrency=concurrency, requests=requests, first=first
                )
                print(
                    f"concurrency {concurrency:4d} {run.output_tokens_per_s:8.1f} output tokens/s  "
                    f"p50 {run.latency_p50:6.2f} s  p99 {run.latency_p99:6.2f} s  "
                    f"generator lag p99 {run.generator_lag_p99 * 1e3:.1f} ms",
                    flush=True,
                )
                runs.append(run)
    return runs


def summary(runs: list[Run]) -> list[dict[str, Any]]:
    """The median of each concurrency, with the least and the most beside it."""
    rows = []
    for concurrency in sorted({run.concurrency for run in runs}):
        rates = [run.output_tokens_per_s for run in runs if run.concurrency == concurrency]
        rows.append(
            {
                "concurrency": concurrency,
                "output_tokens_per_s": round(statistics.median(rates), 2),
                "least": min(rates),
                "most": max(rates),
            }
        )
    return rows


@contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """The address to load: the one given, or that of a server started for this."""
    if options.url:
        yield options.url.rstrip("/").removesuffix("/v1")
        return
    from fullbore_backend.server import BackgroundServer

    with BackgroundServer(options.serve_args, on_line=print) as started:
        yield started.url


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="load this server instead of starting one")
    parser.add_argument("--model", default="smollm2-135m", help="the name requests use")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="C")
    parser.add_argument("--requests", type=int, help="for each C; default 3*C, at least 4")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--shared-prefix", type=int, default=0, metavar="WORDS")
    parser.add_argument("--repeat", type=int, default=1, help="the median of this many is reported")
    parser.add_argument("--output", type=Path, help="where to write the result")
    parser.add_argument(
        "--serve-args", type=shlex.split, default=[], help="for `fullbore serve`, in one string"
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Measure, print, and write the result down."""
    options = parse(argv)
    load = Load(
        model=options.model,
        output_tokens=options.output_tokens,
        shared_words=options.shared_prefix,
    )
    with server(options) as url:
        runs = asyncio.run(measure(url, load, options))
    result = {
        "question": "output tokens/s of the server under closed-loop chat load",
        **circumstances(PACKAGES),
        "server": {"url": options.url, "arguments": options.serve_args},
        "load": asdict(load),
        "summary": summary(runs),
        "runs": [asdict(run) for run in runs],
    }
    print(f"written to {save('serve', result, options.output)}")


if __name__ == "__main__":
    main(sys.argv[1:])
