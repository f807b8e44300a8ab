"""Does the adaptive limiter find the throughput that the best fixed concurrency has?

Starts `fullbore serve`, maps the same number of prompts at each fixed concurrency and at "auto", in
turn, `--repeat` times over, and reports the output tokens/s of "auto" against the best of the
sweep: over the whole run, with the ramp from 16 and the last requests running out, and in the
steady state, from the twentieth round trip (of a shorter run: from the middle one) until the last
request is sent. A round trip ends when a request sent after the one before has been answered, as
BBR counts them (Cardwell et al. 2016). Every move of the limit is written down with its reason.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from record import circumstances, save

import fullbore
from fullbore_backend.server import BackgroundServer

PACKAGES = ("fullbore", "httpx2", "torch", "granian")
VOCABULARY = "anchor barn coast desert ember forest garden harbor island lantern meadow orchard"
WORDS = VOCABULARY.split()
SETTLE = 20  # round trips
SPAN = 5.0  # seconds
RATES: dict[str, Callable[[dict[str, Any]], float]] = {
    "whole_run": lambda run: run["output_tokens_per_s"],
    "steady_state": lambda run: run["steady"]["output_tokens_per_s"],
}


def prompts(seed: int, count: int) -> list[str]:
    """Short prompts that share no prefix beyond the template's."""
    rng = random.Random(seed)
    return [f"{' '.join(rng.choices(WORDS, k=12))}: tell a story." for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Answer:
    """When a request was sent and answered, in seconds of the run, and its output tokens."""

    sent: float
    ended: float
    tokens: int


def round_trips(answers: Sequence[Answer]) -> list[float]:
    """When each round trip ended; `answers` by their end."""
    ends = [0.0]
    for answer in answers:
        if answer.sent >= ends[-1]:
            ends.append(answer.ended)
    return ends[1:]


def rate(answers: Sequence[Answer], start: float, end: float) -> float:
    """Output tokens/s between two instants, an answer's tokens spread evenly over its time.

    Requests of one length move in waves, so counting whole answers would depend on whether a wave
    ends just before an instant or just after it.
    """
    tokens = 0.0
    for answer in answers:
        inside = min(answer.ended, end) - max(answer.sent, start)
        tokens += answer.tokens * max(0.0, inside) / (answer.ended - answer.sent)
    return tokens / (end - start)


def steady(answers: Sequence[Answer]) -> dict[str, float]:
    """Throughput without the ramp and without the end, when less and less is in flight."""
    trips = round_trips(answers)
    settled = min(SETTLE, len(trips) // 2)
    start = trips[settled - 1]
    end = max(answer.sent for answer in answers)
    return {
        "output_tokens_per_s": round(rate(answers, start, end), 2),
        "after_round_trips": settled,
        "round_trips": len(trips),
        "from_s": round(start, 2),
        "to_s": round(end, 2),
    }


def timeline(answers: Sequence[Answer]) -> list[float]:
    """Output tokens/s in each span of `SPAN` seconds."""
    spans = range(int(answers[-1].ended // SPAN))
    return [round(rate(answers, span * SPAN, (span + 1) * SPAN), 1) for span in spans]


async def measure(
    url: str, concurrency: int | str, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One run; the limiter starts from nothing each time."""
    moves: list[fullbore.Move] = []
    answers: list[Answer] = []
    async with fullbore.Client(
        f"{url}/v1",
        model="smollm2-135m",
        concurrency="auto" if concurrency == "auto" else int(concurrency),
        on_move=moves.append,
    ) as client:
        began = time.monotonic()  # the clock of the moves
        run = client.map(
            prompts(seed, options.requests),
            max_tokens=options.output_tokens,
            min_tokens=options.output_tokens,
            ignore_eos=True,
            temperature=0,
        )
        async for result in run:
            if result.error is not None:
                raise RuntimeError(f"a request failed with {result.error}")
            ended = time.monotonic() - began
            took = result.attempts[-1].timing.total
            answers.append(Answer(ended - took, ended, result.usage.output_tokens))
        limit = client.limiter.limit
    return {
        "concurrency": concurrency,
        "output_tokens_per_s": round(run.stats.output_tokens_per_second, 2),
        "steady": steady(answers),
        "limit": limit,
        "moves": [{**asdict(move), "at": round(move.at - began, 2)} for move in moves],
        "output_tokens_per_s_by_span": timeline(answers),
    }


async def sweep(url: str, arms: Sequence[int | str], options: argparse.Namespace) -> list[dict]:
    """Every arm, interleaved."""
    await measure(url, 8, 0, argparse.Namespace(requests=64, output_tokens=8))
    runs = []
    seed = 0
    for _ in range(options.repeat):
        for arm in arms:
            seed += 1
            runs.append(await measure(url, arm, seed, options))
            show(runs[-1])
    return runs


def show(run: dict[str, Any]) -> None:
    """Print one run and, of "auto", its moves."""
    settled = run["steady"]
    print(
        f"concurrency {run['concurrency']!s:>4}  {run['output_tokens_per_s']:7.1f} output "
        f"tokens/s, {settled['output_tokens_per_s']:7.1f} after {settled['after_round_trips']} of "
        f"{settled['round_trips']} round trips; limit {run['limit']}",
        flush=True,
    )
    for move in run["moves"]:
        print("    {at:6.1f} s  {old:4} -> {new:4}  {reason:16}  {detail}".format(**move))


def compare(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of every arm and the share of "auto" of the best fixed one, if both were run."""
    arms = list(dict.fromkeys(run["concurrency"] for run in runs))
    compared: dict[str, Any] = {}
    for name, read in RATES.items():
        medians = {
            arm: statistics.median(read(run) for run in runs if run["concurrency"] == arm)
            for arm in arms
        }
        compared[name] = {"medians": {str(arm): round(rate, 2) for arm, rate in medians.items()}}
        fixed = [arm for arm in arms if arm != "auto"]
        if fixed and "auto" in arms:
            best = max(fixed, key=medians.__getitem__)
            share = medians["auto"] / medians[best]
            compared[name] |= {"best_fixed": best, "auto_share_of_best": round(share, 4)}
            print(f"{name}: auto has {share:.1%} of the throughput of the best fixed, {best}")
    return compared


def arm(text: str) -> int | str:
    """A fixed concurrency, or "auto"."""
    return text if text == "auto" else int(text)


def main(argv: list[str]) -> None:
    """Measure, print, and write the result down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", type=arm, help="measure this one alone: auto, or a number")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    arms = [*options.concurrency, "auto"] if options.only is None else [options.only]
    with BackgroundServer(on_line=print) as server:
        runs = asyncio.run(sweep(server.url, arms, options))
    result = {
        "question": "the adaptive limiter's throughput against the best fixed concurrency's",
        **circumstances(PACKAGES),
        **compare(runs),
        "runs": runs,
    }
    print(f"written to {save('adaptive', result, options.output)}")


if __name__ == "__main__":
    main(sys.argv[1:])
