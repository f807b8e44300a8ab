"""The scheduler one step ahead of the runner: each batch is scheduled before the last is applied.

A device is simulated that runs batches in order and remembers the token it sampled last for each
sequence, as a GPU does. For every slot of the pool it records the salt and the whole prefix that
was computed into it; what a chunk relies on must be there. Tokens are a function of the prefix
alone, so outputs must not depend on how they were scheduled.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from fullbore_backend.config import SchedulerConfig
from fullbore_backend.errors import ContextLengthError, QueueFullError
from fullbore_backend.scheduler import Batch, Scheduler, Sequence

VOCABULARY = 3
FAMILIES = ((), (0,) * 9, (0,) * 4 + (1,) * 5, (2, 1, 0) * 4)


def next_token(tokens: list[int]) -> int:
    return (sum(tokens[-3:]) + len(tokens) // 4) % VOCABULARY


class Device:
    """Runs batches when they are handed to it; their tokens are asked for later."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.size = scheduler.config.block_size
        self.slots: dict[tuple[int, int], tuple[str | None, tuple[int, ...]]] = {}
        self.sampled: dict[Sequence, int] = {}  # by the batch before

    def run(self, batch: Batch) -> list[int | None]:
        sampled: dict[Sequence, int] = {}
        tokens: list[int | None] = []
        for sequence, start, length, samples in batch.chunks:
            known = list(sequence.token_ids)
            if start + length > len(known):
                known.append(self.sampled[sequence])
            assert start + length <= len(known), "at most one token is unknown"
            assert start + length < sequence.limit, "nothing is sampled from the last token"
            for position in range(start + length):
                slot = sequence.block_ids[position // self.size], position % self.size
                content = (sequence.cache_salt, tuple(known[: position + 1]))
                if position < start:
                    assert self.slots[slot] == content
                self.slots[slot] = content
            assert samples == (start + length == len(known))
            tokens.append(next_token(known) if samples else None)
            if samples:
                sampled[sequence] = next_token(known)
        self.sampled = sampled
        return tokens


class AheadMachine(RuleBasedStateMachine):
    """Adds, steps, pauses, resumes, cancels and fails requests in any order."""

    live = Bundle("live")

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(1, 14),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 12),
        max_model_len=st.integers(2, 40),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, block_size: int, num_blocks: int, budget: int, **sizes: int) -> None:
        self.config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_waiting=8,
            **sizes,
        )
        self.scheduler = Scheduler(self.config)
        self.device = Device(self.scheduler)
        self.under_way: list[tuple[Batch, list[int | None]]] = []
        self.sequences: dict[str, Sequence] = {}
        self.count = 0

    @rule(
        target=live,
        family=st.sampled_from(FAMILIES),
        cut=st.integers(0, 12),
        suffix=st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        min_tokens=st.integers(0, 3),
        stops=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=1),
        salt=st.sampled_from([None, "a"]),
        priority=st.sampled_from([0, 0, 1]),
    )
    def add(
        self,
        family: tuple[int, ...],
        cut: int,
        suffix: list[int],
        stops: frozenset[int],
        salt: str | None,
        **options: int | None,
    ) -> str:
        prompt = [*family[:cut], *suffix] or [0]
        name = str(self.count)
        self.count += 1
        sequence = Sequence(name, prompt, stop_token_ids=stops, cache_salt=salt, **options)
        try:
            self.scheduler.add(sequence)
        except (ContextLengthError, QueueFullError):
            return name
        self.sequences[name] = sequence
        return name

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        """Schedule, launch, and only then take in what the batch before computed."""
        for _ in range(times):
            self.launch()
            if len(self.under_way) > 1 or (self.under_way and self.idle):
                self.settle()

    @rule()
    def catch_up(self) -> None:
        """As the engine does when the next batch depends on what was sampled."""
        while self.under_way:
            self.settle()

    @rule()
    def failing_step(self) -> None:
        """A batch that cannot be launched ends its sequences, after the one before is taken in."""
        batch = self.scheduler.schedule()
        self.catch_up()
        for chunk in () if batch is None else batch.chunks:
            if chunk.sequence.finish_reason is None:
                self.cancel(chunk.sequence.request_id)

    @rule(name=live)
    def cancel(self, name: str) -> None:
        assert self.scheduler.finish(name, "cancelled") == (name in self.sequences)
        self.sequences.pop(name, None)

    @rule(name=live)
    def pause(self, name: str) -> None:
        assert self.scheduler.pause(name) == (name in self.sequences)

    @rule(name=live)
    def resume(self, name: str) -> None:
        assert self.scheduler.resume(name) == (name in self.sequences)

    def launch(self) -> None:
        batch = self.scheduler.schedule()
        self.idle = batch is None
        if batch is not None:
            assert 0 < batch.num_tokens <= self.config.max_num_batched_tokens
            assert batch.num_tokens == sum(chunk.num_tokens for chunk in batch.chunks)
            assert {chunk.sequence for chunk in batch.chunks}.isdisjoint(batch.preempted)
            self.under_way.append((batch, self.device.run(batch)))

    def settle(self) -> None:
        for sequence in self.scheduler.apply(*self.under_way.pop(0)):
            del self.sequences[sequence.request_id]
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            assert sequence.output_token_ids == self.expected(sequence, prompt)

    @staticmethod
    def expected(sequence: Sequence, prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        while True:
            token = next_token(tokens)
            tokens.append(token)
            stops = token in sequence.stop_token_ids
            if len(tokens) == sequence.limit or (
                stops and len(tokens) - len(prompt) > sequence.min_tokens
            ):
                return tokens[len(prompt) :]

    @invariant()
    def blocks_are_conserved(self) -> None:
        pool = self.scheduler.blocks
        holders: Counter[int] = Counter()
        for sequence in (*self.scheduler.running, *self.scheduler.paused):
            holders.update(sequence.block_ids)
        for block in range(self.config.num_blocks):
            assert pool.num_holders(block) == holders[block]
        assert pool.num_free + pool.num_used == self.config.num_blocks

    @invariant()
    def counts_agree_once_all_is_taken_in(self) -> None:
        for sequence in (*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.paused):
            assert sequence.num_computed <= sequence.num_scheduled < sequence.num_known
            assert sequence.num_tokens <= sequence.num_known <= sequence.limit
            if not self.under_way:
                assert sequence.num_known == sequence.num_tokens
                assert sequence.num_scheduled == sequence.num_computed

    def teardown(self) -> None:
        """Everything ends, in a bounded number of steps, and leaves nothing behind."""
        if not hasattr(self, "scheduler"):
            return
        for name in self.sequences:
            self.scheduler.resume(name)
        for _ in range(2 + 3 * sum(sequence.limit for sequence in self.sequences.values())):
            self.step(1)
        assert not self.sequences, "some request never ends"
        assert not self.scheduler.has_work()
        assert self.scheduler.blocks.num_free == self.config.num_blocks
        assert self.scheduler.prefixes.num_announced == 0


TestSchedulerAhead = AheadMachine.TestCase
TestSchedulerAhead.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_a_sequence_preempted_under_way_waits_for_its_token() -> None:
    """It lost its seat and found another before its batch came back: that batch comes first."""
    config = SchedulerConfig(
        num_blocks=20, block_size=4, max_model_len=20, max_num_seqs=2, max_num_batched_tokens=20
    )
    scheduler = Scheduler(config)
    one, two, three = (Sequence(name, [int(name)] * 9, max_tokens=9) for name in "123")
    for sequence in (one, two):
        scheduler.add(sequence)
    first = scheduler.schedule()
    assert first is not None
    scheduler.apply(first, [0, 0])
    scheduler.pause("1")
    scheduler.add(three)
    second = scheduler.schedule()
    assert second is not None
    assert {chunk.sequence for chunk in second.chunks} == {two, three}
    scheduler.pause("2")
    scheduler.resume("1")  # in the seat of 2
    scheduler.resume("2")  # which finds none, and loses its blocks
    scheduler.finish("3", "cancelled")  # now there is one
    third = scheduler.schedule()
    assert third is not None
    assert [chunk.sequence for chunk in third.chunks] == [one]
    scheduler.apply(second, [0, 0])
    fourth = scheduler.schedule()
    assert fourth is not None
    assert {chunk.sequence for chunk in fourth.chunks} == {one, two}
