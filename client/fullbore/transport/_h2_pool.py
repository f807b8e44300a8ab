"""The lanes of one origin: which request goes where, when to open another, who waits.

Owns slots and their order: first come, first served, and no slot is ever lost to a cancelled
request or to a connection that failed. Knows nothing of frames, headers or bodies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import anyio
import httpx2

from ._h2_config import HTTP2Config
from ._h2_dial import NotHTTP2
from ._h2_lane import Dial, Lane
from ._h2_stream import NEVER
from ._runtime import Runtime, Signal

_CLOSED = "The transport was closed."


class _Waiter:
    """A request that waits for a slot; `outcome` is a lane with a slot reserved, or an error."""

    __slots__ = ("outcome", "signal")

    def __init__(self) -> None:
        self.signal: Signal = None
        self.outcome: Lane | Exception | None = None


class OriginPool:
    """Connections to one origin.

    A lane is opened in a task of its own, so that a request which gives up does not take along the
    connection that others wait for. If nobody waits any more, the opening is given up.
    """

    def __init__(self, dial: Dial, config: HTTP2Config, runtime: Runtime) -> None:
        self._dial = dial
        self._config = config
        self._runtime = runtime
        self._lanes: list[Lane] = []
        self._waiters: deque[_Waiter] = deque()
        self._lane_size = config.max_streams_per_lane  # what the last server said it takes
        self._reopen_at = 0.0
        self._connect_timeout: float | None = None
        self._closed = False
        self.not_http2 = False

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Every connection that is open or being opened, draining ones included."""
        return tuple(self._lanes)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiters)

    async def acquire(self, timeouts: Mapping[str, float | None]) -> Lane:
        """Reserve a slot: the caller must call `Lane.open` or `Lane.unreserve` exactly once.

        `timeouts["connect"]` bounds the wait while no connection is open, `timeouts["pool"]` the
        wait for a slot on one.

        Raises:
            httpx2.ConnectError: No connection could be opened.
            httpx2.ConnectTimeout: None was open in time.
            httpx2.PoolTimeout: None had a free slot in time.
            NotHTTP2: The server does not speak HTTP/2.
        """
        if self._closed:  # a request that was to be sent again, say
            raise httpx2.ConnectError(_CLOSED)
        if not self._waiters and (lane := self._least_loaded()) is not None:
            lane.reserved += 1
            return lane
        waiter = _Waiter()
        self._waiters.append(waiter)
        try:
            self._open_lanes(timeouts.get("connect"))
            await self._wait(waiter, timeouts)
        except BaseException:
            self._withdraw(waiter)
            raise
        if isinstance(waiter.outcome, Lane):
            return waiter.outcome
        assert waiter.outcome is not None
        raise waiter.outcome

    def _pump(self) -> None:
        """Hand free slots to whoever waits, and open further lanes for the rest."""
        while self._waiters and (lane := self._least_loaded()) is not None:
            lane.reserved += 1
            self._resolve(self._waiters.popleft(), lane)
        if self._waiters:
            self._open_lanes(self._connect_timeout)

    async def aclose(self) -> None:
        """End every connection and wait until nothing of them is left."""
        self._closed = True
        self._fail_waiters(httpx2.ConnectError(_CLOSED))
        lanes = self.lanes
        for lane in lanes:
            lane.close()
        for lane in lanes:
            await lane.ended.wait()

    def _least_loaded(self) -> Lane | None:
        # The first of equals, so that under light load the later lanes fall idle and expire.
        best: Lane | None = None
        for lane in self._lanes:
            if lane.accepts and lane.load < lane.limit and (best is None or lane.load < best.load):
                best = lane
        return best

    def _open_lanes(self, connect_timeout: float | None) -> None:
        self._connect_timeout = connect_timeout  # for lanes that no one request asks for
        opening = sum(lane.connecting for lane in self._lanes)
        usable = [lane for lane in self._lanes if lane.accepts]
        if usable and self._runtime.clock() < self._reopen_at:
            return
        self._lane_size = min(
            (lane.limit for lane in usable if lane.limit), default=self._lane_size
        )
        if sum(lane.limit == 0 for lane in usable) > 1:
            return  # the server takes no streams at all for now; more connections do not help
        while (
            not self._closed
            and opening + len(usable) < self._config.max_lanes
            and opening * self._lane_size < len(self._waiters)
        ):
            opening += 1
            self._lanes.append(
                Lane(
                    config=self._config,
                    runtime=self._runtime,
                    dial=self._dial,
                    connect_timeout=connect_timeout,
                    on_slot=self._pump,
                    on_end=self._lane_ended,
                )
            )

    async def _wait(self, waiter: _Waiter, timeouts: Mapping[str, float | None]) -> None:
        connect, pool = timeouts.get("connect"), timeouts.get("pool")
        start = self._runtime.clock()
        if connect is not None and not self._is_connected():
            await self._wait_until(waiter, start + connect)
            if waiter.outcome is None and not self._is_connected():
                raise httpx2.ConnectTimeout(f"No connection was open within {connect} s.")
        if waiter.outcome is None:
            await self._wait_until(waiter, NEVER if pool is None else start + pool)
        if waiter.outcome is None:
            raise httpx2.PoolTimeout(
                f"No slot was free within {pool} s: {len(self._lanes)} connections are full and "
                f"{len(self._waiters)} requests wait. Send fewer at once or raise the pool timeout."
            )

    async def _wait_until(self, waiter: _Waiter, deadline: float) -> None:
        waiter.signal = self._runtime.signal()  # a cancelled one cannot be awaited again
        with anyio.CancelScope(deadline=deadline):
            await waiter.signal

    def _withdraw(self, waiter: _Waiter) -> None:
        """A request stopped waiting: pass on what it was given, give up what only it needed."""
        if isinstance(waiter.outcome, Lane):
            waiter.outcome.unreserve()
        elif waiter.outcome is None:
            self._waiters.remove(waiter)
        if not self._waiters:
            for lane in self._lanes:
                if lane.connecting:
                    lane.close()

    def _resolve(self, waiter: _Waiter, outcome: Lane | Exception) -> None:
        waiter.outcome = outcome
        if waiter.signal is not None:
            self._runtime.wake(waiter.signal)

    def _fail_waiters(self, error: Exception) -> None:
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            own = type(error)(str(error))  # a shared one would mix tracebacks
            own.__cause__ = error
            self._resolve(waiter, own)

    def _lane_ended(self, lane: Lane, error: Exception | None) -> None:
        self._lanes.remove(lane)
        if isinstance(error, NotHTTP2):
            self.not_http2 = True
            self._fail_waiters(error)
        elif error is not None and not lane.proven:
            # It never carried a response: as good as one that failed to open. Whoever waits goes
            # on waiting for the others, if there are any; otherwise this is everyone's answer.
            self._reopen_at = self._runtime.clock() + self._config.reopen_delay
            if not any(other.accepts or other.connecting for other in self._lanes):
                self._fail_waiters(error)
        self._pump()

    def _is_connected(self) -> bool:
        return any(lane.accepts for lane in self._lanes)
