"""Two ways of counting against a quota: our own count, and the endpoint's report.

Owns the arithmetic of one quota each. Knows nothing of requests, headers or waiting; every
method is told the time.
"""

from __future__ import annotations

import math
from collections import deque

_ENTRIES = 240
_SLACK = 0.05
"""Seconds added to a window: requests sent a window apart may arrive a little closer together."""


class Entry:
    """An amount charged at about one time; handed back to be corrected."""

    __slots__ = ("amount", "first", "last")

    def __init__(self, now: float, amount: float) -> None:
        self.first = now
        self.last = now
        self.amount = amount


class SlidingQuota:
    """At most `limit` in any span of `window` seconds.

    The sliding window is the one count that satisfies a server whether it counts by the clock's
    minute, by a sliding minute or with a token bucket. Charges within 1/240 of the window share an
    entry and leave together, the last deciding when: memory is bounded, the error on the safe side.

    Args:
        limit: The most in a window.
        window: Seconds.
    """

    def __init__(self, limit: float, window: float) -> None:
        self.limit = limit
        self._window = window + _SLACK
        self._grain = window / _ENTRIES
        self._entries: deque[Entry] = deque()
        self._used = 0.0

    def available(self, now: float) -> float:
        """How much may be charged now; negative when more was used than foreseen."""
        self._expire(now)
        return self.limit - self._used

    def delay(self, now: float, amount: float) -> float:
        """Seconds until `amount` may be charged. One larger than the quota goes alone."""
        excess = min(amount, self.limit) - self.available(now)
        if excess <= 0:
            return 0.0
        for entry in self._entries:
            excess -= entry.amount
            if excess <= 0:
                return entry.last + self._window - now
        return 0.0

    def charge(self, now: float, amount: float) -> Entry:
        """Count `amount` from now on."""
        self._expire(now)
        last = self._entries[-1] if self._entries else None
        if last is not None and now - last.first < self._grain:
            last.last = now
            last.amount += amount
        else:
            last = Entry(now, amount)
            self._entries.append(last)
        self._used += amount
        return last

    def correct(self, now: float, entry: Entry, change: float) -> None:
        """Add `change`, which may be negative, to what was charged with `entry`."""
        self._expire(now)
        if self._entries and entry.first >= self._entries[0].first:
            entry.amount += change
            self._used += change

    def _expire(self, now: float) -> None:
        while self._entries and self._entries[0].last + self._window <= now:
            self._used -= self._entries.popleft().amount
        if not self._entries:
            self._used = 0.0  # no rounding error outlives the entries


_USUAL_PERIOD = 60.0
_PERIODS = (1.0, 60.0, 3600.0, 86400.0)


class ReportedQuota:
    """A quota as the endpoint last reported it, brought forward by what was sent since.

    Some endpoints refill all the time (a token bucket), some at once when a period ends. If the
    reset is as far away as a steady refill over a second, minute, hour or day would need, it is
    taken for steady; if not, nothing is expected before the reset.
    """

    def __init__(self) -> None:
        self._limit = math.inf
        self._level = math.inf
        self._at = 0.0
        self._rate = 0.0
        self._whole_at = 0.0

    def report(
        self, now: float, *, remaining: float, limit: float | None, reset: float | None
    ) -> None:
        """Take over what the endpoint said.

        Args:
            now: The clock.
            remaining: What is left, less what was sent after the request that brought the report.
            limit: The whole quota, if known.
            reset: Seconds until it is whole again, if known.
        """
        self._limit = math.inf if limit is None else limit
        self._level = remaining
        self._at = now
        self._whole_at = now + (_USUAL_PERIOD if reset is None else reset)
        self._rate = 0.0
        used = self._limit - remaining
        if reset and 0 < used < math.inf:
            period = self._limit * reset / used
            if any(0.75 * each < period < 1.25 * each for each in _PERIODS):
                self._rate = used / reset

    def available(self, now: float) -> float:
        """How much may be sent now."""
        self._advance(now)
        return self._level

    def delay(self, now: float, amount: float) -> float:
        """Seconds until `amount` may be sent. One larger than the quota goes alone."""
        missing = min(amount, self._limit) - self.available(now)
        if missing <= 0:
            return 0.0
        return missing / self._rate if self._rate else max(0.0, self._whole_at - now)

    def charge(self, now: float, amount: float) -> None:
        """Count `amount` as sent."""
        self._advance(now)
        self._level -= amount

    def _advance(self, now: float) -> None:
        if self._rate:
            self._level = min(self._limit, self._level + self._rate * (now - self._at))
        elif now >= self._whole_at:
            # Without a newer report, expect the next period to be as long as most are.
            self._level = self._limit
            self._whole_at = now + _USUAL_PERIOD
        self._at = now
