"""The scheduler's rules, one by one, and the faults that users of other engines reported."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from fullbore_backend.config import SchedulerConfig
from fullbore_backend.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    QueueFullError,
)
from fullbore_backend.scheduler import Batch, Scheduler, Sequence, WaitingQueue
from fullbore_backend.scheduler.scheduler import MAX_DEFERRED
from fullbore_backend.scheduler.waiting import AGING

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


def step(scheduler: Scheduler, token: int = TOKEN) -> Batch:
    """Schedule and apply one step; there must be work."""
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.apply(batch, [token if chunk.samples else None for chunk in batch.chunks])
    return batch


def run(scheduler: Scheduler, max_steps: int = 1000) -> list[Batch]:
    """Step until nothing is left."""
    batches = []
    while scheduler.has_work():
        batches.append(step(scheduler))
        assert len(batches) <= max_steps, "it does not end"
    return batches


def add(
    scheduler: Scheduler,
    name: str,
    prompt: list[int],
    max_tokens: int | None = 1,
    **options: object,
) -> Sequence:
    sequence = Sequence(name, prompt, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    scheduler.add(sequence)
    return sequence


def work(batch: Batch) -> dict[str, tuple[int, int]]:
    """(start, number of tokens) by request."""
    return {c.sequence.request_id: (c.start, c.num_tokens) for c in batch.chunks}


def distinct(length: int, salt: int) -> list[int]:
    """A prompt that shares no block with one of another salt."""
    return [1000 * (salt + 1) + i for i in range(length)]


def assert_idle(scheduler: Scheduler) -> None:
    assert scheduler.schedule() is None
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert scheduler.blocks.num_used == 0
    assert scheduler.prefixes.num_announced == 0


# Admission


def test_nothing_to_do() -> None:
    scheduler = scheduler_of()
    assert not scheduler.has_work()
    assert_idle(scheduler)


@pytest.mark.parametrize(
    "name",
    [
        "num_blocks",
        "block_size",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_waiting",
    ],
)
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        Scheduler(SchedulerConfig(**({"num_blocks": 1} | {name: 0})))


def test_an_empty_prompt_is_refused() -> None:
    scheduler = scheduler_of()
    with pytest.raises(InvalidRequestError, match="no tokens") as caught:
        add(scheduler, "a", [])
    assert caught.value.param == "prompt"
    assert not scheduler.has_work()


def test_an_id_in_use_is_refused_and_one_no_longer_in_use_is_not() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", [1])
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        add(scheduler, "a", [1])
    run(scheduler)
    add(scheduler, "a", [1])


@pytest.mark.parametrize("bad", [-1, 2**32, "x", 1.5], ids=repr)
def test_what_is_no_token_id_is_refused(bad: object) -> None:
    scheduler = scheduler_of()
    with pytest.raises(InvalidRequestError, match="no token id"):
        add(scheduler, "a", [1, 2, 3, bad])  # type: ignore[list-item]
    assert not scheduler.has_work()


def test_a_prompt_that_fills_the_context_is_refused_with_the_flag_that_helps() -> None:
    scheduler = scheduler_of(max_model_len=10)
    with pytest.raises(ContextLengthError, match=r"10 tokens.*--max-model-len") as caught:
        add(scheduler, "a", distinct(10, 0))
    assert caught.value.param == "prompt"
    sequence = add(scheduler, "b", distinct(9, 0), max_tokens=None)
    run(scheduler)
    assert (sequence.num_output_tokens, sequence.finish_reason) == (1, "length")


def test_a_prompt_that_can_never_fit_the_pool_is_refused_instead_of_waiting_forever() -> None:
    scheduler = scheduler_of(num_blocks=2, block_size=4)
    with pytest.raises(ContextLengthError, match=r"holds 8\..*--kv-cache-memory"):
        add(scheduler, "a", distinct(9, 0))
    assert not scheduler.has_work()


def test_check_refuses_what_add_would() -> None:
    scheduler = scheduler_of(num_blocks=2, block_size=4, max_model_len=20)
    scheduler.check(8)
    for length, error in [
        (0, InvalidRequestError),
        (9, ContextLengthError),
        (20, ContextLengthError),
    ]:
        with pytest.raises(error):
            scheduler.check(length)


def test_a_full_queue_refuses_and_takes_again_when_there_is_room() -> None:
    scheduler = scheduler_of(max_waiting=2)
    add(scheduler, "a", [1])
    add(scheduler, "b", [2])
    with pytest.raises(QueueFullError, match="2 requests wait") as caught:
        add(scheduler, "c", [3])
    assert caught.value.retry_after > 0
    step(scheduler)
    add(scheduler, "c", [3])
    run(scheduler)
    assert_idle(scheduler)


@pytest.mark.parametrize("prompt", [1, 3, 4])
def test_a_pool_of_one_block_serves_one_request_to_its_brim(prompt: int) -> None:
    scheduler = scheduler_of(num_blocks=1, block_size=4)
    sequences = [add(scheduler, str(i), distinct(prompt, i), max_tokens=None) for i in range(3)]
    run(scheduler)
    # The last token is only sampled, so it needs no slot.
    assert [s.num_tokens for s in sequences] == [5, 5, 5]
    assert {s.finish_reason for s in sequences} == {"length"}
    assert scheduler.num_preemptions == 0
    assert_idle(scheduler)


def test_admission_leaves_a_block_for_each_running_sequence() -> None:
    scheduler = scheduler_of(num_blocks=5, block_size=4)
    add(scheduler, "a", distinct(4, 0), max_tokens=8)
    add(scheduler, "b", distinct(16, 1))
    add(scheduler, "c", distinct(4, 2))
    assert work(step(scheduler)) == {"a": (0, 4)}  # b would leave a no block to grow into
    assert [s.request_id for s in scheduler.waiting] == ["b", "c"]  # and c is held back by b
    run(scheduler)
    assert scheduler.num_preemptions == 0


def test_a_big_prompt_is_not_overtaken_by_an_endless_stream_of_small_ones() -> None:
    scheduler = scheduler_of(num_blocks=8, block_size=4, max_num_seqs=4)
    for i in range(4):
        add(scheduler, f"small{i}", distinct(4, i), max_tokens=3 + i)
    step(scheduler)
    big = add(scheduler, "big", distinct(32, 50))
    for i in count(4):
        add(scheduler, f"small{i}", distinct(4, i), max_tokens=3)
        step(scheduler)
        if big.is_finished:
            break
        assert i < 30, "the big prompt starves"


# The budget


def test_a_long_prompt_is_computed_in_parts_of_the_budget() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=10)
    sequence = add(scheduler, "a", distinct(25, 0), max_tokens=2)
    batches = run(scheduler)
    assert [work(b)["a"] for b in batches] == [(0, 10), (10, 10), (20, 5), (25, 1)]
    assert [b.chunks[0].samples for b in batches] == [False, False, True, True]
    assert [b.chunks[0].end for b in batches] == [10, 20, 25, 26]
    assert sequence.output_token_ids == [TOKEN, TOKEN]


def test_a_long_prefill_stalls_no_decode() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8)
    decoding = [add(scheduler, f"d{i}", distinct(2, i), max_tokens=30) for i in range(3)]
    step(scheduler)
    add(scheduler, "long", distinct(100, 9))
    for produced in range(2, 22):
        batch = step(scheduler)
        assert batch.num_tokens == 8
        assert [s.num_output_tokens for s in decoding] == [produced] * 3
        assert work(batch)["long"] == ((produced - 2) * 5, 5)


def test_prompts_are_computed_in_order_and_fill_the_budget() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=10)
    for i in range(3):
        add(scheduler, str(i), distinct(7, i))
    assert [work(b) for b in run(scheduler)] == [
        {"0": (0, 7), "1": (0, 3)},
        {"1": (3, 4), "2": (0, 6)},
        {"2": (6, 1)},
    ]


def test_more_seats_than_budget_still_gives_each_running_one_its_token() -> None:
    scheduler = scheduler_of(max_num_seqs=100, max_num_batched_tokens=3)
    sequences = [add(scheduler, str(i), [i], max_tokens=5) for i in range(7)]
    while scheduler.has_work():
        running = scheduler.running
        assert len(running) <= 3
        assert set(running) <= {c.sequence for c in step(scheduler).chunks}
    assert all(s.num_output_tokens == 5 for s in sequences)


def test_at_most_max_num_seqs_run() -> None:
    scheduler = scheduler_of(max_num_seqs=2)
    for i in range(5):
        add(scheduler, str(i), [i], max_tokens=2)
    assert [len(b.chunks) for b in run(scheduler)] == [2, 2, 2, 2, 1, 1]


# Ends


def test_a_stop_token_ends_the_output_and_is_part_of_it() -> None:
    scheduler = scheduler_of()
    sequence = add(scheduler, "a", [1], max_tokens=9, stop_token_ids=frozenset({5}))
    step(scheduler)
    batch = scheduler.schedule()
    assert batch is not None
    assert scheduler.apply(batch, [5]) == [sequence]
    assert sequence.output_token_ids == [TOKEN, 5]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", 5)
    assert sequence.is_finished
    assert_idle(scheduler)


def test_stop_tokens_are_ignored_before_min_tokens() -> None:
    scheduler = scheduler_of()
    sequence = add(
        scheduler, "a", [1], max_tokens=9, min_tokens=3, stop_token_ids=frozenset({TOKEN})
    )
    run(scheduler)
    assert sequence.num_output_tokens == 4
    assert sequence.finish_reason == "stop"


def test_a_stop_token_that_is_also_the_last_one_counts_as_a_stop() -> None:
    scheduler = scheduler_of()
    sequence = add(scheduler, "a", [1], max_tokens=1, stop_token_ids=frozenset({TOKEN}))
    run(scheduler)
    assert sequence.finish_reason == "stop"


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(3, 3), (None, 15), (100, 15), (0, 1)], ids=str
)
def test_length_is_the_least_of_max_tokens_and_context(
    max_tokens: int | None, expected: int
) -> None:
    scheduler = scheduler_of(max_model_len=20)
    sequence = add(scheduler, "a", [1, 2, 3, 4, 5], max_tokens=max_tokens)
    run(scheduler)
    assert sequence.num_output_tokens == expected
    assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)


def test_an_unknown_request_is_not_finished() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", [1])
    run(scheduler)
    assert not scheduler.finish("a", "cancelled")
    assert not scheduler.finish("b", "cancelled")


def test_tokens_must_match_the_chunks() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", [1])
    batch = scheduler.schedule()
    assert batch is not None
    with pytest.raises(ValueError, match="zip"):
        scheduler.apply(batch, [])
    with pytest.raises(AssertionError):
        scheduler.apply(batch, [None])


# Cancellation


def cancel_waiting(scheduler: Scheduler) -> None:
    add(scheduler, "a", distinct(12, 0), max_tokens=4)
    scheduler.finish("a", "cancelled")


def cancel_mid_prefill(scheduler: Scheduler) -> None:
    add(scheduler, "a", distinct(100, 0), max_tokens=4)
    step(scheduler)
    scheduler.finish("a", "cancelled")


def cancel_decoding(scheduler: Scheduler) -> None:
    add(scheduler, "a", distinct(12, 0), max_tokens=4)
    step(scheduler)
    step(scheduler)
    scheduler.finish("a", "cancelled")


def cancel_in_flight(scheduler: Scheduler) -> None:
    sequence = add(scheduler, "a", distinct(12, 0), max_tokens=4)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.finish("a", "cancelled")
    add(scheduler, "a", distinct(12, 0), max_tokens=4)  # the same id, at once
    assert scheduler.apply(batch, [TOKEN]) == []
    assert sequence.output_token_ids == []
    assert len(scheduler.prefixes) == 0  # what nobody vouches for is not shared
    scheduler.finish("a", "cancelled")


def cancel_deferred(scheduler: Scheduler) -> None:
    add(scheduler, "a", distinct(100, 0))
    add(scheduler, "b", distinct(100, 0))
    step(scheduler)
    assert scheduler.num_waiting == 1
    scheduler.finish("b", "cancelled")
    scheduler.finish("a", "cancelled")


def cancel_preempted(scheduler: Scheduler) -> None:
    for i in range(2):
        add(scheduler, str(i), distinct(4 * 15, i), max_tokens=100)
    while not scheduler.num_preemptions:
        step(scheduler)
    [preempted] = scheduler.waiting
    scheduler.finish(preempted.request_id, "cancelled")
    scheduler.finish("0", "cancelled")


@pytest.mark.parametrize(
    "scene",
    [
        cancel_waiting,
        cancel_mid_prefill,
        cancel_decoding,
        cancel_in_flight,
        cancel_deferred,
        cancel_preempted,
    ],
    ids=lambda scene: scene.__name__,
)
def test_a_cancelled_request_leaves_nothing(scene: Callable[[Scheduler], None]) -> None:
    scheduler = scheduler_of(num_blocks=32)
    scene(scheduler)
    assert not scheduler.has_work()
    assert_idle(scheduler)
    assert len(scheduler.prefixes) == scheduler.blocks.num_cached


def test_a_batch_under_way_may_still_read_the_blocks_of_a_cancelled_one() -> None:
    scheduler = scheduler_of()
    sequence = add(scheduler, "a", distinct(12, 0))
    scheduler.schedule()
    table = sequence.block_ids
    scheduler.finish("a", "cancelled")
    assert table == [0, 1, 2]
    assert sequence.block_ids == []


def test_a_failed_step_ends_its_requests_and_the_others_go_on() -> None:
    scheduler = scheduler_of(max_num_seqs=2)
    sequences = [add(scheduler, str(i), distinct(9, i), max_tokens=2) for i in range(4)]
    batch = scheduler.schedule()
    assert batch is not None
    for chunk in batch.chunks:
        scheduler.finish(chunk.sequence.request_id, "error")
    run(scheduler)
    assert [s.finish_reason for s in sequences] == ["error", "error", "length", "length"]
    assert_idle(scheduler)


# Prefix cache


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_a_fully_cached_prompt_still_computes_its_last_block(num_blocks: int) -> None:
    scheduler = scheduler_of()
    prompt = distinct(4 * num_blocks, 0)
    add(scheduler, "a", prompt)
    run(scheduler)
    again = add(scheduler, "b", prompt)
    batch = step(scheduler)
    assert work(batch)["b"] == (4 * (num_blocks - 1), 4)
    assert batch.chunks[0].samples
    assert again.num_cached == 4 * (num_blocks - 1)
    assert_idle(scheduler)


def test_block_size_one_computes_exactly_the_last_token() -> None:
    scheduler = scheduler_of(block_size=1)
    add(scheduler, "a", distinct(9, 0))
    run(scheduler)
    add(scheduler, "b", distinct(9, 0))
    assert work(step(scheduler))["b"] == (8, 1)


def test_the_next_turn_of_a_conversation_reuses_what_was_generated() -> None:
    scheduler = scheduler_of()
    first = add(scheduler, "a", distinct(6, 0), max_tokens=7)
    run(scheduler)
    # 13 tokens; the last was never computed: three full blocks.
    second = add(scheduler, "b", [*first.token_ids, 1, 2, 3])
    run(scheduler)
    assert second.num_cached == 12
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (6 + 16, 12)


def test_salted_requests_share_only_with_their_own_salt() -> None:
    scheduler = scheduler_of()
    cached = []
    for i, salt in enumerate([None, "a", "b", "a", None]):
        sequence = add(scheduler, str(i), distinct(9, 0), cache_salt=salt)
        run(scheduler)
        cached.append(sequence.num_cached)
    assert cached == [0, 0, 0, 8, 8]


def test_without_prefix_caching_nothing_is_kept_or_counted() -> None:
    scheduler = scheduler_of(prefix_caching=False)
    for name in "ab":
        sequence = add(scheduler, name, distinct(9, 0), max_tokens=9)
        run(scheduler)
        assert sequence.num_cached == 0
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (0, 0)
    assert scheduler.blocks.num_cached == len(scheduler.prefixes) == 0


def test_cached_blocks_on_the_free_list_are_not_counted_twice() -> None:
    """A hit that nobody holds takes a free block too; counting it as free as well overcommits."""
    scheduler = scheduler_of(num_blocks=6, block_size=4)
    add(scheduler, "a", distinct(16, 0))
    run(scheduler)
    add(scheduler, "b", distinct(4, 1), max_tokens=20)
    step(scheduler)
    again = add(scheduler, "c", [*distinct(16, 0), 1])  # 4 hits and 1 new, 5 free, 1 set aside
    step(scheduler)
    assert again.block_ids == []
    run(scheduler)
    assert scheduler.num_preemptions == 0


def test_equal_prompts_added_at_once_are_computed_once() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=16, num_blocks=64)
    prompt = distinct(42, 0)
    sequences = [add(scheduler, str(i), prompt, max_tokens=2) for i in range(6)]
    batches = run(scheduler)
    prefilled = sum(c.num_tokens for b in batches for c in b.chunks) - len(sequences)
    assert prefilled == 42 + 5 * 2
    assert [s.num_cached for s in sequences] == [0] + [40] * 5


def test_only_those_that_share_the_next_block_wait_for_it() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=16)
    shared = distinct(8, 0)
    add(scheduler, "leader", shared + distinct(40, 1))
    add(scheduler, "forked", shared + distinct(8, 2))
    add(scheduler, "other", distinct(8, 3))
    assert set(work(step(scheduler))) == {"leader"}
    assert set(work(step(scheduler))) == {"leader"}
    assert work(step(scheduler)) == {"leader": (32, 16)}
    batch = step(scheduler)
    assert work(batch)["forked"] == (8, 8)
    assert work(batch)["other"] == (0, 8)


def test_others_pass_those_that_wait_for_a_block_but_keep_behind_them_later() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=16)
    prompt = distinct(17, 0)
    add(scheduler, "leader", prompt[:9])
    add(scheduler, "follower", prompt)
    add(scheduler, "other", distinct(4, 1))
    assert set(work(step(scheduler))) == {"leader", "other"}
    assert work(step(scheduler)) == {"follower": (8, 9)}


@pytest.mark.parametrize("ending", ["cancelled", "error", "preempted"])
def test_followers_go_on_when_the_leader_does_not(ending: str) -> None:
    scheduler = scheduler_of(num_blocks=16, max_num_batched_tokens=8)
    if ending == "preempted":
        add(scheduler, "old", distinct(3, 5), max_tokens=50)
        step(scheduler)
    add(scheduler, "leader", distinct(48, 0))
    follower = add(scheduler, "follower", distinct(48, 0))
    step(scheduler)
    assert follower in scheduler.waiting
    if ending != "preempted":
        scheduler.finish("leader", ending)  # type: ignore[arg-type]
        assert "follower" in work(step(scheduler))
    run(scheduler)
    assert follower.finish_reason == "length"
    assert_idle(scheduler)


@pytest.mark.parametrize("num_followers", [MAX_DEFERRED - 1, MAX_DEFERRED])
def test_only_a_bounded_number_of_followers_is_passed_over(num_followers: int) -> None:
    scheduler = scheduler_of(max_num_batched_tokens=64, max_num_seqs=100)
    add(scheduler, "leader", distinct(20, 0))
    for i in range(num_followers):
        add(scheduler, f"follower{i}", distinct(20, 0))
    other = add(scheduler, "other", distinct(3, 1))
    assert ("other" in work(step(scheduler))) == (num_followers < MAX_DEFERRED)
    run(scheduler)
    assert other.is_finished


def test_memory_is_bounded_by_the_pool_however_many_salts_and_prompts_come() -> None:
    scheduler = scheduler_of(num_blocks=8)
    for i in range(300):
        add(scheduler, str(i), distinct(9, i), cache_salt=f"user{i}", max_tokens=3)
        if i % 3 == 0:
            step(scheduler)
            scheduler.finish(str(i), "cancelled")
        run(scheduler)
        assert len(scheduler.prefixes) == scheduler.blocks.num_cached <= 8
    assert_idle(scheduler)


# Preemption


def test_the_last_admitted_is_preempted_and_comes_back_first() -> None:
    scheduler = scheduler_of(num_blocks=8, block_size=4)
    sequences = [add(scheduler, str(i), distinct(8, i), max_tokens=20) for i in range(2)]
    late = add(scheduler, "late", distinct(20, 9))
    while True:
        batch = step(scheduler)
        if batch.preempted:
            break
    assert batch.preempted == (sequences[1],)
    assert (sequences[1].num_computed, sequences[1].block_ids) == (0, [])
    assert scheduler.waiting == (sequences[1], late)
    assert (scheduler.num_preemptions, sequences[1].num_preemptions) == (1, 1)
    run(scheduler)
    assert [s.num_output_tokens for s in sequences] == [20, 20]
    assert_idle(scheduler)


def test_the_least_urgent_is_preempted_before_the_last_admitted() -> None:
    scheduler = scheduler_of(num_blocks=6, block_size=4)
    lazy = add(scheduler, "lazy", distinct(8, 0), max_tokens=12, priority=5)
    step(scheduler)
    urgent = add(scheduler, "urgent", distinct(4, 1), max_tokens=12)
    run(scheduler)
    assert (urgent.num_preemptions, lazy.num_preemptions) == (0, 1)


def test_a_preempted_sequence_resumes_from_its_cached_blocks_with_right_counts() -> None:
    scheduler = scheduler_of(num_blocks=8, block_size=4)
    kept = add(scheduler, "kept", distinct(12, 0), max_tokens=12)
    victim = add(scheduler, "victim", distinct(12, 1), max_tokens=12)
    while not scheduler.num_preemptions:
        step(scheduler)
    tokens = victim.num_tokens
    scheduler.finish("kept", "cancelled")
    assert kept.num_preemptions == 0
    start, length = work(step(scheduler))["victim"]
    assert start > 0
    assert start % 4 == 0
    assert start + length == tokens
    assert victim.num_cached == 0  # what the first admission found
    assert scheduler.prefix_hits == 0
    run(scheduler)
    assert victim.num_output_tokens == 12
    assert_idle(scheduler)


@pytest.mark.parametrize("num_blocks", [5, 6, 9])
@pytest.mark.parametrize("block_size", [1, 4])
def test_under_lasting_pressure_every_step_advances_the_oldest(
    num_blocks: int, block_size: int
) -> None:
    scheduler = scheduler_of(num_blocks=num_blocks, block_size=block_size)
    length = (num_blocks - 1) * block_size
    for i in range(10):
        add(scheduler, str(i), distinct(min(3, length), i), max_tokens=length)
    while scheduler.has_work():
        oldest = scheduler.running[:1]
        scheduled = {c.sequence for c in step(scheduler).chunks}
        assert scheduled.issuperset(oldest)
    assert_idle(scheduler)


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    scheduler = scheduler_of(num_blocks=16, block_size=4, max_num_seqs=4)
    for i in range(4):
        add(scheduler, str(i), distinct(8, i), max_tokens=20)
    for i in range(4):
        add(scheduler, f"tiny{i}", [i], priority=-1)
    seen = False
    while scheduler.has_work():
        waiting = set(scheduler.waiting)
        batch = step(scheduler)
        if batch.preempted:
            seen = True
            assert waiting.isdisjoint(c.sequence for c in batch.chunks)
    assert seen


# Order


def test_lower_priorities_go_first_and_equal_ones_in_order_of_arrival() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    order = [("a", 1), ("b", 0), ("c", 1), ("d", -3), ("e", 0)]
    for i, (name, priority) in enumerate(order):
        add(scheduler, name, distinct(2, i), priority=priority)
    assert [s.request_id for s in scheduler.waiting] == ["d", "b", "e", "a", "c"]
    assert [next(iter(work(b))) for b in run(scheduler)] == ["d", "b", "e", "a", "c"]


def test_an_endless_stream_of_urgent_requests_starves_nobody() -> None:
    scheduler = scheduler_of(max_num_seqs=2, num_blocks=6)
    lazy = [add(scheduler, f"lazy{i}", distinct(6, i), max_tokens=6, priority=9) for i in range(3)]
    for i in range(20 * AGING):
        add(scheduler, f"a{i}", distinct(3, i), max_tokens=3)
        add(scheduler, f"b{i}", distinct(3, i), max_tokens=3)
        while scheduler.num_waiting > 6:
            step(scheduler)
        if all(s.is_finished for s in lazy):
            return
    pytest.fail("the least urgent requests starve")


def queue_of(*priorities: int) -> tuple[WaitingQueue, list[Sequence]]:
    queue = WaitingQueue()
    sequences = [
        Sequence(str(i), [1], max_tokens=1, priority=priority)
        for i, priority in enumerate(priorities)
    ]
    for sequence in sequences:
        queue.push(sequence)
    return queue, sequences


def admit(queue: WaitingQueue, amount: int) -> None:
    """Admit urgent sequences that came after all others."""
    for i in range(amount):
        sequence = Sequence(f"urgent{i}", [1], max_tokens=1, priority=-9)
        queue.push(sequence)
        queue.admit(sequence)


def test_promotion_takes_the_oldest_once_it_is_time_and_only_one() -> None:
    queue, (first, second, third) = queue_of(1, 2, 0)
    admit(queue, AGING - 1)
    queue.promote()
    assert list(queue) == [third, first, second]
    admit(queue, 1)
    queue.promote()
    queue.promote()
    assert list(queue) == [first, third, second]
    queue.admit(first)
    admit(queue, AGING - 1)
    queue.promote()
    assert list(queue) == [second, third]


def test_promotion_is_saved_up_while_the_oldest_is_first_anyway() -> None:
    queue, (first, second, third) = queue_of(0, 2, 1)
    admit(queue, AGING)
    queue.promote()
    assert list(queue) == [first, third, second]
    queue.admit(first)
    queue.promote()
    assert list(queue) == [second, third]


def test_a_preempted_sequence_counts_as_the_oldest() -> None:
    queue, (first, second, third) = queue_of(2, 2, 0)
    queue.admit(second)
    queue.push_front(second)
    assert list(queue) == [third, second, first]
    admit(queue, AGING)
    queue.promote()
    assert list(queue) == [second, third, first]
    assert len(queue) == 3


def test_an_empty_queue_promotes_nobody() -> None:
    queue, _ = queue_of()
    admit(queue, AGING)
    queue.promote()
    assert list(queue) == []


def test_identity_and_repr_of_a_sequence() -> None:
    one, other = (Sequence("a", [1, 2], max_tokens=1) for _ in range(2))
    assert one != other
    assert repr(one) == "<Sequence 'a': 2 tokens, 0 computed>"
