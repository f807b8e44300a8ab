"""The door to one endpoint: who waits, who is let in, who is woken.

Owns the permits, the fair queue and the waiting. When to let in is asked of two policies that do
no I/O and can therefore be simulated: a `Window` (how many at once) and a `Pacer` (how many per
minute and day). Knows nothing of HTTP.

No background task exists. Releasing a permit lets the next ones in; when only time is missing,
one of the waiters sleeps for all.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import anyio
import anyio.lowlevel

from fullbore._clock import Clock
from fullbore.limits._limiter import NO_WAIT, Outcome, Wait
from fullbore.limits.fair import FairQueue

Sleep = Callable[[float], Awaitable[object]]
"""Sleeps for that many seconds of the clock it belongs to."""


Mark = TypeVar("Mark")


class Window(Protocol[Mark]):
    """Policy: how many requests may be in flight."""

    @property
    def limit(self) -> int:
        """The most that may be in flight now; at least 1."""
        ...

    def admitted(self, *, now: float, in_flight: int) -> Mark:
        """A request was let in; `in_flight` counts it. The result is handed to `finished`."""
        ...

    def finished(
        self, outcome: Outcome, *, now: float, started: float, mark: Mark, in_flight: int
    ) -> None:
        """A request ended.

        Args:
            outcome: How it ended.
            now: The clock, in seconds.
            started: The clock when it was let in.
            mark: What `admitted` returned for it.
            in_flight: Requests in flight now, itself included.
        """
        ...


class Pacer(Protocol):
    """Policy: how many requests and tokens may be started per span of time."""

    def wait(self, now: float, tokens: int, in_flight: int) -> Wait:
        """How long a request of that size has to wait when it would start now."""
        ...

    def headroom(self, now: float, in_flight: int) -> int | None:
        """How many small requests may start now; None for any number."""
        ...

    def reserve(self, now: float, tokens: int) -> object:
        """Charge a request that starts now; the result is handed to `settle`."""
        ...

    def settle(self, now: float, reservation: Any, outcome: Outcome, in_flight: int) -> None:
        """Replace the estimate by the usage; `in_flight` no longer counts the request."""
        ...


class AdmissionPermit:
    """A place at the endpoint; see `fullbore.limits.Permit`."""

    __slots__ = ("_door", "_mark", "_released", "_reservation", "_started", "waited")

    def __init__(
        self, door: Admission, *, waited: float, started: float, mark: Any, reservation: object
    ) -> None:
        self.waited = waited
        self._door = door
        self._started = started
        self._mark = mark
        self._reservation = reservation
        self._released = False

    def release(self, outcome: Outcome) -> None:
        """Give the place back and report how the request went. Exactly once."""
        assert not self._released, "a permit is released once"
        self._released = True
        self._door._leave(outcome, self._started, self._mark, self._reservation)


class _Waiter:
    __slots__ = ("permit", "since", "tokens", "woken")

    def __init__(self, since: float, tokens: int) -> None:
        self.since = since
        self.tokens = tokens
        self.woken = anyio.Event()
        self.permit: AdmissionPermit | None = None


class Admission:
    """A `Limiter` made of a window and, optionally, a pacer.

    Args:
        window: How many at once.
        pacer: How many per span of time; None for no pacing.
        clock: Seconds; the policies see only this clock.
        sleep: Sleeps on that same clock.
    """

    def __init__(
        self,
        window: Window[Any],
        *,
        pacer: Pacer | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = anyio.sleep,
    ) -> None:
        self._window = window
        self._pacer = pacer
        self._clock = clock
        self._sleep = sleep
        self._queue: FairQueue[_Waiter] = FairQueue()
        self._in_flight = 0
        self._timekeeper: _Waiter | None = None
        self._wake_at = 0.0

    @property
    def in_flight(self) -> int:
        """Permits held now."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Calls of `acquire` that have not been answered."""
        return len(self._queue)

    @property
    def limit(self) -> int:
        """The most permits that may be held now."""
        return self._window.limit

    def headroom(self) -> int:
        """How many more `acquire` calls would be answered at once."""
        room = self._window.limit - self._in_flight
        if room <= 0 or self._queue:
            return 0
        if self._pacer is not None:
            paced = self._pacer.headroom(self._clock(), self._in_flight)
            room = room if paced is None else min(room, paced)
        return room

    def pace(self, *, tokens: int = 0) -> Wait:
        """How long quotas alone would keep a request of that size from being sent now."""
        if self._pacer is None:
            return NO_WAIT
        return self._pacer.wait(self._clock(), tokens, self._in_flight)

    async def acquire(self, *, flow: object, tokens: int = 0) -> AdmissionPermit:
        """Wait for a permit; see `fullbore.limits.Limiter.acquire`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        now = self._clock()
        if (
            not self._queue
            and self._in_flight < self._window.limit
            and (self._delay(now, tokens) <= _INSTANT)
        ):
            return self._let_in(now, now, tokens)
        waiter = _Waiter(now, tokens)
        self._queue.push(flow, waiter)
        self._admit()
        try:
            while waiter.permit is None:
                if self._timekeeper is waiter:
                    await self._keep_time(waiter)
                else:
                    await waiter.woken.wait()
                    waiter.woken = anyio.Event()
        except BaseException:
            self._abandon(flow, waiter)
            raise
        finally:
            self._hand_over(waiter)
        return waiter.permit

    def _admit(self) -> None:
        """Let in everyone who may enter now; have somebody watch the clock for the next."""
        while (waiter := self._queue.peek()) is not None and self._in_flight < self._window.limit:
            now = self._clock()
            delay = self._delay(now, waiter.tokens)
            if delay > _INSTANT:
                self._appoint(waiter, now + delay)
                return
            self._queue.pop()
            waiter.permit = self._let_in(now, waiter.since, waiter.tokens)
            waiter.woken.set()

    def _delay(self, now: float, tokens: int) -> float:
        if self._pacer is None:
            return 0.0
        return self._pacer.wait(now, tokens, self._in_flight).seconds

    def _let_in(self, now: float, since: float, tokens: int) -> AdmissionPermit:
        self._in_flight += 1
        return AdmissionPermit(
            self,
            waited=now - since,
            started=now,
            mark=self._window.admitted(now=now, in_flight=self._in_flight),
            reservation=None if self._pacer is None else self._pacer.reserve(now, tokens),
        )

    def _appoint(self, waiter: _Waiter, wake_at: float) -> None:
        """Have a waiter sleep until `wake_at`, for all of them."""
        if self._timekeeper is None:
            self._timekeeper = waiter
        elif self._wake_at <= wake_at:
            return  # it will look in time
        self._wake_at = wake_at
        self._timekeeper.woken.set()

    async def _keep_time(self, waiter: _Waiter) -> None:
        """Sleep until `_wake_at`, or until `waiter` is let in or is told another time."""
        waiter.woken = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(self._alarm, waiter)
            await waiter.woken.wait()
            group.cancel_scope.cancel()

    async def _alarm(self, waiter: _Waiter) -> None:
        await self._sleep(max(0.0, self._wake_at - self._clock()))
        # Step down before looking, so that whoever waits first from now on takes over, if anybody
        # has to: when the window is what binds, a release lets the next one in.
        self._timekeeper = None
        self._admit()
        waiter.woken.set()

    def _hand_over(self, waiter: _Waiter) -> None:
        if self._timekeeper is waiter:
            self._timekeeper = None
            self._admit()

    def _abandon(self, flow: object, waiter: _Waiter) -> None:
        """Undo an `acquire` that was cancelled, whether or not it had been let in."""
        if waiter.permit is None:
            self._queue.remove(flow, waiter)
            self._admit()  # a large request at the head may have held up smaller ones
        else:
            waiter.permit.release(Outcome(kind="cancelled", total=0.0))

    def _leave(self, outcome: Outcome, started: float, mark: Any, reservation: object) -> None:
        now = self._clock()
        self._window.finished(
            outcome, now=now, started=started, mark=mark, in_flight=self._in_flight
        )
        self._in_flight -= 1
        if self._pacer is not None:
            self._pacer.settle(now, reservation, outcome, self._in_flight)
        self._admit()


_INSTANT = 1e-6
"""Seconds too short to sleep for: below the rounding of clocks."""
