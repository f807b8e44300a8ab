"""Requests in, one batch a step out, under a token budget and a pool of blocks.

There are no phases. Every sequence has known tokens and computed tokens, and a step lets it catch
up: by one token when it decodes, by a part of the budget when it has a prompt to compute, by whole
blocks at no cost where the prefix cache has them. The rules of a step:

1. Running sequences that need a single token get it, oldest first. They never wait for a prompt.
2. Running sequences with more to compute share the rest of the budget, oldest first.
3. Waiting sequences are admitted in the queue's order while budget and memory last, but not in a
   step that preempted. The first that does not fit holds back the later ones, so a big prompt is
   not overtaken forever.

A sequence is admitted only with blocks for all its known tokens, and only while one more block is
left for every running sequence, so that admission is not paid for with a preemption at once. When
a decode finds no block, the sequence of the worst (rank, admission) loses its own; the first of
that order therefore always advances, and everything behind it becomes first in time.

A sequence whose next uncached block is being computed by a running one is passed over, keeping its
place, until that block is there or its computation was given up.

Owns who runs and who holds which block. It does not know tensors, text, clocks or threads; one
thread calls it, and each batch is applied, or its sequences finished, before the next is asked for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as SequenceOf

from ..config import SchedulerConfig
from ..errors import ConfigError, ContextLengthError, InvalidRequestError, QueueFullError
from ..request import FinishReason
from .batch import Batch, Chunk
from .blocks import BlockPool
from .prefix import PrefixCursor, PrefixIndex
from .sequence import Sequence
from .waiting import WaitingQueue

MAX_DEFERRED = 32
"""Sequences passed over in one step, waiting for a shared block, before admission stops."""

RETRY_AFTER = 1.0
"""Seconds after which a refused request is told to try again."""


def _place(sequence: Sequence) -> tuple[float, int]:
    """A running sequence's place: the least is served first, the greatest is preempted first."""
    return (sequence.rank, sequence.order)


