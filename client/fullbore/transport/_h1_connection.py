"""One HTTP/1.1 connection: a request out, its response in, one at a time.

Owns the state of the exchange under way and the bound on what is buffered. Knows nothing of
pools, reuse beyond "I may be used again", or retries.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import lru_cache

import anyio
import httpx2

from ._h1_parser import Headers, ResponseFaultError, ResponseParser
from ._h1_wire import Wire
from ._h2_request import RequestBody
from .body import MARK_RANGE, FillingBody

HIGH_WATER = 65_536
"""Bytes of a response held above which the socket is not read: a slow reader stops the server.
With what one read of the socket may add, 320 KiB at most are in this process."""

_BAD = re.compile(rb"[\x00\r\n]")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class H1Connection:
    """A connection; `wire` is set by whoever opens it.

    Attributes:
        idle_since: When it last fell idle, on the pool's clock.
    """

    def __init__(self) -> None:
        self.wire: Wire | None = None
        self.idle_since = 0.0
        self._parser: ResponseParser | None = None
        self._error: httpx2.TransportError | None = None
        self._wanted = 0
        self._mark = b""
        self._sent_whole = True
        self._sent_any = False

    @property
    def stale(self) -> bool:
        """Whether it cannot be used for a request any more."""
        return self.wire is None or self.wire.is_stale()

    @property
    def untouched(self) -> bool:
        """Whether the server can have seen nothing of the last request."""
        return not self._sent_any

    @property
    def answered(self) -> bool:
        """Whether any byte of a response to the last request has come."""
        return self._parser is not None and self._parser.began

    @property
    def trailers(self) -> Headers:
        """Header fields after the body, once it has been read to its end."""
        return [] if self._parser is None else self._parser.trailers

    # The wire's side

    def feed(self, data: bytes) -> bool:
        """See `Sink.feed`."""
        parser = self._parser
        if parser is None:
            self.close()  # nobody asked: whatever it is, it is not the answer to the next request
            return False
        try:
            parser.feed(data)
        except ResponseFaultError as fault:
            self._error = httpx2.RemoteProtocolError(f"The server sent {fault}.")
            self.close()
            return True
        if len(parser.body) >= HIGH_WATER and self.wire is not None:
            self.wire.pause()
        return self._is_due(parser)

    def lost(self, cause: Exception | None) -> None:
        """See `Sink.lost`."""
        parser = self._parser
        if parser is None or parser.complete or self._error is not None:
            return
        if cause is not None:
            self._error = httpx2.ReadError(f"The connection broke: {cause!r}")
            return
        try:
            parser.feed_end()
        except ResponseFaultError as fault:
            self._error = httpx2.RemoteProtocolError(f"The server sent {fault}.")

    # The request's side

    async def send(
        self, head: bytes, method: bytes, body: RequestBody, timeout: float | None
    ) -> None:
        """Send a request, as far as the server takes it.

        A server that answers and closes before it has the whole body is heard all the same.

        Raises:
            httpx2.WriteTimeout: It took nothing for that long.
            httpx2.LocalProtocolError: The body is not as long as its content-length.
        """
        self._parser = ResponseParser(method)
        self._error = None
        self._sent_any = self._sent_whole = False
        if body.empty:
            self._sent_whole = await self._send(head, timeout)
            return
        sent = 0
        async with aclosing(body.chunks()) as chunks:
            async for chunk in chunks:
                sent += len(chunk)
                if body.length is None:
                    chunk = b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunk else b""
                elif sent > body.length:
                    break
                if head or chunk:
                    if not await self._send(head + chunk, timeout):
                        return
                    head = b""
        if body.length is None:
            self._sent_whole = await self._send(head + b"0\r\n\r\n", timeout)
        elif sent != body.length:
            raise httpx2.LocalProtocolError(
                f"The request's content-length is {body.length}, its body has "
                f"{'more' if sent > body.length else f'only {sent}'} bytes."
            )
        else:
            self._sent_whole = True

    async def _send(self, data: bytes, timeout: float | None) -> bool:
        assert self.wire is not None
        if timeout is None:
            sent = await self.wire.send(data)
        else:
            with anyio.move_on_after(timeout) as scope:
                sent = await self.wire.send(data)
            if scope.cancelled_caught:
                self._sent_any = True
                raise httpx2.WriteTimeout(f"The server has taken nothing for {timeout} s.")
        self._sent_any = self._sent_any or sent
        return sent

    async def response(self, timeout: float | None) -> tuple[int, Headers]:
        """Wait for the final response's head."""
        parser = self._parser
        assert parser is not None
        self._wanted, self._mark = 0, b""
        while parser.head is None:
            if self._error is not None:
                raise self._error
            await self._wait(timeout)
        return parser.head

    async def receive(self, at_least: int, mark: bytes, timeout: float | None) -> bytes:
        """See `FillingBody.receive`."""
        parser = self._parser
        assert parser is not None
        self._wanted, self._mark = min(at_least, HIGH_WATER), mark
        while not self._is_due(parser) and self._error is None:
            await self._wait(timeout)
        if not parser.body and self._error is not None:
            raise self._error
        return self.take()

    def take(self) -> bytes:
        """See `FillingBody.take`."""
        parser = self._parser
        assert parser is not None
        data = bytes(parser.body)
        parser.body.clear()
        if self.wire is not None:
            self.wire.resume()
        return data

    def _is_due(self, parser: ResponseParser) -> bool:
        """Whether what is waited for is there."""
        if parser.complete or (parser.head is not None and len(parser.body) >= self._wanted):
            return True
        return bool(self._mark) and self._mark in parser.body[-MARK_RANGE:]

    @property
    def finished(self) -> bool:
        """Whether the response has been read to its end."""
        parser = self._parser
        return parser is not None and parser.complete and not parser.body

    def reset_for_reuse(self) -> bool:
        """Forget the exchange that has ended; False if the connection cannot carry another."""
        parser = self._parser
        if parser is None or not (parser.complete and parser.reusable and self._sent_whole):
            return False
        self._parser = None
        return not self.stale

    def close(self) -> None:
        """Close the socket at once. Idempotent."""
        if self.wire is not None:
            self.wire.close()

    async def _wait(self, timeout: float | None) -> None:
        assert self.wire is not None
        if timeout is None:
            await self.wire.wait()
            return
        with anyio.move_on_after(timeout) as scope:
            await self.wire.wait()
        if scope.cancelled_caught:
            raise httpx2.ReadTimeout(f"The server has sent nothing for {timeout} s.")


