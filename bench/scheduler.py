"""Time of one scheduler step, schedule and apply: does it stay flat as requests wait and finish?

All running sequences decode, prefix caching is on, blocks hold 16 tokens. No model runs. Prints one
line of JSON: for each scene the median step in microseconds, with the 20th and 80th percentile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import product
from typing import Any

from record import circumstances, save

from fullbore_backend.config import SchedulerConfig
from fullbore_backend.scheduler import Scheduler, Sequence

PROMPT = 40
WARM_UP = 20


def step(scheduler: Scheduler) -> int:
    """One step; returns how many tokens it sampled."""
    batch = scheduler.schedule()
    assert batch is not None
    tokens = [1 if chunk.samples else None for chunk in batch.chunks]
    scheduler.apply(batch, tokens)
    return len(tokens) - tokens.count(None)


def prompt(index: int) -> range:
    """Tokens that share no block with another index's."""
    return range(index * PROMPT, (index + 1) * PROMPT)


def loaded(running: int, waiting: int, finished: int, steps: int) -> Scheduler:
    """A scheduler with so many sequences in each state; the waiting ones find no seat."""
    config = SchedulerConfig(
        num_blocks=(running + 1) * (PROMPT + steps + WARM_UP) // 8 + running,
        max_num_seqs=running,
        max_num_batched_tokens=8192,
        max_waiting=waiting + finished + running,
    )
    scheduler = Scheduler(config)
    for index in range(finished):
        scheduler.add(Sequence(f"finished-{index}", prompt(index), max_tokens=1))
    while scheduler.has_work():
        step(scheduler)
    for index in range(running):
        scheduler.add(Sequence(f"running-{index}", prompt(index + finished), max_tokens=None))
    while step(scheduler) < running:
        pass
    for index in range(waiting):
        scheduler.add(Sequence(f"waiting-{index}", prompt(index), max_tokens=1))
    return scheduler


def measure(running: int, waiting: int, finished: int, steps: int) -> dict[str, Any]:
    """Time ``steps`` steps of one scene, after a warm-up."""
    scheduler = loaded(running, waiting, finished, steps)
    seconds = []
    for index in range(WARM_UP + steps):
        started = time.perf_counter()
        sampled = step(scheduler)
        if index >= WARM_UP:
            seconds.append(time.perf_counter() - started)
        assert sampled == running
    assert scheduler.num_waiting == waiting
    assert scheduler.num_preemptions == 0
    low, _, _, high = statistics.quantiles(seconds, n=5)
    return {
        "running": running,
        "waiting": waiting,
        "finished": finished,
        "step_us": round(statistics.median(seconds) * 1e6, 1),
        "step_us_p20": round(low * 1e6, 1),
        "step_us_p80": round(high * 1e6, 1),
    }


def main() -> None:
    """Measure every scene and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500, help="steps timed in each scene")
    parser.add_argument("--save", action="store_true", help="also write it to bench/results")
    arguments = parser.parse_args()
    scenes = [
        measure(running, waiting, finished, arguments.steps)
        for running, waiting, finished in product((1, 32, 256), (0, 10_000), (0, 10_000))
    ]
    result = circumstances(["fullbore"]) | {"steps": arguments.steps, "scenes": scenes}
    if arguments.save:
        save("scheduler", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
