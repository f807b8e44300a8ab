"""The moves of a limit as people and programs want them: in words, and as a stream of events.

Owns the fan-out from one limiter to many listeners. A listener that does not keep up loses the
oldest events and never holds up the limiter.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping

import anyio

from .limits import Move, Reason

KEPT = 1024
"""Moves kept for a listener that is busy."""

WORDS: Mapping[Reason, str] = {
    "slow_start": "the endpoint answers",
    "throughput_rises": "more still helps",
    "endpoint_full": "found the knee",
    "probe_up": "trying a few more",
    "probe_down": "trying a few less",
    "overloaded": "the endpoint refuses more",
    "probe_ceiling": "trying above the last refusal",
    "ceiling_rose": "the endpoint accepts more again",
    "endpoint_changed": "the endpoint has changed",
    "failures": "most requests fail",
}
"""Each reason for a move, in words fit for a progress bar."""


class MoveStream(AsyncIterator[Move]):
    """Every move from here on, oldest first; ends when the client is closed."""

    def __init__(self) -> None:
        self._moves: deque[Move] = deque(maxlen=KEPT)
        self._changed = anyio.Event()
        self._ended = False

    def __aiter__(self) -> MoveStream:
        return self

    async def __anext__(self) -> Move:
        while not self._moves:
            if self._ended:
                raise StopAsyncIteration
            await self._changed.wait()
            self._changed = anyio.Event()
        return self._moves.popleft()

    def put(self, move: Move) -> None:
        """Hand over one move."""
        self._moves.append(move)
        self._changed.set()

    def end(self) -> None:
        """No more will come."""
        self._ended = True
        self._changed.set()


class Moves:
    """Where a limiter reports its moves: call it with each.

    :param on_move: called with every move, in the event loop; it must not raise and not block.
    :ivar latest: the last move, ``None`` before the first.
    """

    def __init__(self, on_move: Callable[[Move], object] | None = None) -> None:
        self.latest: Move | None = None
        self._on_move = on_move
        self._streams: weakref.WeakSet[MoveStream] = weakref.WeakSet()

    def __call__(self, move: Move) -> None:
        self.latest = move
        for stream in self._streams:
            stream.put(move)
        if self._on_move is not None:
            self._on_move(move)

    def subscribe(self) -> MoveStream:
        """Return a stream of the moves to come."""
        stream = MoveStream()
        self._streams.add(stream)
        return stream

    def end(self) -> None:
        """End every stream."""
        for stream in self._streams:
            stream.end()

    def words(self) -> str:
        """Say why the limit is where it is; empty while it has not moved."""
        return "" if self.latest is None else WORDS[self.latest.reason]
