"""A clock that moves when it is told to.

Owns its time and those who sleep by it. Code that takes its clock and its sleep as parameters runs
through hours of it in no time, and the same way every time.
"""

from __future__ import annotations

import heapq
import itertools

import anyio
import anyio.lowlevel


class ManualClock:
    """Call it for the time; ``sleep`` by it; ``advance`` it.

    :param start: seconds it shows at first.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, anyio.Event]] = []

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self._now

    @property
    def sleeping(self) -> int:
        """How many tasks sleep."""
        return len(self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Sleep until the clock has been advanced by that much."""
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
            return
        sleeper = (self._now + seconds, next(self._order), anyio.Event())
        heapq.heappush(self._sleepers, sleeper)
        try:
            await sleeper[2].wait()
        except BaseException:
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)
                heapq.heapify(self._sleepers)
            raise

    def advance(self, seconds: float) -> None:
        """Move on; those whose time has come wake up, the earliest first."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            heapq.heappop(self._sleepers)[2].set()
