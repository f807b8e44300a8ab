"""A fixed number of requests in flight.

Owns the simplest window there is. Knows nothing of the endpoint's answers.
"""

from __future__ import annotations

import time

import anyio

from fullbore._clock import Clock
from fullbore.errors import ConfigError
from fullbore.limits._limiter import Outcome
from fullbore.limits.admission import Admission, Pacer, Sleep


class FixedWindow:
    """A window that never moves."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ConfigError(
                f"a concurrency limit must be at least 1, got {limit}; "
                'pass a positive number, or "auto" to have it found'
            )
        self._limit = limit

    @property
    def limit(self) -> int:
        """The number given."""
        return self._limit

    def admitted(self, *, now: float, in_flight: int) -> None:
        """Nothing to learn."""

    def finished(
        self, outcome: Outcome, *, now: float, started: float, mark: None, in_flight: int
    ) -> None:
        """Nothing to learn."""


class FixedLimiter(Admission):
    """At most `limit` requests in flight, fair between flows.

    Raises:
        ConfigError: `limit` is below 1.
    """

    def __init__(
        self,
        limit: int,
        *,
        pacer: Pacer | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = anyio.sleep,
    ) -> None:
        super().__init__(FixedWindow(limit), pacer=pacer, clock=clock, sleep=sleep)
