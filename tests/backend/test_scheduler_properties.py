"""The scheduler under random use, checked against a shadow of the KV cache.

The shadow records for every slot of the pool the salt and the whole token prefix that was computed
into it. Before a chunk runs, every slot in front of it must hold exactly its sequence's prefix:
that one check covers sharing, eviction, preemption, pausing, resumption and cancellation. Tokens
are a function of the prefix alone, so what a request generates must not depend on how it was
scheduled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from fullbore_backend.config import SchedulerConfig
from fullbore_backend.errors import ContextLengthError, QueueFullError
from fullbore_backend.scheduler import Batch, Scheduler, Sequence
from fullbore_backend.scheduler.waiting import PROMOTED

VOCABULARY = 3
SALTS = (None, "a")
FAMILIES = ((), (0,) * 9, (0,) * 4 + (1,) * 5, (2, 1, 0) * 4)


def next_token(tokens: Iterable[int]) -> int:
    """A model: deterministic in the prefix, and repetitive so that outputs are shared too."""
    listed = list(tokens)
    return (sum(listed[-3:]) + len(listed) // 4) % VOCABULARY


def expected_output(sequence: Sequence, prompt: list[int], limit: int) -> tuple[list[int], str]:
    """What a request generates when it runs to its end, found without a scheduler."""
    tokens = list(prompt)
    while True:
        token = next_token(tokens)
        tokens.append(token)
        generated = len(tokens) - len(prompt)
        if token in sequence.stop_token_ids and generated > sequence.min_tokens:
            return tokens[len(prompt) :], "stop"
        if len(tokens) == limit:
            return tokens[len(prompt) :], "length"


class ShadowCache:
    """What a runner's KV pool would hold."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.size = scheduler.config.block_size
        self.slots: dict[tuple[int, int], tuple[str | None, tuple[int, ...]]] = {}

    def slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_ids[position // self.size], position % self.size

    def check(self, sequence: Sequence, end: int) -> None:
        for position in range(end):
            expected = (sequence.cache_salt, tuple(sequence.token_ids[: position + 1]))
            assert self.slots[self.slot(sequence, position)] == expected

    def run(self, batch: Batch) -> list[int | None]:
        """Read what each chunk relies on, write what it computes, return the sampled tokens."""
        for chunk in batch.chunks:
            self.check(chunk.sequence, chunk.start)
        written: Counter[tuple[int, int]] = Counter()
        tokens: list[int | None] = []
        for chunk in batch.chunks:
            known = chunk.sequence.token_ids
            for position in range(chunk.start, chunk.end):
                slot = self.slot(chunk.sequence, position)
                assert self.scheduler.blocks.num_holders(slot[0]) == 1, "writes to a shared block"
                assert not self.scheduler.blocks.is_kept(slot[0]), "writes to a cached block"
                self.slots[slot] = (chunk.sequence.cache_salt, tuple(known[: position + 1]))
                written[slot] += 1
            assert chunk.samples == (chunk.end == len(known))
            tokens.append(next_token(known) if chunk.samples else None)
        assert all(count == 1 for count in written.values())
        return tokens


def shared_blocks(one: Sequence, other: Sequence, size: int) -> int:
    """How many full blocks of known tokens two sequences have in common."""
    if one.cache_salt != other.cache_salt:
        return 0
    count = 0
    for a, b in zip(one.token_ids, other.token_ids, strict=False):
        if a != b:
            break
        count += 1
    return count // size


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, pauses, resumes, cancels, stops and fails requests in any order."""

    live = Bundle("live")

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(1, 14),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 12),
        max_model_len=st.integers(2, 40),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        max_model_len: int,
        prefix_caching: bool,
    ) -> None:
        self.config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_waiting=8,
            prefix_caching=prefix_caching,
        )
        self.scheduler = Scheduler(self.config)
        self.cache = ShadowCache(self.scheduler)
        self.sequences: dict[str, Sequence] = {}
        self.prompts: dict[str, list[int]] = {}
        self.count = 0

    @rule(
        target=live,
        family=st.sampled_from(FAMILIES),
        cut=st.integers(0, 12),
        suffix=st.lists(st.integers(0, VOCABULARY - 1), min_size=0, max_size=6),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        min_tokens=st.integers(0, 3),
        stops=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=1),
        salt=st.sampled_from(SALTS),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        copies=st.integers(1, 3),
    )
    def add(
        self,
        family: tuple[int, ...],
        cut: int,
        suffix: list[int],
        max_tokens: int | None,
        min_tokens: int,
        stops: frozenset[int],
        salt: str | None,
        priority: int,
        copies: int,
    ) -> str:
        prompt = [*family[:cut], *suffix] or [0]
        for _ in range(copies):
            name = str(self.count)
            self.count += 1
            sequence = Sequence(
                name,
                prompt,
                max_tokens=max_tokens,
                stop_token_ids=stops,
                min_tokens=min_tokens,
                cache_salt=salt,
                priority=priority,
            )
            capacity = self.config.num_blocks * self.config.block_size
            try:
                self.scheduler.add(sequence)
            except ContextLengthError:
                longest = min(self.config.max_model_len - 1, capacity)
                assert len(prompt) > longest
                continue
            except QueueFullError:
                assert self.scheduler.num_waiting >= self.config.max_waiting
                continue
            self.sequences[name] = sequence
            self.prompts[name] = prompt
        return name

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            batch = self.schedule()
            if batch is not None:
                self.apply(batch, self.cache.run(batch))

    @rule(choice=st.data(), again=st.booleans())
    def step_with_cancellations(self, choice: st.DataObject, again: bool) -> None:
        """Some sequences end between the schedule and the apply of a step; their ids come back."""
        batch = self.schedule()
        if batch is None:
            return
        tokens = self.cache.run(batch)
        leaving = choice.draw(st.sets(st.sampled_from(sorted(self.sequences)), max_size=3))
        for name in leaving:
            self.finish(name, "cancelled")
            if again and self.scheduler.num_waiting < self.config.max_waiting:
                self.sequences[name] = Sequence(name, self.prompts[name], max_tokens=3)
                self.scheduler.add(self.sequences[name])
        self.apply(batch, tokens)

    @rule()
    def failing_step(self) -> None:
        """The runner raised: nothing is applied, everything in the batch ends."""
        batch = self.schedule()
        if batch is not None:
            self.cache.run(batch)
            for chunk in batch.chunks:
                self.finish(chunk.sequence.request_id, "error")

    @rule(name=consumes(live))
    def cancel(self, name: str) -> None:
        if name in self.sequences:
            self.finish(name, "cancelled")
        assert not self.scheduler.finish(name, "cancelled")

    @rule(name=live)
    def pause(self, name: str) -> None:
        assert self.scheduler.pause(name) == (name in self.sequences)
        if name in self.sequences:
            assert self.sequences[name] in self.scheduler.paused

    @rule(name=live, then_step=st.booleans())
    def resume(self, name: str, then_step: bool) -> None:
        blocks = list(self.sequences[name].block_ids) if name in self.sequences else []
        seats = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        free = self.scheduler.num_running < seats
        assert self.scheduler.resume(name) == (name in self.sequences)
        if name in self.sequences:
            sequence = self.sequences[name]
            assert sequence not in self.scheduler.paused
            if blocks and free:
                assert sequence in self.scheduler.running
                assert sequence.block_ids == blocks
        if then_step:
            self.step(1)

    @rule(choice=st.data())
    def pause_all_but_one(self, choice: st.DataObject) -> None:
        """Readers that are away, however many, hold up nobody."""
        if not self.sequences:
            return
        kept = choice.draw(st.sampled_from(sorted(self.sequences)))
        for name in self.sequences:
            self.scheduler.pause(name)
        assert not self.scheduler.has_work()
        self.scheduler.resume(kept)
        batch = self.schedule()
        assert batch is not None
        assert [chunk.sequence.request_id for chunk in batch.chunks] == [kept]
        self.apply(batch, self.cache.run(batch))

    def finish(self, name: str, reason: str) -> None:
        sequence = self.sequences.pop(name)
        assert self.scheduler.finish(name, reason)  # type: ignore[arg-type]
        assert sequence.finish_reason == reason
        assert sequence.block_ids == []

    def schedule(self) -> Batch | None:
        waiting = self.scheduler.waiting
        ranks = {sequence: sequence.rank for sequence in waiting}
        first = self.scheduler.running[:1]
        paused = [sequence for sequence in self.scheduler.paused if sequence.block_ids]
        batch = self.scheduler.schedule()
        assert (batch is None) == all(s.paused for s in self.sequences.values())
        if batch is None:
            return None
        self.check_batch(batch)
        scheduled = {chunk.sequence for chunk in batch.chunks}
        assert scheduled.issuperset(first), "the first running sequence always advances"
        assert not any(sequence.paused for sequence in scheduled)
        displaced = [sequence for sequence in batch.preempted if not sequence.paused]
        if displaced:
            assert scheduled.isdisjoint(waiting), "no admission in a step that preempted"
            assert not any(s.block_ids for s in paused), "the paused give way before the running"
        gave_way = [sequence for sequence in batch.preempted if sequence.paused]
        assert gave_way == paused[: len(gave_way)], "the one paused longest ago gives way first"
        self.check_order(waiting, ranks, scheduled)
        self.check_preempted(batch)
        return batch

    def check_batch(self, batch: Batch) -> None:
        assert 0 < batch.num_tokens <= self.config.max_num_batched_tokens
        assert batch.num_tokens == sum(chunk.num_tokens for chunk in batch.chunks)
        scheduled = {chunk.sequence for chunk in batch.chunks}
        assert len(scheduled) == len(batch.chunks)
        running = self.scheduler.running
        assert scheduled.issubset(running)
        assert scheduled.isdisjoint(batch.preempted)
        for chunk in batch.chunks:
            assert chunk.num_tokens > 0
            assert chunk.start == chunk.sequence.num_computed
            assert chunk.end <= chunk.sequence.num_tokens
        for sequence in running:
            if sequence.num_tokens - sequence.num_computed == 1:
                assert sequence in scheduled, "a decode never waits"

    def check_order(
        self, waiting: tuple[Sequence, ...], ranks: dict[Sequence, float], scheduled: set[Sequence]
    ) -> None:
        """Nobody is overtaken, unless it waits for a block that a running sequence computes."""
        promoted = {s for s in waiting if s.rank == PROMOTED and ranks[s] != PROMOTED}
        order = [sequence for sequence in waiting if sequence not in promoted]
        admitted = [i for i, sequence in enumerate(order) if sequence in scheduled]
        if not admitted:
            return
        for sequence in order[: admitted[-1]]:
            if sequence not in scheduled:
                size = self.config.block_size
                useful = (sequence.num_tokens - 1) // size
                assert any(
                    min(shared_blocks(sequence, leader, size), useful) > leader.num_computed // size
                    for leader in self.scheduler.running
                ), "overtaken without a reason"

    def check_preempted(self, batch: Batch) -> None:
        """They come before all others of their rank, the one that ran the longest first."""
        displaced = [sequence for sequence in batch.preempted if not sequence.paused]
        for rank in {sequence.rank for sequence in displaced}:
            peers = [sequence for sequence in self.scheduler.waiting if sequence.rank == rank]
            expected = [sequence for sequence in displaced[::-1] if sequence.rank == rank]
            assert peers[: len(expected)] == expected

    def apply(self, batch: Batch, tokens: list[int | None]) -> None:
        ended = self.scheduler.apply(batch, tokens)
        for sequence in ended:
            del self.sequences[sequence.request_id]
            prompt = self.prompts[sequence.request_id]
            output, reason = expected_output(sequence, prompt, sequence.limit)
            assert sequence.output_token_ids == output
            assert sequence.finish_reason == reason
            assert sequence.stop_reason == (output[-1] if reason == "stop" else None)

    @invariant()
    def blocks_are_conserved(self) -> None:
        pool = self.scheduler.blocks
        holders: Counter[int] = Counter()
        for sequence in (*self.scheduler.running, *self.scheduler.paused):
            assert len(set(sequence.block_ids)) == len(sequence.block_ids)
            holders.update(sequence.block_ids)
        for block in range(self.config.num_blocks):
            assert pool.num_holders(block) == holders[block]
        free = pool.free_order()
        assert sorted(free) == [b for b in range(self.config.num_blocks) if not holders[b]]
        assert pool.num_free == len(free)
        assert pool.num_free + pool.num_used == self.config.num_blocks
        assert pool.num_cached == sum(map(pool.is_kept, free))

    @invariant()
    def computed_tokens_are_in_the_cache(self) -> None:
        size = self.config.block_size
        everyone = (*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.paused)
        for sequence in everyone:
            assert sequence.num_computed < sequence.num_tokens <= sequence.limit
            assert sequence.num_computed <= len(sequence.block_ids) * size
            self.cache.check(sequence, sequence.num_computed)
        for sequence in self.scheduler.waiting:
            assert (sequence.num_computed, sequence.block_ids) == (0, [])
        assert all(sequence.block_ids for sequence in self.scheduler.running)

    @invariant()
    def bookkeeping_agrees(self) -> None:
        scheduler = self.scheduler
        paused = scheduler.paused
        everyone = [*scheduler.running, *scheduler.waiting, *paused]
        assert sorted(s.request_id for s in everyone) == sorted(self.sequences)
        assert set(paused) == {s for s in everyone if s.paused}
        holding = [bool(sequence.block_ids) for sequence in paused]
        assert holding == sorted(holding, reverse=True)
        assert scheduler.num_paused == len(paused)
        assert scheduler.num_running == len(scheduler.running)
        assert scheduler.num_running <= min(
            self.config.max_num_seqs, self.config.max_num_batched_tokens
        )
        assert scheduler.num_waiting == len(scheduler.waiting)
        assert scheduler.has_work() == (len(paused) < len(everyone))
        assert 0 <= scheduler.prefix_hits <= scheduler.prefix_queries
        for before, after in pairwise(scheduler.running):
            assert (before.rank, before.order) < (after.rank, after.order)
        for before, after in pairwise(scheduler.waiting):
            assert before.rank <= after.rank
        prefixes = scheduler.prefixes
        kept = sum(map(scheduler.blocks.is_kept, range(self.config.num_blocks)))
        assert len(prefixes) == kept
        assert prefixes.num_announced <= scheduler.num_running

    def teardown(self) -> None:
        """Everything ends, in a bounded number of steps, and leaves nothing behind."""
        if not hasattr(self, "scheduler"):
            return
        self.run_to_the_end()
        assert all(sequence.paused for sequence in self.sequences.values())
        for name in self.sequences:
            self.scheduler.resume(name)
        self.run_to_the_end()
        assert not self.sequences
        scheduler = self.scheduler
        assert scheduler.schedule() is None
        assert not scheduler.has_work()
        assert scheduler.blocks.num_free == self.config.num_blocks
        assert scheduler.prefixes.num_announced == 0
        assert len(scheduler.prefixes) == scheduler.blocks.num_cached

    def run_to_the_end(self) -> None:
        """Every request that is not paused ends, in a bounded number of steps."""
        bound = 1 + 2 * sum(sequence.limit for sequence in self.sequences.values())
        for _ in range(bound):
            if not self.scheduler.has_work():
                break
            self.step(1)
            self.blocks_are_conserved()
            self.bookkeeping_agrees()
        assert not self.scheduler.has_work(), "some request never ends"
        assert self.scheduler.schedule() is None


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
