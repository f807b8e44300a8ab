"""One HTTP/2 stream as its request sees it: what has arrived, what went wrong, who waits for it.

Owns the receive buffer of a stream, its window and its deadline. Knows nothing of frames, of
sockets or of other streams: a connection fills it and is told of what was read, through `Link`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import httpx2

from ._runtime import Runtime, Signal
from .body import MARK_RANGE, FillingBody

Headers = list[tuple[bytes, bytes]]

NEVER = float("inf")


class Link(Protocol):
    """What a stream asks of its connection."""

    runtime: Runtime

    def credit(self, stream: H2Stream, size: int) -> None:
        """Let the server send `size` more bytes on the stream."""

    def abandon(self, stream: H2Stream) -> None:
        """Reset the stream if the server may still send on it. Idempotent."""

    def arm(self, deadline: float) -> None:
        """See to it that the stream's deadline is looked at when it falls due."""


class H2Stream:
    """The state of one request on one connection.

    Buffered bytes never exceed the stream's window: the connection grants more only as `take`
    hands them out. A failure is kept until the buffer is empty, so that what arrived before it is
    not lost.
    """

    __slots__ = (
        "buffer",
        "deadline",
        "ended",
        "error",
        "expected_length",
        "head",
        "id",
        "informational",
        "link",
        "lost",
        "mark",
        "method",
        "offset",
        "received",
        "send_window",
        "sent",
        "signal",
        "timeout_error",
        "trailers",
        "uncredited",
        "unprocessed",
        "wanted",
        "window",
    )

    def __init__(self, link: Link, stream_id: int, method: bytes, window: int, offset: int) -> None:
        self.link = link
        self.id = stream_id
        self.method = method
        self.offset = offset  # where the request's first byte lies in the connection's output
        self.sent = False  # the whole request has been queued
        self.window = window  # bytes the server may still send
        self.send_window = 0  # bytes it still takes
        self.wanted = 1  # bytes that wake the reader ...
        self.mark = b""  # ... as does this, at their end
        self.uncredited = 0  # bytes read by the consumer and not yet granted again
        self.buffer = bytearray()
        self.received = 0  # bytes of body so far
        self.expected_length: int | None = None
        self.head: tuple[int, Headers] | None = None
        self.informational = 0
        self.trailers: Headers = []
        self.ended = False  # nothing more will arrive: complete, failed or abandoned
        self.error: Exception | None = None
        self.unprocessed = False  # the server certainly did not act on the request
        self.lost = False  # the connection went away under the stream
        self.signal: Signal = None
        self.deadline = NEVER
        self.timeout_error: type[httpx2.TimeoutException] = httpx2.ReadTimeout

    def fail(self, error: Exception, *, unprocessed: bool = False, lost: bool = False) -> None:
        """End the stream with an error, once; a stream that has ended keeps its first outcome."""
        if not self.ended:
            self.ended = True
            self.error = error
            self.unprocessed = unprocessed
            self.lost = lost
            self.notify()

    def notify(self) -> None:
        """Wake the task that waits on this stream, if any."""
        if self.signal is not None:
            self.link.runtime.wake(self.signal)
            self.signal = None  # once is enough: more frames may come before its turn

    @property
    def due(self) -> bool:
        """Whether what has arrived is what the reader waits for."""
        if len(self.buffer) >= self.wanted:
            return True
        return bool(self.mark) and self.mark in self.buffer[-MARK_RANGE:]

    async def wait(self, timeout: float | None, error: type[httpx2.TimeoutException]) -> None:
        """Wait for the connection to change something here.

        After `timeout` seconds the connection fails this stream, and no other, with `error`.
        """
        runtime = self.link.runtime
        self.signal = runtime.signal()
        if timeout is not None:
            self.timeout_error = error
            self.deadline = runtime.clock() + timeout
            self.link.arm(self.deadline)
        try:
            await self.signal
        finally:
            self.signal = None
            self.deadline = NEVER

    async def response(self, timeout: float | None) -> tuple[int, Headers]:
        """Wait for the final response's status and headers."""
        while self.head is None:
            if self.error is not None:
                raise self.error
            await self.wait(timeout, httpx2.ReadTimeout)
        return self.head

    def take(self) -> bytes:
        """Hand out everything that has arrived and let the server send as much again."""
        data = bytes(self.buffer)
        self.buffer.clear()
        if not self.ended:
            self.link.credit(self, len(data))
        return data

    def close(self) -> None:
        """Give the stream up: nothing is read any more. Idempotent, never blocks."""
        self.buffer.clear()
        self.link.abandon(self)


class ResponseBody(FillingBody):
    """The body of a response, pulled chunk by chunk from its stream.

    Leaving it in any way, by the end, an error, a cancellation, `aclose`, a `break` out of the
    iteration, or by dropping the last reference, ends the stream on the server too.
    """

    def __init__(self, stream: H2Stream, timeout: float | None) -> None:
        self._stream = stream
        self._timeout = timeout
        # The server is granted more once half a window has been read, so it can always send half.
        self._most_wanted = max(1, stream.window // 2)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while data := await self.receive():
                yield data
        finally:
            self._stream.close()

    async def receive(self, at_least: int = 1, mark: bytes = b"") -> bytes:
        """See `FillingBody.receive`."""
        stream = self._stream
        stream.wanted, stream.mark = min(at_least, self._most_wanted), mark
        while not (stream.ended or stream.due):
            await stream.wait(self._timeout, httpx2.ReadTimeout)
        if not stream.buffer and stream.error is not None:
            raise stream.error
        return stream.take()

    def take(self) -> bytes:
        """See `FillingBody.take`."""
        return self._stream.take()

    async def aclose(self) -> None:
        """Reset the stream unless it is complete. Does not block."""
        self._stream.close()

    def __del__(self) -> None:
        # A response that was neither read nor closed. The finaliser may run in any thread.
        stream = getattr(self, "_stream", None)
        if stream is not None and not stream.ended:
            stream.link.runtime.post(stream.close)
