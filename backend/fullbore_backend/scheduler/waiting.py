"""The order in which waiting sequences are considered.

First by rank, lower first, then by arrival; preempted ones come back to the front of their rank.
Once ``AGING`` admissions have passed since the last time, the oldest waiting sequence is promoted
ahead of all ranks for good, unless it is among the first anyway. So a stream of urgent requests
delays the others but never starves them: one with ``n`` older requests before it is reached after
about ``AGING * (n + 1)`` admissions. All operations are O(1) in the number of waiting sequences; a
rank's first and last sequence cost a search among the distinct ranks.

It does not know memory or budgets.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from .sequence import Sequence

AGING = 16
"""Admissions between two promotions."""

PROMOTED = float("-inf")
"""The rank of promoted sequences, ahead of every priority."""


class WaitingQueue:
    """Waiting sequences in the order of service."""

    __slots__ = ("_arrivals", "_by_rank", "_ranks", "_since_promotion")

    def __init__(self) -> None:
        self._arrivals: OrderedDict[Sequence, None] = OrderedDict()
        self._by_rank: dict[float, OrderedDict[Sequence, None]] = {}
        self._ranks: list[float] = []
        self._since_promotion = 0

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of service; the queue must not change meanwhile."""
        for rank in self._ranks:
            yield from self._by_rank[rank]

    def push(self, sequence: Sequence) -> None:
        """A new sequence, behind the others of its rank."""
        self._arrivals[sequence] = None
        self._enqueue(sequence)

    def push_front(self, sequence: Sequence) -> None:
        """A preempted sequence, before the others of its rank."""
        self._arrivals[sequence] = None
        self._arrivals.move_to_end(sequence, last=False)
        self._enqueue(sequence)
        self._by_rank[sequence.rank].move_to_end(sequence, last=False)

    def remove(self, sequence: Sequence) -> None:
        """A sequence that ended while it waited."""
        del self._arrivals[sequence]
        self._dequeue(sequence)

    def admit(self, sequence: Sequence) -> None:
        """A sequence that starts to run; counts towards the next promotion."""
        self.remove(sequence)
        self._since_promotion += 1

    def promote(self) -> None:
        """Move the oldest sequence ahead of all ranks, if it is time and it is not there."""
        if self._since_promotion < AGING or not self._arrivals:
            return
        oldest = next(iter(self._arrivals))
        if oldest.rank > self._ranks[0]:
            self._since_promotion = 0
            self._dequeue(oldest)
            oldest.rank = PROMOTED
            self._enqueue(oldest)

    def _enqueue(self, sequence: Sequence) -> None:
        peers = self._by_rank.get(sequence.rank)
        if peers is None:
            peers = self._by_rank[sequence.rank] = OrderedDict()
            insort(self._ranks, sequence.rank)
        peers[sequence] = None

    def _dequeue(self, sequence: Sequence) -> None:
        peers = self._by_rank[sequence.rank]
        del peers[sequence]
        if not peers:
            del self._by_rank[sequence.rank]
            del self._ranks[bisect_left(self._ranks, sequence.rank)]
