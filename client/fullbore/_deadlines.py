"""When a request whose answer somebody else reads is overdue.

Owns the arithmetic of `Timeouts` for one such request, all its attempts together. It does not wait,
and knows nothing of how the answer is read. Our own calls keep theirs in `transport/exchange.py`,
where the text is decoded anyway; here every event of a stream that carries data counts as text.
"""

from __future__ import annotations

from ._clock import Clock
from ._types import Timeouts
from .errors import DeadlineError, FirstTokenTimeoutError, StallTimeoutError, TotalTimeoutError

NEVER = float("inf")


class Deadlines:
    """The limits on one request. Times are on ``clock``, in seconds."""

    def __init__(self, timeouts: Timeouts, clock: Clock) -> None:
        self._timeouts = timeouts
        self._clock = clock
        self._total = NEVER
        self._next = NEVER  # for the first event, then for the one after the last
        self._begun = False
        self._started = False

    def sent(self, *, streamed: bool) -> None:
        """An attempt is sent. An answer that does not stream has only the total limit."""
        now, limits = self._clock(), self._timeouts
        if not self._started:
            self._started = True
            self._total = NEVER if limits.total is None else now + limits.total
        self._begun = False
        first = limits.first_token if streamed else None
        self._next = NEVER if first is None else now + first

    def event(self) -> None:
        """An event of a stream has arrived."""
        self._begun = True
        stall = self._timeouts.stall
        self._next = NEVER if stall is None else self._clock() + stall

    def away(self, seconds: float) -> None:
        """The reader was elsewhere: that time is its own."""
        self._total += seconds
        self._next += seconds

    def remaining(self) -> float:
        """Seconds until something is overdue; may be infinite, or negative."""
        return min(self._total, self._next) - self._clock()

    def error(self) -> DeadlineError:
        """What to say when that time has passed."""
        limits = self._timeouts
        if self._clock() >= self._total:
            return TotalTimeoutError(
                f"The request took longer than {limits.total} s (Timeouts.total)."
            )
        if self._begun:
            return StallTimeoutError(
                f"No event for {limits.stall} s in the middle of the answer (Timeouts.stall)."
            )
        return FirstTokenTimeoutError(
            f"No event within {limits.first_token} s of sending the request "
            "(Timeouts.first_token). The endpoint may be overloaded: lower the concurrency."
        )
