"""When a refused request may come back: places in a full queue, handed out as fast as it drains.

The rate is measured, from the requests that ended lately. Each refusal promises the place after
the one promised last, so that the refused do not all return at the same moment. It does not know
what a request is or why the queue is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

SHORTEST = 1.0
LONGEST = 60.0
"""Seconds: the range of what is told."""

WINDOW = 30.0
"""Seconds over which the rate is measured."""


class RetryAfter:
    """Tells refused requests when to come back.

    :param clock: seconds, monotonic.
    """

    __slots__ = ("_busy_since", "_clock", "_ends", "_promised")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque()
        self._busy_since = self._promised = clock()

    def begin(self) -> None:
        """The first request came after there was none: what was measured before is stale."""
        self._ends.clear()
        self._busy_since = self._promised = self._clock()

    def end(self) -> None:
        """A request ended, for whatever reason."""
        now = self._clock()
        self._ends.append(now)
        self._expire(now)

    def refuse(self) -> float:
        """A request is refused; seconds after which a place for it is likely."""
        now = self._clock()
        self._expire(now)
        measured = min(now - self._busy_since, WINDOW)
        # While none has ended, the first to do so is taken to need as long again.
        interval = measured / max(1, len(self._ends))
        place = max(self._promised, now) + interval
        self._promised = min(place, now + LONGEST)
        return min(max(place - now, SHORTEST), LONGEST)

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0] < now - WINDOW:
            self._ends.popleft()
