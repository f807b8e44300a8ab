"""What does a reader that stops cost its neighbours?

Starts `fullbore serve` and streams several answers over one HTTP/2 transport, with and without one
more stream whose reader stops after its first token for `--seconds`. Reports the neighbours'
inter-token latency with over without, what the stalled stream had received when it went on, and
whether it then got the text that it gets undisturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
from record import circumstances, save

import fullbore
from fullbore_backend.server import BackgroundServer

PACKAGES = ("fullbore", "h2", "httpx2", "torch", "granian")
STALLED = "Count from one to four hundred, one number after the other."


async def neighbour(client: fullbore.Client, index: int, deadline: float) -> list[float]:
    """Seconds between the tokens of answers streamed one after the other until the deadline."""
    gaps: list[float] = []
    while time.perf_counter() < deadline:
        async with client.stream(
            f"Tell me a long story about a place called {index}.",
            max_tokens=64,
            ignore_eos=True,
            temperature=0,
        ) as stream:
            last = None
            async for _ in stream:
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now
    return gaps


async def generated(url: str) -> float:
    """Tokens the server has generated so far."""
    async with httpx2.AsyncClient() as http:
        page = (await http.get(f"{url}/metrics")).text
    match = re.search(r"^\S*generation_tokens_total\S* (\S+)$", page, re.MULTILINE)
    assert match, page
    return float(match[1])


async def paused(url: str) -> float:
    """Sequences whose reader is away."""
    async with httpx2.AsyncClient() as http:
        page = (await http.get(f"{url}/metrics")).text
    match = re.search(r"^\S*num_requests_paused\S* (\S+)$", page, re.MULTILINE)
    assert match, page
    return float(match[1])


async def side_by_side(
    client: fullbore.Client, url: str, *, neighbours: int, seconds: float
) -> list[float]:
    """The gaps of all neighbours."""
    deadline = time.perf_counter() + seconds
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(neighbour(client, index, deadline)) for index in range(neighbours)
        ]
    return [gap for task in tasks for gap in task.result()]


async def run(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """One round: without the stalled stream, then with it."""
    fields = {"max_tokens": options.stalled_tokens, "ignore_eos": True, "temperature": 0}
    async with fullbore.Client(
        f"{url}/v1", model="smollm2-135m", http2=True, concurrency=options.neighbours + 1
    ) as client:
        without = await side_by_side(
            client, url, neighbours=options.neighbours, seconds=options.seconds
        )
        async with client.stream(STALLED, **fields) as stalled:
            await anext(aiter(stalled))
            before = await generated(url)
            while not await paused(url):
                await asyncio.sleep(0.1)
            ahead = await generated(url) - before
            with_stalled = await side_by_side(
                client, url, neighbours=options.neighbours, seconds=options.seconds
            )
            still_paused = await paused(url)
            async for _ in stalled:
                pass
        text = stalled.result.text
        again = await client.complete(STALLED, **fields)
    median = statistics.median
    row = {
        "gap_without_ms": round(median(without) * 1e3, 3),
        "gap_with_ms": round(median(with_stalled) * 1e3, 3),
        "ratio": round(median(with_stalled) / median(without), 4),
        "tokens_generated_after_the_reader_stopped": ahead,
        "paused_throughout": still_paused == 1,
        "text_equal": text == again.text,
    }
    print(row, flush=True)
    return row


def main(argv: list[str]) -> None:
    """Measure, print, and write the result down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--neighbours", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--stalled-tokens", type=int, default=900)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    with BackgroundServer(on_line=print) as server:
        rows = [asyncio.run(run(server.url, options)) for _ in range(options.repeat)]
    ratio = statistics.median(row["ratio"] for row in rows)
    print(f"the neighbours' inter-token latency is {ratio:.3f} of what it is without")
    result = {
        "question": "what a reader that stopped costs its neighbours",
        **circumstances(PACKAGES),
        "neighbours": options.neighbours,
        "seconds": options.seconds,
        "ratio": ratio,
        "rounds": rows,
    }
    print(f"written to {save('backpressure', result, options.output)}")


if __name__ == "__main__":
    main(sys.argv[1:])
