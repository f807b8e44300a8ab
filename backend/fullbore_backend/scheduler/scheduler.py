"""Requests in, one batch a step out, under a token budget and a pool of blocks.

There are no phases. Every sequence has known tokens and computed tokens, and a step lets it catch
up: by one token when it decodes, by a part of the budget when it has a prompt to compute, by whole
blocks at no cost where the prefix cache has them. The rules of a step:

1. Running sequences that need a single token get it, oldest first. They never wait for a prompt.
2. Running sequences with more to compute share the rest of the budget, oldest first.
3. Waiting sequences are admitted in the queue's order while budget and memory last, but not in a
   step that preempted a running one. The first that does not fit holds back the later ones, so a
   big prompt is not overtaken forever.

A sequence is admitted only with blocks for all its known tokens, and only while one more block is
left for every running sequence, so that admission is not paid for with a preemption at once. When
a decode finds no block, the paused sequences lose theirs, the one paused longest ago first; then
the running one of the worst (rank, admission). The first of that order therefore always advances,
and everything behind it becomes first in time.

A sequence whose next uncached block is being computed by a running one is passed over, keeping its
place, until that block is there or its computation was given up.

A paused sequence keeps its blocks until a decode or an admission needs them, and takes part in
nothing else: it computes nothing, and it counts neither against the seats nor towards the blocks
set aside. So readers that are away hold up nobody, however many they are. Resumed, it goes on in
its old place if it has its blocks and a seat is free; otherwise it waits at the front of its rank,
where the prefix cache gives back what has not been reused.

One batch may be scheduled ahead, while the one before is under way and its tokens are not known:
each sequence that samples then counts as one token longer, and one that this brings to its limit
waits for it. Batches run in the order in which they were scheduled, so blocks that are taken from a
sequence under way are written by others only after it. What its stop token makes superfluous is
computed and dropped.

Owns who runs and who holds which block. It does not know tensors, text, clocks or threads; one
thread calls it, and each batch is applied, or its sequences finished, in order, at the latest when
one more has been scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from ..config import SchedulerConfig
from ..errors import InvalidRequestError, QueueFullError
from ..request import FinishReason
from .batch import Batch, Chunk
from .kv_cache import KVCache
from .limits import check_prompt, check_sizes, max_num_tokens
from .paused import PausedSequences
from .running import RunningSequences
from .sequence import Sequence
from .waiting import WaitingQueue

MAX_DEFERRED = 32
"""Sequences passed over in one step, waiting for a shared block, before admission stops."""

RETRY_AFTER = 1.0
"""Seconds after which a refused request is told to try again."""


class Scheduler:
    """Decides what each step computes; every method is O(running), none O(waiting), O(paused) or
    O(ended).

    Admission needs budget left over, so never more sequences run than ``max_num_batched_tokens``,
    and none that decodes goes without its token.

    :param config: sizes.
    :raises ConfigError: for a size below 1.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        check_sizes(config)
        self.config = config
        self._kv_cache = KVCache(config)
        self.blocks = self._kv_cache.pool
        self.prefixes = self._kv_cache.prefixes
        #: Preemptions so far, of running and of paused sequences.
        self.num_preemptions = 0
        #: Prompt tokens looked up in the prefix cache, and those it served, at first admissions.
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._block_size = config.block_size
        self._budget = config.max_num_batched_tokens
        self._live: dict[str, Sequence] = {}
        self._running = RunningSequences()
        self._waiting = WaitingQueue()
        self._paused = PausedSequences()
        self._num_admissions = 0
        self._num_batches = self._num_applied = 0

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that hold blocks and compute, in order of service. A copy."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that wait for blocks, new or preempted, in order of service. A copy,
        O(waiting).
        """
        return tuple(self._waiting)

    @property
    def paused(self) -> tuple[Sequence, ...]:
        """Paused sequences; first those with blocks, the next to lose them at the front. A copy,
        O(paused).
        """
        return tuple(self._paused)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and compute."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks, new or preempted."""
        return len(self._waiting)

    @property
    def num_paused(self) -> int:
        """Paused sequences, with and without blocks; they neither run nor wait."""
        return len(self._paused)

    def has_work(self) -> bool:
        """Whether :meth:`schedule` would return a batch: some sequence is not paused."""
        return len(self._live) > len(self._paused)

    def check(self, num_prompt_tokens: int) -> None:
        """Raise what :meth:`add` would raise for a prompt of this length, and change nothing.

        Reads only the configuration, so it is safe from any thread.

        :raises InvalidRequestError: for an empty prompt.
        :raises ContextLengthError: if it can never fit the context or the KV pool.
        """
        check_prompt(self.config, num_prompt_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        :raises InvalidRequestError: for an empty prompt, an id in use, or ids that are no tokens.
        :raises ContextLengthError: if it can never fit the context or the KV pool.
        :raises QueueFullError: if ``max_waiting`` sequences wait already.
        """
        self.check(sequence.num_prompt_tokens)
        if sequence.request_id in self._live:
            raise InvalidRequestError(
                f"Request id {sequence.request_id!r} is in use; choose another or leave it out."
            )
        if len(self._waiting) >= self.config.max_waiting:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait already, the most allowed (max_waiting). "
                "Retry later or send fewer at once.",
                retry_after=RETRY_AFTER,
            )
        self._kv_cache.open(sequence)
        sequence.limit = max_num_tokens(
            self.config, sequence.num_prompt_tokens, sequence.max_tokens
        )
        self._live[sequence.request_id] = sequence
        self._waiting.push(sequence)

    def schedule(self) -> Batch | None:
        """Choose the next step's work; ``None`` when there is none.

        Every batch computes at least one token of the running sequence that comes first, unless
        the batch under way brings it to its limit. ``None`` while one is under way may only mean
        that its tokens decide what is next.
        """
        self._num_batches += 1
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        prefills = self._schedule_decodes(chunks, preempted)
        budget = self._budget - len(chunks)
        for sequence in prefills:
            if budget == 0:
                break
            budget -= self._schedule_part(sequence, budget, chunks)
        # A paused one that lost its blocks will not ask for them in this step.
        if budget > 0 and all(sequence.paused for sequence in preempted):
            budget = self._admit(budget, chunks, preempted)
        if not chunks:
            self._num_batches -= 1
            return None
        return Batch(
            chunks=tuple(chunks),
            num_tokens=self._budget - budget,
            preempted=tuple(preempted),
            number=self._num_batches,
        )

    def apply(self, batch: Batch, tokens: SequenceOf[int | None]) -> list[Sequence]:
        """Take in what a batch computed; return the sequences that ended by it.

        :param batch: the oldest not applied yet.
        :param tokens: one for each chunk: the sampled token, or ``None`` where it samples none.
            Those of sequences that ended since the batch was scheduled are dropped.
        """
        self._num_applied = batch.number
        ended: list[Sequence] = []
        size = self._block_size
        for chunk, token in zip(batch.chunks, tokens, strict=True):
            sequence, start, length, samples = chunk
            if sequence.finish_reason is not None:
                continue
            end = start + length
            if sequence.block_ids:  # else it was preempted since: only its token counts
                sequence.num_computed = end
                if end // size > start // size:
                    self._kv_cache.remember(sequence)
            if samples:
                assert token is not None, "the runner returns a token for each chunk that samples"
                reason = sequence.append(token)
                if reason is not None:
                    self._end(sequence, reason)
                    ended.append(sequence)
        return ended

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a sequence now, wherever it is; its blocks are free at once.

        :returns: ``False`` if no such sequence is live.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, reason)
        return True

    def pause(self, request_id: str) -> bool:
        """Compute no more of a sequence until it is resumed; a batch under way still counts.

        :returns: ``False`` if no such sequence is live; ``True`` also if it was paused before.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        if not sequence.paused:
            self._leave(sequence)
            self._kv_cache.withdraw(sequence)
            sequence.paused = True
            self._paused.add(sequence)
        return True

    def resume(self, request_id: str) -> bool:
        """Let a paused sequence go on.

        One that has run is the next of its rank to run again; one that never has goes to the end,
        since it gained nothing yet that anybody could have failed to read.

        :returns: ``False`` if no such sequence is live; ``True`` also if it was not paused.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        if sequence.paused:
            self._leave(sequence)
            sequence.paused = False
            if sequence.block_ids:
                self._go_on(sequence)
            elif sequence.order < 0:
                self._waiting.push(sequence)
            else:
                self._waiting.push_front(sequence)
        return True

    def _schedule_decodes(self, chunks: list[Chunk], preempted: list[Sequence]) -> list[Sequence]:
        """Give a token to every running sequence that lacks just one; return the other ones."""
        prefills: list[Sequence] = []
        size, number = self._block_size, self._num_batches
        # Preemption takes from the end of the list, never what this loop has passed already.
        for sequence in self._running:
            start, known = sequence.num_scheduled, sequence.num_known
            if known >= sequence.limit:
                continue  # the token that ends it is under way
            if known - start > 1:
                prefills.append(sequence)
            elif start < len(sequence.block_ids) * size or self._grow(sequence, preempted):
                chunks.append(Chunk(sequence, start, 1, True))
                sequence.num_scheduled = known
                sequence.num_known = known + 1
                sequence.last_batch = number
        return prefills

    def _grow(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Get one more block, from others if need be; ``False`` if it lost its own instead."""
        while self.blocks.num_free == 0:
            victim = self._paused.next_to_yield() or self._running.last
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        sequence.block_ids += self.blocks.allocate(1)
        return True

    def _schedule_part(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Compute as much of what a sequence lacks as the budget allows; return how much."""
        start = sequence.num_scheduled
        missing = sequence.num_known - start
        count = min(missing, budget)
        samples = count == missing
        chunks.append(Chunk(sequence, start, count, samples))
        sequence.num_scheduled = start + count
        sequence.num_known += samples
        sequence.last_batch = self._num_batches
        return count

    def _admit(self, budget: int, chunks: list[Chunk], preempted: list[Sequence]) -> int:
        """Let waiting sequences run while budget, seats and memory last; return the budget left."""
        self._waiting.promote()
        admitted: list[Sequence] = []
        num_deferred = 0
        for sequence in self._waiting:
            if budget == 0 or len(self._running) >= self.config.max_num_seqs:
                break
            if sequence.last_batch > self._num_applied:
                continue  # it was preempted while a batch with it was under way: not all is known
            num_cached, must_wait = self._kv_cache.match(sequence)
            if must_wait:
                num_deferred += 1
                if num_deferred == MAX_DEFERRED:
                    break
                continue
            if not self._take_blocks(sequence, num_cached, preempted):
                break
            self._start(sequence)
            admitted.append(sequence)
            budget -= self._schedule_part(sequence, budget, chunks)
        for sequence in admitted:
            self._waiting.admit(sequence)
        return budget

    def _take_blocks(self, sequence: Sequence, num_cached: int, preempted: list[Sequence]) -> bool:
        """Give a waiting sequence blocks for all its tokens, those of paused ones if need be.

        :param num_cached: leading blocks that the cache has.
        :returns: ``False`` if memory does not allow it.
        """
        pool = self.blocks
        num_new = self._kv_cache.num_missing(sequence, num_cached)
        # One more block for every running sequence; none when this one would be alone.
        num_needed = num_new + len(self._running)
        # An upper bound: what paused ones share with others counts more than once.
        slack = pool.num_free + self._paused.num_blocks - num_needed
        if slack < 0 or not self._kv_cache.share_prefix(sequence, num_cached, slack):
            return False
        while num_needed > pool.num_free:
            victim = self._paused.next_to_yield()
            if victim is None:
                self._kv_cache.release(sequence)
                return False
            self._preempt(victim)
            preempted.append(victim)
        sequence.block_ids += pool.allocate(num_new)
        return True

    def _start(self, sequence: Sequence) -> None:
        self._kv_cache.announce(sequence)
        if sequence.order < 0 and self.config.prefix_caching:
            sequence.num_cached = sequence.num_computed
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += sequence.num_cached
        sequence.order = self._num_admissions
        self._num_admissions += 1
        self._running.add(sequence)

    def _go_on(self, sequence: Sequence) -> None:
        """Let a sequence that has kept its blocks run on, unless there is no seat for it."""
        self._running.add(sequence)
        if len(self._running) > min(self.config.max_num_seqs, self._budget):
            self._preempt(sequence)
        else:
            self._kv_cache.announce(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it computes again what the cache has not kept."""
        self._leave(sequence)
        self._kv_cache.release(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if sequence.paused:
            self._paused.add(sequence)
        else:
            self._waiting.push_front(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._leave(sequence)
        self._kv_cache.release(sequence)
        sequence.finish_reason = reason
        sequence.cursor = None  # callers may keep the sequence; its place in the trie is no use
        del self._live[sequence.request_id]

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the set it is in, by what it is and holds."""
        if sequence.paused:
            self._paused.remove(sequence)
        elif sequence.block_ids:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