class H1Body(FillingBody):
    """The body of a response. `release` is called once, when it is over in whatever way."""

    def __init__(
        self,
        connection: H1Connection,
        timeout: float | None,
        release: Callable[[H1Connection], None],
        post: Callable[[Callable[[], object]], None],
    ) -> None:
        self._connection: H1Connection | None = connection
        self._timeout = timeout
        self._release = release
        self._post = post
        self.trailers: Headers = []

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while data := await self.receive():
                yield data
        finally:
            self._end()

    async def receive(self, at_least: int = 1, mark: bytes = b"") -> bytes:
        """See `FillingBody.receive`."""
        connection = self._connection
        if connection is None:
            return b""
        try:
            data = await connection.receive(at_least, mark, self._timeout)
        except httpx2.TransportError:
            self._end()
            raise
        if connection.finished:
            self._end()
        return data

    def take(self) -> bytes:
        """See `FillingBody.take`."""
        connection = self._connection
        if connection is None:
            return b""
        data = connection.take()
        if connection.finished:
            self._end()
        return data

    async def aclose(self) -> None:
        """Close the connection, unless the body has been read to its end. Does not block."""
        self._end()

    def _end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self.trailers += connection.trailers
            self._release(connection)

    def __del__(self) -> None:
        # A response that was neither read nor closed. The finaliser may run in any thread.
        connection = getattr(self, "_connection", None)
        if connection is not None:
            release = self._release
            self._post(lambda: release(connection))


def request_head(request: httpx2.Request) -> bytes:
    """Return a request's first line and headers as they are sent.

    Raises:
        httpx2.LocalProtocolError: A name or value that HTTP forbids.
    """
    parts = [request.method.encode("ascii"), b" ", request.url.raw_path, b" HTTP/1.1\r\n"]
    for name, value in request.headers.raw:
        if not _is_name(name) or _BAD.search(value):
            raise httpx2.LocalProtocolError(
                f"The header {name!r} has a name or a value that HTTP forbids."
            )
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _is_name(name: bytes) -> bool:
    return _NAME.fullmatch(name) is not None
