"""Paused sequences: what they keep, who takes it from them, and that they hold up nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fullbore_backend.config import SchedulerConfig
from fullbore_backend.scheduler import Batch, Scheduler, Sequence

TOKEN = 7
"""What the model in these tests answers, always."""


def scheduler_of(num_blocks: int = 64, **settings: int | bool) -> Scheduler:
    defaults: dict[str, int | bool] = {
        "block_size": 4,
        "max_model_len": 1000,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return Scheduler(SchedulerConfig(num_blocks=num_blocks, **(defaults | settings)))  # type: ignore[arg-type]


def step(scheduler: Scheduler) -> Batch:
    """Schedule and apply one step; there must be work."""
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.apply(batch, [TOKEN if chunk.samples else None for chunk in batch.chunks])
    return batch


def run(scheduler: Scheduler, max_steps: int = 1000) -> list[Batch]:
    """Step until nothing is left to do."""
    batches = []
    while scheduler.has_work():
        batches.append(step(scheduler))
        assert len(batches) <= max_steps, "it does not end"
    return batches


def distinct(length: int, salt: int) -> list[int]:
    """A prompt that shares no block with one of another salt."""
    return [1000 * (salt + 1) + i for i in range(length)]


def add(
    scheduler: Scheduler,
    name: str,
    prompt: list[int],
    max_tokens: int | None = 20,
    *,
    priority: int = 0,
) -> Sequence:
    sequence = Sequence(name, prompt, max_tokens=max_tokens, priority=priority)
    scheduler.add(sequence)
    return sequence


def names(batch: Batch) -> list[str]:
    return [chunk.sequence.request_id for chunk in batch.chunks]


def assert_idle(scheduler: Scheduler) -> None:
    assert scheduler.schedule() is None
    assert not scheduler.has_work()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_paused) == (0, 0, 0)
    assert scheduler.blocks.num_used == 0
    assert scheduler.prefixes.num_announced == 0


# Being paused


def test_a_paused_sequence_keeps_its_blocks_computes_nothing_and_goes_on_where_it_was() -> None:
    scheduler = scheduler_of()
    paused = add(scheduler, "paused", distinct(9, 0))
    other = add(scheduler, "other", distinct(9, 1))
    step(scheduler)
    assert scheduler.pause("paused")
    blocks, tokens = list(paused.block_ids), paused.num_tokens
    for _ in range(3):
        assert names(step(scheduler)) == ["other"]
    assert (paused.block_ids, paused.num_tokens) == (blocks, tokens)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_paused) == (1, 0, 1)
    assert scheduler.resume("paused")
    batch = step(scheduler)
    assert names(batch) == ["paused", "other"]  # in its old place
    assert batch.chunks[0].num_tokens == 1  # and nothing is computed again
    run(scheduler)
    assert [s.num_output_tokens for s in (paused, other)] == [20, 20]
    assert scheduler.num_preemptions == 0
    assert_idle(scheduler)


def test_with_only_paused_sequences_left_there_is_no_work() -> None:
    scheduler = scheduler_of()
    for i in range(3):
        add(scheduler, str(i), distinct(9, i))
    step(scheduler)
    for i in range(3):
        scheduler.pause(str(i))
    assert not scheduler.has_work()
    assert scheduler.schedule() is None
    scheduler.resume("1")
    assert scheduler.has_work()
    assert {name for batch in run(scheduler) for name in names(batch)} == {"1"}


def test_pausing_and_resuming_twice_is_the_same_as_once() -> None:
    scheduler = scheduler_of()
    sequence = add(scheduler, "a", distinct(9, 0), max_tokens=3)
    step(scheduler)
    assert scheduler.resume("a")
    assert scheduler.pause("a")
    assert scheduler.pause("a")
    assert scheduler.paused == (sequence,)
    assert scheduler.resume("a")
    assert scheduler.resume("a")
    run(scheduler)
    assert sequence.num_output_tokens == 3
    assert_idle(scheduler)


def test_what_is_not_live_is_neither_paused_nor_resumed() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", [1], max_tokens=1)
    run(scheduler)
    for name in ("a", "b"):
        assert not scheduler.pause(name)
        assert not scheduler.resume(name)


def test_a_prompt_half_computed_is_paused_and_goes_on() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8)
    sequence = add(scheduler, "a", distinct(20, 0), max_tokens=2)
    step(scheduler)
    scheduler.pause("a")
    assert scheduler.schedule() is None
    scheduler.resume("a")
    starts = [batch.chunks[0].start for batch in run(scheduler)]
    assert starts == [8, 16, 20]
    assert sequence.num_output_tokens == 2
    assert_idle(scheduler)


# Holding up nobody


def test_readers_that_are_away_take_no_seats() -> None:
    scheduler = scheduler_of(max_num_seqs=4)
    away = [add(scheduler, f"away{i}", distinct(5, i)) for i in range(4)]
    step(scheduler)
    for sequence in away:
        scheduler.pause(sequence.request_id)
    present = [add(scheduler, f"present{i}", distinct(5, 9 + i)) for i in range(8)]
    run(scheduler)
    assert all(sequence.is_finished for sequence in present)
    assert all(sequence.block_ids for sequence in away)  # nobody needed their memory
    for sequence in away:
        scheduler.resume(sequence.request_id)
    run(scheduler)
    assert {s.num_output_tokens for s in away} == {20}
    assert_idle(scheduler)


def test_a_paused_sequence_has_no_block_set_aside() -> None:
    scheduler = scheduler_of(num_blocks=5)
    add(scheduler, "paused", distinct(4, 0))
    step(scheduler)
    add(scheduler, "waiting", distinct(16, 1), max_tokens=1)
    assert names(step(scheduler)) == ["paused"]  # 4 blocks for it and 1 set aside are too many
    scheduler.pause("paused")
    assert names(step(scheduler)) == ["waiting"]


def test_a_paused_waiting_sequence_does_not_hold_back_those_behind_it() -> None:
    scheduler = scheduler_of(num_blocks=5)
    running = add(scheduler, "running", distinct(4, 0), max_tokens=8)
    step(scheduler)
    big = add(scheduler, "big", distinct(16, 1), max_tokens=1)
    add(scheduler, "small", distinct(4, 2), max_tokens=1)
    assert names(step(scheduler)) == ["running"]
    scheduler.pause("big")
    assert names(step(scheduler)) == ["running", "small"]
    run(scheduler)
    assert running.is_finished
    assert not big.is_finished
    scheduler.resume("big")
    run(scheduler)
    assert big.is_finished
    assert_idle(scheduler)


def test_a_sequence_that_never_ran_comes_back_behind_the_others_of_its_rank() -> None:
    scheduler = scheduler_of()
    for i in range(3):
        add(scheduler, str(i), distinct(4, i))
    late = add(scheduler, "late", distinct(4, 3), priority=1)
    scheduler.pause("0")
    scheduler.resume("0")
    assert [s.request_id for s in scheduler.waiting] == ["1", "2", "0", late.request_id]


@pytest.mark.parametrize("ending", ["paused", "resumed"])
def test_followers_do_not_wait_for_a_paused_leader(ending: str) -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8)
    leader = add(scheduler, "leader", distinct(24, 0), max_tokens=2)
    follower = add(scheduler, "follower", distinct(24, 0), max_tokens=2)
    assert names(step(scheduler)) == ["leader"]
    scheduler.pause("leader")
    assert scheduler.prefixes.num_announced == 0
    batch = step(scheduler)
    assert names(batch) == ["follower"]
    assert batch.chunks[0].start == 8  # what the leader has computed is not computed again
    if ending == "resumed":
        scheduler.resume("leader")
    run(scheduler)
    assert follower.num_output_tokens == 2
    scheduler.resume("leader")
    run(scheduler)
    assert leader.num_output_tokens == 2
    assert_idle(scheduler)


def test_a_resumed_leader_is_waited_for_again() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=16)
    add(scheduler, "leader", distinct(24, 0), max_tokens=1)
    step(scheduler)
    scheduler.pause("leader")
    scheduler.resume("leader")
    follower = add(scheduler, "follower", distinct(24, 0), max_tokens=1)
    batch = step(scheduler)
    assert (names(batch), batch.num_tokens) == (["leader"], 8)  # there was budget for both
    run(scheduler)
    assert follower.num_cached == 20


# Giving way


def test_the_one_paused_longest_ago_gives_way_first_and_before_any_that_runs() -> None:
    scheduler = scheduler_of(num_blocks=8)
    sequences = {n: add(scheduler, n, distinct(7, i), max_tokens=16) for i, n in enumerate("abc")}
    step(scheduler)
    scheduler.pause("b")  # neither the newest nor the oldest
    scheduler.pause("a")
    grower = sequences["c"]
    preempted: list[Sequence] = []
    while not grower.is_finished:
        preempted += step(scheduler).preempted
    assert preempted == [sequences["b"]]
    assert scheduler.paused == (sequences["a"], sequences["b"])
    assert (grower.num_preemptions, scheduler.num_preemptions) == (0, 1)
    scheduler.finish("a", "cancelled")
    scheduler.resume("b")
    run(scheduler)
    assert sequences["b"].num_output_tokens == 16
    assert_idle(scheduler)


def test_an_urgent_paused_sequence_gives_way_to_a_lazy_one_that_runs() -> None:
    scheduler = scheduler_of(num_blocks=6)
    urgent = add(scheduler, "urgent", distinct(12, 0), priority=-5)
    lazy = add(scheduler, "lazy", distinct(4, 1), max_tokens=16, priority=5)
    step(scheduler)
    scheduler.pause("urgent")
    run(scheduler)
    assert (urgent.num_preemptions, lazy.num_preemptions) == (1, 0)


def test_when_the_paused_have_nothing_left_the_last_admitted_gives_way() -> None:
    scheduler = scheduler_of(num_blocks=6)
    sequences = [add(scheduler, str(i), distinct(4, i)) for i in range(3)]
    step(scheduler)
    scheduler.pause("0")
    batches = run(scheduler)
    victims = [sequence.request_id for batch in batches for sequence in batch.preempted]
    assert victims[:2] == ["0", "2"]
    assert [s.is_finished for s in sequences] == [False, True, True]


def test_a_waiting_sequence_takes_the_blocks_of_paused_ones_as_far_as_it_needs_them() -> None:
    scheduler = scheduler_of(num_blocks=8)
    away = [add(scheduler, str(i), distinct(6, i)) for i in range(3)]
    step(scheduler)
    for sequence in away:
        scheduler.pause(sequence.request_id)
    add(scheduler, "big", distinct(16, 9), max_tokens=1)
    batch = step(scheduler)
    assert names(batch) == ["big"]
    assert batch.preempted == (away[0],)
    assert [bool(s.block_ids) for s in away] == [False, True, True]


def test_a_waiting_sequence_that_cannot_run_anyway_takes_nothing() -> None:
    scheduler = scheduler_of(num_blocks=8)
    add(scheduler, "running", distinct(16, 0))
    away = add(scheduler, "away", distinct(4, 1))
    step(scheduler)
    for _ in range(3):  # what it holds counts once, however often it was paused
        scheduler.pause("away")
        scheduler.resume("away")
    scheduler.pause("away")
    add(scheduler, "big", distinct(20, 2))
    batch = step(scheduler)
    assert (names(batch), batch.preempted) == (["running"], ())
    assert away.block_ids


def test_nobody_gives_way_for_one_whose_cached_blocks_would_take_the_memory_it_lacks() -> None:
    scheduler = scheduler_of(num_blocks=8)
    add(scheduler, "done", distinct(16, 0), max_tokens=1)
    run(scheduler)
    add(scheduler, "running", distinct(7, 1))
    away = add(scheduler, "away", distinct(4, 2))
    step(scheduler)
    scheduler.pause("away")
    # 5 are free and 1 can be had; 4 hits that nobody holds, 2 new ones and 1 set aside are 7.
    add(scheduler, "big", [*distinct(16, 0), *distinct(8, 3)], max_tokens=1)
    batch = step(scheduler)
    assert (names(batch), batch.preempted) == (["running"], ())
    assert away.block_ids


def test_a_paused_one_that_gives_way_to_a_decode_holds_back_no_admission() -> None:
    scheduler = scheduler_of(num_blocks=7)
    add(scheduler, "running", distinct(4, 0))
    away = add(scheduler, "away", distinct(19, 1))
    step(scheduler)
    step(scheduler)
    scheduler.pause("away")
    for _ in range(3):
        step(scheduler)
    assert scheduler.blocks.num_free == 0
    add(scheduler, "small", distinct(4, 2), max_tokens=1)
    batch = step(scheduler)
    assert (names(batch), batch.preempted) == (["running", "small"], (away,))


def test_blocks_that_a_paused_sequence_shares_are_not_mistaken_for_free_ones() -> None:
    """Giving way frees less than it seems to; the one that wanted the memory waits, intact."""
    scheduler = scheduler_of(num_blocks=10)
    prompt = distinct(17, 0)
    add(scheduler, "running", prompt, max_tokens=8)
    step(scheduler)
    away = add(scheduler, "away", prompt)  # 4 of its 5 blocks are those of the first
    step(scheduler)
    scheduler.pause("away")
    waiting = add(scheduler, "waiting", [*distinct(16, 0)[:8], *distinct(24, 1)], max_tokens=1)
    batch = step(scheduler)
    assert (names(batch), batch.preempted) == (["running"], (away,))
    assert (waiting.block_ids, waiting.num_computed) == ([], 0)
    run(scheduler)
    assert waiting.is_finished
    scheduler.resume("away")
    run(scheduler)
    assert away.num_output_tokens == 20
    assert_idle(scheduler)


def test_a_waiting_sequence_reuses_the_prefix_of_a_paused_one_that_gives_way_to_it() -> None:
    scheduler = scheduler_of(num_blocks=6)
    add(scheduler, "away", distinct(17, 0))
    step(scheduler)
    scheduler.pause("away")
    heir = add(scheduler, "heir", [*distinct(16, 0), *distinct(8, 1)], max_tokens=1)
    batch = step(scheduler)
    assert [s.request_id for s in batch.preempted] == ["away"]
    assert (batch.chunks[0].start, heir.num_cached) == (16, 16)


# Coming back


def test_one_that_lost_its_blocks_waits_off_the_queue_and_comes_back_in_front() -> None:
    scheduler = scheduler_of(num_blocks=8, max_num_seqs=1)
    away = add(scheduler, "away", distinct(9, 0))
    step(scheduler)
    scheduler.pause("away")
    add(scheduler, "big", distinct(24, 1), max_tokens=2)
    step(scheduler)
    assert away.block_ids == []
    assert (scheduler.num_waiting, scheduler.num_paused) == (0, 1)
    for i in range(3):
        add(scheduler, str(i), distinct(4, 2 + i))
    urgent = add(scheduler, "urgent", [1], priority=-1)
    scheduler.resume("away")
    assert scheduler.waiting[:2] == (urgent, away)
    run(scheduler)
    assert away.num_output_tokens == 20
    assert_idle(scheduler)


def test_without_a_seat_a_resumed_sequence_is_preempted_and_the_first_to_get_one() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    away = add(scheduler, "away", distinct(9, 0))
    step(scheduler)
    scheduler.pause("away")
    add(scheduler, "present", distinct(5, 1), max_tokens=2)
    add(scheduler, "later", distinct(5, 2), max_tokens=2)
    step(scheduler)
    scheduler.resume("away")
    assert away.block_ids == []
    assert [s.request_id for s in scheduler.waiting] == ["away", "later"]
    assert (away.num_preemptions, scheduler.num_preemptions) == (1, 1)
    step(scheduler)
    batch = step(scheduler)
    assert names(batch) == ["away"]
    assert batch.chunks[0].start == 8  # from the prefix cache
    run(scheduler)
    assert away.num_output_tokens == 20
    assert_idle(scheduler)


def test_never_more_run_than_the_budget_has_tokens() -> None:
    scheduler = scheduler_of(max_num_seqs=8, max_num_batched_tokens=2)
    sequences = [add(scheduler, str(i), [i], max_tokens=30) for i in range(6)]
    for _ in range(3):
        step(scheduler)
        for sequence in scheduler.running:
            scheduler.pause(sequence.request_id)
    for sequence in sequences:
        scheduler.resume(sequence.request_id)
    assert scheduler.num_running == 2
    run(scheduler)
    assert {s.num_output_tokens for s in sequences} == {30}


# Ends


def with_blocks(scheduler: Scheduler) -> None:
    add(scheduler, "a", distinct(9, 0))
    step(scheduler)
    scheduler.pause("a")


def half_computed(scheduler: Scheduler) -> None:
    add(scheduler, "a", distinct(90, 0))
    step(scheduler)
    scheduler.pause("a")


def never_run(scheduler: Scheduler) -> None:
    add(scheduler, "a", distinct(9, 0))
    scheduler.pause("a")


def without_blocks(scheduler: Scheduler) -> None:
    with_blocks(scheduler)
    add(scheduler, "big", distinct(4 * 31, 1), max_tokens=1)
    run(scheduler)
    assert scheduler.num_preemptions == 1


def resumed_without_blocks(scheduler: Scheduler) -> None:
    without_blocks(scheduler)
    scheduler.resume("a")


def resumed_with_blocks(scheduler: Scheduler) -> None:
    with_blocks(scheduler)
    scheduler.resume("a")


@pytest.mark.parametrize(
    "scene",
    [
        with_blocks,
        half_computed,
        never_run,
        without_blocks,
        resumed_without_blocks,
        resumed_with_blocks,
    ],
    ids=lambda scene: scene.__name__,
)
@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_a_request_ended_while_paused_leaves_nothing(
    scene: Callable[[Scheduler], None], reason: str
) -> None:
    scheduler = scheduler_of(num_blocks=32)
    scene(scheduler)
    assert scheduler.finish("a", reason)  # type: ignore[arg-type]
    assert not scheduler.resume("a")
    assert_idle(scheduler)
    assert len(scheduler.prefixes) == scheduler.blocks.num_cached
    add(scheduler, "a", distinct(9, 0), max_tokens=1)  # the id is free again
    run(scheduler)
