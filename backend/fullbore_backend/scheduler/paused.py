"""Sequences whose reader is away: they compute nothing until they are resumed.

One that ran when it was paused keeps its blocks until others need them. The one paused longest ago
gives way first, since it is the least likely to be wanted soon. No operation depends on how many
are paused.

It does not know who needs memory, nor what happens to a sequence that is resumed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from .sequence import Sequence


class PausedSequences:
    """The paused: those with blocks, in the order in which they give way, and those without."""

    __slots__ = ("_empty", "_holding", "num_blocks")

    def __init__(self) -> None:
        #: The sum of their block counts; a block that several of them share counts for each.
        self.num_blocks = 0
        self._holding: OrderedDict[Sequence, None] = OrderedDict()
        self._empty: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._holding) + len(self._empty)

    def __iter__(self) -> Iterator[Sequence]:
        """Those with blocks first, the next to give way at the front."""
        yield from self._holding
        yield from self._empty

    def add(self, sequence: Sequence) -> None:
        """A sequence that is paused now."""
        if sequence.block_ids:
            self._holding[sequence] = None
            self.num_blocks += len(sequence.block_ids)
        else:
            self._empty[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """One that is resumed or has ended; it still has the blocks it holds, if any."""
        if sequence.block_ids:
            del self._holding[sequence]
            self.num_blocks -= len(sequence.block_ids)
        else:
            del self._empty[sequence]

    def next_to_yield(self) -> Sequence | None:
        """The first to be preempted; ``None`` when none holds blocks."""
        return next(iter(self._holding), None)
