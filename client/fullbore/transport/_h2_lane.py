"""One HTTP/2 connection at work: its socket, the tasks that serve it, and its deadlines.

Owns the reader, the writer and the alarm of a connection, in a task of its own that no request's
cancellation can touch. Knows nothing of origins, waiting requests or retries.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc
import httpx2
from h2.errors import ErrorCodes

from ._asyncio_stream import AsyncioStream
from ._h2_config import HTTP2Config
from ._h2_connection import H2Connection
from ._h2_frames import ConnectionFaultError
from ._h2_request import RequestBody
from ._h2_stream import NEVER, H2Stream, Headers
from ._h2_upload import Upload, send_at_once
from ._runtime import Runtime, Signal

READ_SIZE = 262_144
MAX_QUEUED = 1_048_576
"""Bytes queued for the socket above which the connection is given up: the server does not read
what it makes us answer."""
GOODBYE_TIMEOUT = 0.5  # seconds for the last frames

Dial = Callable[[], Awaitable[anyio.abc.ByteStream]]

_SOCKET_ERRORS = (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError, ssl.SSLError)


class Lane:
    """A connection from its opening to its end.

    `reserved` counts slots promised to requests that have not yet opened their streams.
    """

    def __init__(
        self,
        *,
        config: HTTP2Config,
        runtime: Runtime,
        dial: Dial,
        connect_timeout: float | None,
        on_slot: Callable[[], None],
        on_end: Callable[[Lane, Exception | None], None],
    ) -> None:
        self.runtime = runtime
        self.reserved = 0
        self.ready = False
        self._config = config
        self._dial = dial
        self._connect_timeout = connect_timeout
        self._on_slot = on_slot
        self._on_end = on_end
        self._connection = H2Connection(config, self, self._slot_changed)
        self._scope = anyio.CancelScope()
        self._alarm = anyio.CancelScope()
        self._writer: Signal = None
        self._heard = 0.0  # when bytes last came in
        self._idle_since = 0.0
        self._busy_since = 0.0
        self._fault: tuple[type[httpx2.TransportError], str] | None = None
        self._closing = False
        self.ended = anyio.Event()
        runtime.spawn(self._run)

    # For the pool

    @property
    def accepts(self) -> bool:
        """Whether new streams may be opened here, now or once others end."""
        return self.ready and not self._connection.draining and not self._closing

    @property
    def connecting(self) -> bool:
        """Whether the connection is still being opened."""
        return not self.ready and not self._closing

    @property
    def limit(self) -> int:
        """Most streams at once."""
        return self._connection.limit

    @property
    def load(self) -> int:
        """Slots taken: streams, promised ones, and resets the server has not confirmed."""
        return self._connection.load + self.reserved

    @property
    def proven(self) -> bool:
        """Whether the connection ever carried a response."""
        return self._connection.got_response

    def close(self) -> None:
        """End the connection and everything on it. `ended` is set once nothing is left."""
        self._closing = True
        self._scope.cancel()

    # For requests

    @property
    def can_open(self) -> bool:
        """Whether a reserved slot is still good: the server may have lowered its limit since."""
        return self.accepts and self._connection.load < self._connection.limit

    def unreserve(self) -> None:
        """Give a reserved slot back unused."""
        self.reserved -= 1
        self._slot_changed()

    def open(self, headers: Headers, body: RequestBody) -> H2Stream:
        """Turn a reserved slot into a stream and send the request on it.

        A body that cannot go out at once is left to `send_body`: `stream.sent` says which.
        """
        self.reserved -= 1
        if not self._connection.streams:
            self._busy_since = self.runtime.clock()
            self.arm(self._busy_since + self._config.ping_interval)
        stream = self._connection.open(headers, headers[0][1], end_stream=body.empty)
        if not stream.sent:
            send_at_once(self._connection, stream, body)
        self._flush()
        return stream

    def send_body(
        self, stream: H2Stream, body: RequestBody, timeout: float | None
    ) -> Awaitable[None]:
        """Send the body of a request whose headers have been sent; see `Upload.run`."""
        return Upload(self._connection, stream, self._flush, timeout).run(body)

    # For streams (`Link`)

    def credit(self, stream: H2Stream, size: int) -> None:
        """Let the server send `size` more bytes on the stream."""
        self._connection.credit(stream, size)
        self._flush()

    def abandon(self, stream: H2Stream) -> None:
        """Reset the stream if it is open; its slot comes back at once or after a PING."""
        if self._connection.reset(stream, ErrorCodes.CANCEL):
            stream.fail(httpx2.StreamClosed())
            self._after_reset()

    def arm(self, deadline: float) -> None:
        """Have the alarm go off at `deadline` at the latest."""
        if deadline < self._alarm.deadline:
            self._alarm.deadline = deadline

    # The connection's own task

    async def _run(self) -> None:
        error: Exception | None = None
        try:
            with self._scope:
                await self._open_and_serve()
        except httpx2.TransportError as caught:
            error = caught
        except Exception as caught:  # a bug or an exotic stream: must not take the loop down
            error = httpx2.RemoteProtocolError(f"The connection failed: {caught!r}")
            error.__cause__ = caught
        finally:
            self._closing = True
            cause = error
            self._connection.fail_all(lambda: self._stream_error(cause))
            self.ended.set()
            self._on_end(self, error)

    async def _open_and_serve(self) -> None:
        socket: anyio.abc.ByteStream | None = None
        try:
            try:
                with anyio.fail_after(self._connect_timeout):
                    socket = await self._dial()
                    await self._settle(socket)
            except TimeoutError:
                raise httpx2.ConnectTimeout(
                    f"No HTTP/2 connection after {self._connect_timeout} s."
                ) from None
            self.ready = True
            self._heard = self._idle_since = self._busy_since = self.runtime.clock()
            self._on_slot()
            await self._serve(socket)
        finally:
            if socket is not None:
                with anyio.CancelScope(shield=True):
                    await self._say_goodbye(socket)
                    await socket.aclose()

    async def _settle(self, socket: anyio.abc.ByteStream) -> None:
        """Exchange prefaces. No request is sent before the server's limits are known."""
        self._connection.start()
        try:
            await socket.send(self._connection.take_output())
            while not self._connection.settled:
                self._connection.receive(await socket.receive(READ_SIZE))
            if self._connection.draining:  # else the pool would open the next one, and so on
                raise httpx2.ConnectError(
                    f"The server closed the connection at once{self._connection.farewell}."
                )
        except anyio.EndOfStream:
            raise httpx2.ConnectError("The server closed the connection at once.") from None
        except _SOCKET_ERRORS as error:
            raise httpx2.ConnectError(f"The connection broke at once: {error!r}") from error
        except ConnectionFaultError as fault:
            raise httpx2.RemoteProtocolError(f"The server is no good: {fault}.") from fault

    async def _serve(self, socket: anyio.abc.ByteStream) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write, socket, tasks.cancel_scope)
            tasks.start_soon(self._watch, tasks.cancel_scope)
            await self._read(socket)
            tasks.cancel_scope.cancel()
        if self._fault is not None:
            error, message = self._fault
            raise error(message)

    async def _read(self, socket: anyio.abc.ByteStream) -> None:
        connection = self._connection

        def take(data: bytes) -> None:
            self._heard = self.runtime.clock()
            connection.receive(data)
            if connection.output:
                self._flush()

        try:
            if isinstance(socket, AsyncioStream):
                await socket.pour(take)
            while True:
                take(await socket.receive(READ_SIZE))
        except anyio.EndOfStream:
            self._fault = (
                httpx2.RemoteProtocolError,
                f"The server closed the connection{connection.farewell}.",
            )
        except _SOCKET_ERRORS as error:
            cause = error.__cause__ or error
            message = f"The connection broke{connection.farewell}: {cause!r}"
            self._fault = self._fault or (httpx2.ReadError, message)
        except ConnectionFaultError as fault:
            message = f"The server broke the HTTP/2 protocol: {fault}."
            self._fault = (httpx2.RemoteProtocolError, message)

    async def _write(self, socket: anyio.abc.ByteStream, scope: anyio.CancelScope) -> None:
        connection = self._connection
        try:
            while True:
                while connection.output:
                    await socket.send(connection.take_output())
                    if connection.blocked:
                        for stream in list(connection.blocked):
                            stream.notify()
                self._writer = self.runtime.signal()
                await self._writer
        except _SOCKET_ERRORS as error:
            cause = error.__cause__ or error
            self._fault = self._fault or (httpx2.WriteError, f"The connection broke: {cause!r}")
            scope.cancel()

    async def _watch(self, scope: anyio.CancelScope) -> None:
        while (deadline := self._tick(self.runtime.clock())) is not None:
            with anyio.CancelScope(deadline=deadline) as self._alarm:
                await anyio.sleep_forever()
        scope.cancel()

    def _tick(self, now: float) -> float | None:
        """Do what is due; return when to look again, or None to end the connection."""
        connection, config, due = self._connection, self._config, NEVER
        for stream in [s for s in connection.streams.values() if s.deadline <= now]:
            self._time_out(stream)
        for stream in connection.streams.values():
            due = min(due, stream.deadline)
        if (pinged := connection.pings.sent) is not None:
            if now < pinged + config.ping_timeout:
                due = min(due, pinged + config.ping_timeout)
            elif self._heard > pinged:  # it lives, and does not answer PINGs
                connection.end_ping()
                return now
            else:
                message = (
                    f"The server has sent nothing in the {config.ping_timeout} s since a PING."
                )
                self._fault = (httpx2.ReadError, message)
                return None
        elif connection.streams:
            silent_since = max(self._heard, self._busy_since)
            if now >= silent_since + config.ping_interval:
                connection.pings.start()
                self._flush()
                return now
            due = min(due, silent_since + config.ping_interval)
        if self._is_idle():
            if connection.draining:
                message = f"The server closed the connection{connection.farewell}."
                self._fault = (httpx2.RemoteProtocolError, message)
            elif now < self._idle_since + config.idle_expiry:
                return min(due, self._idle_since + config.idle_expiry)
            self._closing = True  # no request may be promised a slot here any more
            return None
        return due

    def _time_out(self, stream: H2Stream) -> None:
        verb = "sent" if stream.timeout_error is httpx2.ReadTimeout else "taken"
        self._connection.reset(stream, ErrorCodes.CANCEL)
        stream.fail(stream.timeout_error(f"The server has {verb} nothing on this stream in time."))
        self._after_reset()

    async def _say_goodbye(self, socket: anyio.abc.ByteStream) -> None:
        self._connection.goodbye()
        if self._connection.output:
            with anyio.move_on_after(GOODBYE_TIMEOUT):
                try:
                    await socket.send(self._connection.take_output())
                except (*_SOCKET_ERRORS, anyio.BusyResourceError):
                    pass  # the other side has gone already

    # Small parts

    def _flush(self) -> None:
        """Have the writer send what is queued, all of it in one go, later in this loop turn."""
        queued = len(self._connection.output)
        if (pinged := self._connection.pings.sent) is not None:
            self.arm(pinged + self._config.ping_timeout)
        if queued > MAX_QUEUED:
            self._fault = (httpx2.WriteError, "The server does not read what it is sent.")
            self._scope.cancel()
        if queued and self._writer is not None:
            self.runtime.wake(self._writer)
            self._writer = None

    def _slot_changed(self) -> None:
        now = self.runtime.clock()
        if not self._is_idle():
            self.arm(now + self._config.ping_interval)
        else:
            self._idle_since = now
            self.arm(now + (0.0 if self._connection.draining else self._config.idle_expiry))
        self._on_slot()

    def _after_reset(self) -> None:
        self._flush()
        self._slot_changed()

    def _is_idle(self) -> bool:
        return not self._connection.streams and not self.reserved

    def _stream_error(self, cause: Exception | None) -> Exception:
        """Build an exception of its own for each stream: a shared one would mix tracebacks."""
        message = "The transport was closed under the request." if cause is None else str(cause)
        kind, message = self._fault or (httpx2.ReadError, message)
        error = kind(message)
        error.__cause__ = cause
        return error
