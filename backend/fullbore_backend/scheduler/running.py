"""Running sequences in their order: the first is served first, the last is preempted first.

Knows ranks and admissions, not memory or budgets.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from .sequence import Sequence


def _place(sequence: Sequence) -> tuple[float, int]:
    return (sequence.rank, sequence.order)


class RunningSequences:
    """Sequences sorted by (rank, admission). A search is O(log running)."""

    __slots__ = ("_sorted",)

    def __init__(self) -> None:
        self._sorted: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Sequence]:
        """In order. The last ones may be removed meanwhile, as far as they were not reached."""
        return iter(self._sorted)

    @property
    def last(self) -> Sequence:
        """The one to be preempted next."""
        return self._sorted[-1]

    def add(self, sequence: Sequence) -> None:
        """A sequence that starts to run, or goes on in its old place."""
        insort(self._sorted, sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        """One that ended, was paused or lost its blocks; its place must not have changed."""
        del self._sorted[bisect_left(self._sorted, _place(sequence), key=_place)]