class Scheduler:
    """Decides what each step computes; every method is O(running), none O(waiting) or O(ended).

    Admission needs budget left over, so never more sequences run than ``max_num_batched_tokens``,
    and none that decodes goes without its token.

    :param config: sizes.
    :raises ConfigError: for a size below 1.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        _check_sizes(config)
        self.config = config
        self.blocks = BlockPool(config.num_blocks)
        self.prefixes = PrefixIndex(self.blocks, config.block_size)
        #: Preemptions so far.
        self.num_preemptions = 0
        #: Prompt tokens looked up in the prefix cache, and those it served, at first admissions.
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._block_size = config.block_size
        self._budget = config.max_num_batched_tokens
        self._live: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # sorted by _place
        self._waiting = WaitingQueue()
        self._num_admissions = 0

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that hold blocks, in order of service. A copy."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that hold none, new or preempted, in order of service. A copy, O(waiting)."""
        return tuple(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks, new or preempted."""
        return len(self._waiting)

    def has_work(self) -> bool:
        """Whether :meth:`schedule` would return a batch."""
        return bool(self._live)

    def check(self, num_prompt_tokens: int) -> None:
        """Raise what :meth:`add` would raise for a prompt of this length, and change nothing.

        Reads only the configuration, so it is safe from any thread.

        :raises InvalidRequestError: for an empty prompt.
        :raises ContextLengthError: if it can never fit the context or the KV pool.
        """
        limit, prompt = self.config.max_model_len, num_prompt_tokens
        if prompt == 0:
            raise InvalidRequestError(
                "The prompt has no tokens; send at least one.", param="prompt"
            )
        if prompt + 1 > limit:
            raise ContextLengthError(
                f"The prompt has {prompt} tokens and needs room for one more, but the context is "
                f"limited to {limit} tokens. Shorten the prompt, or raise max_model_len "
                "(--max-model-len) if the model allows.",
                param="prompt",
            )
        if prompt > self._capacity:
            raise ContextLengthError(
                f"The prompt has {prompt} tokens, but the whole KV cache holds {self._capacity}. "
                "Shorten the prompt, or raise kv_cache_bytes (--kv-cache-memory).",
                param="prompt",
            )

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
        if self.config.prefix_caching:
            cursor = PrefixCursor(sequence.cache_salt)
            try:
                self.prefixes.extend(cursor, sequence.token_ids)
            except (OverflowError, TypeError) as error:
                raise InvalidRequestError(
                    f"The prompt holds something that is no token id ({error}); ids are integers "
                    "from 0 to the vocabulary's size.",
                    param="prompt",
                ) from error
            sequence.cursor = cursor
        # The last token is only sampled: nothing follows it, so it needs no slot.
        sequence.limit = min(self.config.max_model_len, self._capacity + 1)
        if sequence.max_tokens is not None:
            limit = sequence.num_prompt_tokens + max(1, sequence.max_tokens)
            sequence.limit = min(sequence.limit, limit)
        self._live[sequence.request_id] = sequence
        self._waiting.push(sequence)

    def schedule(self) -> Batch | None:
        """Choose the next step's work; ``None`` when there is none.

        Every batch computes at least one token of the running sequence that comes first.
        """
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        prefills = self._schedule_decodes(chunks, preempted)
        budget = self._budget - len(chunks)
        for sequence in prefills:
            if budget == 0:
                break
            budget -= self._schedule_part(sequence, budget, chunks)
        if not preempted and budget > 0:
            budget = self._admit(budget, chunks)
        if not chunks:
            return None
        return Batch(
            chunks=tuple(chunks),
            num_tokens=self._budget - budget,
            preempted=tuple(preempted),
        )

    def apply(self, batch: Batch, tokens: SequenceOf[int | None]) -> list[Sequence]:
        """Take in what a batch computed; return the sequences that ended by it.

        :param tokens: one for each chunk: the sampled token, or ``None`` where it samples none.
            Those of sequences that ended since the batch was scheduled are dropped.
        """
        ended: list[Sequence] = []
        size = self._block_size
        for chunk, token in zip(batch.chunks, tokens, strict=True):
            sequence, start, length, samples = chunk
            if sequence.finish_reason is not None:
                continue
            end = start + length
            sequence.num_computed = end
            if end // size > start // size and sequence.cursor is not None:
                self._remember(sequence, sequence.cursor)
            if samples:
                assert token is not None, "the runner returns a token for each chunk that samples"
                if self._append(sequence, token):
                    ended.append(sequence)
        return ended

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a sequence now, wherever it is; its blocks are free at once.

        :returns: ``False`` if no such sequence is waiting or running.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, reason)
        return True

    @property
    def _capacity(self) -> int:
        """Tokens the pool has slots for."""
        return self.config.num_blocks * self._block_size

    def _schedule_decodes(self, chunks: list[Chunk], preempted: list[Sequence]) -> list[Sequence]:
        """Give a token to every running sequence that lacks just one; return the other ones."""
        prefills: list[Sequence] = []
        size = self._block_size
        # Preemption takes from the end of the list, never what this loop has passed already.
        for sequence in self._running:
            start = sequence.num_computed
            if len(sequence.token_ids) - start > 1:
                prefills.append(sequence)
            elif start < len(sequence.block_ids) * size or self._grow(sequence, preempted):
                chunks.append(Chunk(sequence, start, 1, True))
        return prefills

    def _grow(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Get one more block, from others if need be; ``False`` if it lost its own instead."""
        while self.blocks.num_free == 0:
            victim = self._running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        sequence.block_ids += self.blocks.allocate(1)
        return True

    def _schedule_part(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Compute as much of what a sequence lacks as the budget allows; return how much."""
        start = sequence.num_computed
        missing = len(sequence.token_ids) - start
        count = min(missing, budget)
        chunks.append(Chunk(sequence, start, count, count == missing))
        return count

    def _admit(self, budget: int, chunks: list[Chunk]) -> int:
        """Let waiting sequences run while budget, seats and memory last; return the budget left."""
        self._waiting.promote()
        admitted: list[Sequence] = []
        num_deferred = 0
        for sequence in self._waiting:
            if budget == 0 or len(self._running) >= self.config.max_num_seqs:
                break
            num_blocks, must_wait = self._match(sequence)
            if must_wait:
                num_deferred += 1
                if num_deferred == MAX_DEFERRED:
                    break
                continue
            if not self._take_blocks(sequence, num_blocks):
                break
            self._start(sequence)
            admitted.append(sequence)
            budget -= self._schedule_part(sequence, budget, chunks)
        for sequence in admitted:
            self._waiting.admit(sequence)
        return budget

    def _match(self, sequence: Sequence) -> tuple[int, bool]:
        """Leading blocks that the cache has, and whether a running sequence computes the next."""
        cursor = sequence.cursor
        if cursor is None:
            return 0, False
        # The last token is always computed: its output is what the next one is sampled from.
        useful = (len(sequence.token_ids) - 1) // self._block_size
        found = self.prefixes.match(cursor, useful)
        return found, found < useful and self.prefixes.is_announced(cursor)

    def _take_blocks(self, sequence: Sequence, num_cached: int) -> bool:
        """Give a waiting sequence blocks for all its tokens, if memory allows.

        :param num_cached: leading blocks found by :meth:`_match`.
        """
        pool = self.blocks
        num_new = -(-len(sequence.token_ids) // self._block_size) - num_cached
        # One more block for every running sequence; none when this one would be alone.
        available = pool.num_free - len(self._running)
        if num_new > available:
            return False
        cached: list[int] = []
        if sequence.cursor is not None and num_cached:
            cached = self.prefixes.matched_blocks(sequence.cursor)
            # Those nobody holds are on the free list: sharing them takes from it as well.
            num_idle = sum(pool.num_holders(block) == 0 for block in cached)
            if num_new + num_idle > available:
                return False
            for block in cached:
                pool.share(block)
        sequence.block_ids = cached + pool.allocate(num_new)
        sequence.num_computed = num_cached * self._block_size
        return True

    def _start(self, sequence: Sequence) -> None:
        if sequence.cursor is not None:
            self.prefixes.announce(sequence.cursor)
            if sequence.order < 0:
                sequence.num_cached = sequence.num_computed
                self.prefix_queries += sequence.num_prompt_tokens
                self.prefix_hits += sequence.num_cached
        sequence.order = self._num_admissions
        self._num_admissions += 1
        insort(self._running, sequence, key=_place)

    def _remember(self, sequence: Sequence, cursor: PrefixCursor) -> None:
        """Offer a sequence's newly full blocks to others."""
        self.prefixes.extend(cursor, sequence.token_ids)
        num_full = sequence.num_computed // self._block_size
        self.prefixes.insert(cursor, sequence.block_ids, num_full)
        self.prefixes.announce(cursor)

    def _append(self, sequence: Sequence, token: int) -> bool:
        """Take in a sampled token; whether it ended the sequence."""
        sequence.token_ids.append(token)
        if token in sequence.stop_token_ids and sequence.num_output_tokens > sequence.min_tokens:
            sequence.stop_reason = token
            self._end(sequence, "stop")
            return True
        if len(sequence.token_ids) >= sequence.limit:
            self._end(sequence, "length")
            return True
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks of a running sequence; it computes again what the cache has not kept."""
        self._stop_running(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.push_front(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.block_ids:
            self._stop_running(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.finish_reason = reason
        sequence.cursor = None  # callers may keep the sequence; its place in the trie is no use
        del self._live[sequence.request_id]

    def _stop_running(self, sequence: Sequence) -> None:
        del self._running[bisect_left(self._running, _place(sequence), key=_place)]
        if sequence.cursor is not None:
            self.prefixes.withdraw(sequence.cursor)
        self.blocks.release(sequence.block_ids)
        # A new list, since a batch under way may still read the old one.
        sequence.block_ids = []
        sequence.num_computed = 0


def _check_sizes(config: SchedulerConfig) -> None:
    for name in (
        "num_blocks",
        "block_size",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_waiting",
    ):
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")
