"""What a step costs, counted in lines of the scheduler executed: no clock, so no noise."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from fullbore_backend.config import SchedulerConfig
from fullbore_backend.scheduler import Batch, Scheduler, Sequence


def scheduler_of(**settings: int) -> Scheduler:
    defaults = {
        "num_blocks": 4096,
        "block_size": 4,
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_waiting": 100_000,
    }
    return Scheduler(SchedulerConfig(**(defaults | settings)))


def step(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.apply(batch, [1 if chunk.samples else None for chunk in batch.chunks])
    return batch


def lines_of_a_step(scheduler: Scheduler) -> int:
    """Lines executed by one step, comprehensions and callees included.

    The garbage collector stays off: it would run other libraries' callbacks, which count too.
    """
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        step(scheduler)
    finally:
        sys.settrace(before)
        gc.enable()
    return lines


def decoding(scheduler: Scheduler, num_running: int) -> Scheduler:
    """``num_running`` sequences that decode; none fills a block in the next step."""
    for i in range(num_running):
        scheduler.add(Sequence(f"run{i}", [i, 0, 0, 0, 0], max_tokens=1000))
    step(scheduler)
    assert scheduler.num_running == num_running
    return scheduler


def add_waiting(scheduler: Scheduler, amount: int) -> None:
    for i in range(amount):
        scheduler.add(Sequence(f"wait{i}", [0] * 80, max_tokens=1, priority=i % 7))


def seats_full() -> Scheduler:
    return decoding(scheduler_of(), 8)


def memory_full() -> Scheduler:
    return decoding(scheduler_of(num_blocks=24, max_num_seqs=9), 8)


def leader_computing() -> Scheduler:
    """One sequence computes the prompt that all of :func:`add_waiting` start with."""
    scheduler = scheduler_of(max_num_seqs=9)
    scheduler.add(Sequence("leader", [0] * 300, max_tokens=1))
    step(scheduler)
    return scheduler


@pytest.mark.parametrize(
    "scene", [seats_full, memory_full, leader_computing], ids=lambda scene: scene.__name__
)
def test_waiting_requests_cost_a_step_nothing(scene: Callable[[], Scheduler]) -> None:
    costs = []
    for amount in (100, 5000):
        scheduler = scene()
        add_waiting(scheduler, amount)
        costs.append(lines_of_a_step(scheduler))
        assert scheduler.num_waiting == amount
    assert costs[0] == costs[1]


def test_finished_requests_cost_a_step_nothing() -> None:
    costs = []
    for amount in (10, 1000):
        scheduler = scheduler_of()
        for i in range(amount):
            scheduler.add(Sequence(f"done{i}", [i, i, i, i, i, i], max_tokens=1))
            step(scheduler)
        costs.append(lines_of_a_step(decoding(scheduler, 8)))
    assert costs[0] == costs[1]


def paused_with_blocks(scheduler: Scheduler, amount: int) -> None:
    for i in range(amount):
        scheduler.add(Sequence(f"away{i}", [9, i, 9, 9, 9], max_tokens=1000))
        step(scheduler)
        scheduler.pause(f"away{i}")


def paused_without_blocks(scheduler: Scheduler, amount: int) -> None:
    for i in range(amount):
        scheduler.add(Sequence(f"away{i}", [9, i, 9, 9, 9], max_tokens=1000))
        scheduler.pause(f"away{i}")


@pytest.mark.parametrize(
    "pause", [paused_with_blocks, paused_without_blocks], ids=lambda scene: scene.__name__
)
@pytest.mark.parametrize("waits", [False, True], ids=["nobody_waits", "one_waits_for_memory"])
def test_paused_requests_cost_a_step_nothing(
    pause: Callable[[Scheduler, int], None], waits: bool
) -> None:
    costs = []
    for amount in (10, 1000):
        num_blocks = 24 + 2 * amount
        scheduler = scheduler_of(num_blocks=num_blocks, max_num_seqs=9, max_model_len=10_000)
        pause(scheduler, amount)
        decoding(scheduler, 8)
        if waits:  # for more than all of the paused ones could give
            scheduler.add(Sequence("big", [5] * (4 * num_blocks - 4), max_tokens=1))
        costs.append(lines_of_a_step(scheduler))
        assert (scheduler.num_paused, scheduler.num_waiting) == (amount, waits)
        assert scheduler.num_preemptions == 0
    assert costs[0] == costs[1]


def test_ending_a_waiting_request_does_not_search_for_it() -> None:
    costs = []
    for amount in (100, 5000):
        scheduler = decoding(scheduler_of(), 8)
        add_waiting(scheduler, amount)
        for i in range(amount // 2):
            scheduler.finish(f"wait{i * 2 + 1}", "cancelled")
        costs.append(lines_of_a_step(scheduler))
        assert scheduler.num_waiting == amount // 2
    assert costs[0] == costs[1]


def test_a_decode_step_is_linear_in_running_sequences_with_a_small_factor() -> None:
    costs = {
        running: lines_of_a_step(
            decoding(scheduler_of(max_num_seqs=512, max_num_batched_tokens=4096), running)
        )
        for running in (100, 200)
    }
    per_sequence = (costs[200] - costs[100]) / 100
    assert per_sequence <= 25


def test_a_decode_does_not_get_dearer_with_its_context() -> None:
    costs = []
    for length in (9, 2001):
        scheduler = scheduler_of(max_num_batched_tokens=4096)
        scheduler.add(Sequence("a", range(length), max_tokens=100))
        step(scheduler)
        costs.append([lines_of_a_step(scheduler) for _ in range(8)])
    assert costs[0] == costs[1]
