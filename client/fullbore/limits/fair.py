"""A queue that is fair between flows: round-robin over flows, first come first served in each.

Owns order only. Knows nothing of limits, time or tasks. Every operation is O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FairQueue(Generic[Item]):
    """Items grouped by flow; the flow whose turn it is gives its oldest item.

    A flow that has nothing waiting holds no place: when it comes back, its turn is after every
    flow that is waiting then. Items are distinct hashable objects.
    """

    __slots__ = ("_flows", "_size")

    def __init__(self) -> None:
        # OrderedDict, not dict: taking the first of a dict again and again scans its tombstones.
        self._flows: OrderedDict[object, OrderedDict[Item, None]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, flow: object, item: Item) -> None:
        """Append `item` to the end of `flow`'s line."""
        line = self._flows.get(flow)
        if line is None:
            line = self._flows[flow] = OrderedDict()
        assert item not in line, "an item waits once"
        line[item] = None
        self._size += 1

    def peek(self) -> Item | None:
        """The item that `pop` would return, or None when nothing waits."""
        if not self._size:
            return None
        return next(iter(next(iter(self._flows.values()))))

    def pop(self) -> Item:
        """Take the next item and pass the turn on.

        Raises:
            KeyError: Nothing waits.
        """
        flow, line = self._flows.popitem(last=False)
        item, _ = line.popitem(last=False)
        if line:
            self._flows[flow] = line
        self._size -= 1
        return item

    def remove(self, flow: object, item: Item) -> None:
        """Take `item` out of the middle, leaving everyone else's turn as it was.

        Raises:
            KeyError: `item` does not wait in `flow`.
        """
        line = self._flows[flow]
        del line[item]
        if not line:
            del self._flows[flow]
        self._size -= 1
