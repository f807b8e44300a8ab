"""A real HTTP/2 server on port 0 whose every fault is scripted: for tests, ours and users'.

Owns a listener, the server's side of `h2`, and handles to do to a client what servers do on bad
days: small and changing stream limits, tiny windows, resets, GOAWAY, silence, raw bytes. The
protocol is checked on the way: a client that breaks it is named in `errors`. Knows nothing of the
client it is used on.

    async def handler(exchange):
        await exchange.start(200)
        await exchange.send(b"one")
        await exchange.abort(ErrorCodes.INTERNAL_ERROR)

    async with ScriptedH2Server(handler) as server:
        ... server.url ...
"""

from __future__ import annotations

import contextlib
import ssl
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
from anyio.streams.tls import TLSListener
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

Headers = Sequence[tuple[bytes, bytes]]

_GONE = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


class H2Exchange:
    """One request, as the server sees it.

    Attributes:
        peer: The connection it came on.
        stream_id: Its stream.
        headers: The request's header fields, pseudo-headers among them.
        body: What has arrived of the request's body.
        complete: Set once the request has been received to its end.
        ended: Set once the client has reset the stream or its connection is gone.
        reset_code: The code of the client's RST_STREAM, or None.
        sent: Bytes of response body sent so far.
    """

    def __init__(self, peer: H2Peer, stream_id: int, headers: Headers) -> None:
        self.peer = peer
        self.stream_id = stream_id
        self.headers = dict(headers)
        self.body = bytearray()
        self.complete = anyio.Event()
        self.ended = anyio.Event()
        self.reset_code: int | None = None
        self.sent = 0

    @property
    def path(self) -> str:
        """The request's path and query."""
        return self.headers[b":path"].decode()

    async def start(self, status: int = 200, headers: Headers = (), *, end: bool = False) -> None:
        """Send response headers (or 1xx ones; then call again)."""
        fields = [(b":status", str(status).encode()), *headers]
        self.peer.h2.send_headers(self.stream_id, fields, end_stream=end)
        await self.peer.flush()

    async def send(self, data: bytes, *, end: bool = False, padding: int | None = None) -> None:
        """Send body, as fast as the client's windows allow. `padding` goes on every frame."""
        while data or end:
            room = self.peer.h2.local_flow_control_window(self.stream_id)
            room = min(room, self.peer.h2.max_outbound_frame_size)
            room -= 0 if padding is None else padding + 1
            if data and room <= 0:
                await self.peer.window_opened()
                continue
            piece, data = data[:room], data[room:]
            last = end and not data
            self.peer.h2.send_data(self.stream_id, piece, end_stream=last, pad_length=padding)
            self.sent += len(piece)
            await self.peer.flush()
            if last:
                return

    async def trailers(self, headers: Headers) -> None:
        """End the response with trailers."""
        self.peer.h2.send_headers(self.stream_id, headers, end_stream=True)
        await self.peer.flush()

    async def respond(self, body: bytes = b"", status: int = 200, headers: Headers = ()) -> None:
        """Send a whole response."""
        await self.start(status, headers, end=not body)
        if body:
            await self.send(body, end=True)

    async def abort(self, code: int) -> None:
        """Reset the stream."""
        self.peer.h2.reset_stream(self.stream_id, code)
        await self.peer.flush()


Handler = Callable[[H2Exchange], Awaitable[None]]


class H2Peer:
    """One connection, as the server sees it.

    Attributes:
        h2: The server's protocol state, for what the methods do not cover.
        exchanges: Requests by stream id, in the order they came.
        goaway: The client's GOAWAY, or None.
        pings: PINGs received.
        granted: Bytes of window the client has granted, by stream id (0 is the connection).
        ended: Set once the connection is gone.
    """

    def __init__(self, server: ScriptedH2Server, stream: anyio.abc.ByteStream) -> None:
        self._server = server
        self._stream = stream
        self._write_lock = anyio.Lock()
        self._window_opened = anyio.Event()
        self._reads = anyio.Event()
        self._reads.set()
        self.exchanges: dict[int, H2Exchange] = {}
        self.goaway: h2.events.ConnectionTerminated | None = None
        self.pings = 0
        self.granted: dict[int, int] = {}
        self.ended = anyio.Event()
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=False, header_encoding=None, validate_outbound_headers=False
            )
        )

    @property
    def open_streams(self) -> int:
        """Streams the client has open."""
        return self.h2.open_inbound_streams

    async def flush(self) -> None:
        """Send what the protocol state has queued."""
        await self.raw(b"")

    async def raw(self, data: bytes) -> None:
        """Send bytes past the protocol state: anything a hostile server might."""
        # A handler that is cancelled here must not take others' frames with it.
        with anyio.CancelScope(shield=True):
            async with self._write_lock:
                if data := self.h2.data_to_send() + data:
                    await self._stream.send(data)

    async def goaway_above(self, last_stream_id: int, code: int = ErrorCodes.NO_ERROR) -> None:
        """Announce the connection's end; streams up to `last_stream_id` are still served."""
        await self.raw(frame(0x7, 0, 0, struct.pack(">II", last_stream_id, code)))

    async def settings(self, settings: Mapping[SettingCodes, int]) -> None:
        """Change settings in mid-flight."""
        self.h2.update_settings({code: value for code, value in settings.items()})  # noqa: C416
        await self.flush()

    async def close(self) -> None:
        """Close the connection without a word."""
        await anyio.aclose_forcefully(self._stream)

    def stop_reading(self) -> None:
        """Read nothing, and so answer nothing: a server that hangs."""
        self._reads = anyio.Event()

    def resume_reading(self) -> None:
        """Go on reading."""
        self._reads.set()

    async def window_opened(self) -> None:
        """Wait until the client grants window, anywhere."""
        await self._window_opened.wait()

    async def serve(self) -> None:
        """Receive until the connection ends, with a task for each request."""
        async with anyio.create_task_group() as tasks:
            try:
                await self._receive(tasks)
            except h2.exceptions.ProtocolError as error:
                self._server.errors.append(error)
                with contextlib.suppress(*_GONE):
                    await self.flush()
            except _GONE:
                pass
            finally:
                self.ended.set()
                self._open_window()
                for exchange in self.exchanges.values():
                    exchange.ended.set()
                await anyio.aclose_forcefully(self._stream)
                tasks.cancel_scope.cancel()

    async def _receive(self, tasks: anyio.abc.TaskGroup) -> None:
        self.h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values=self._server.settings,
        )
        self.h2.initiate_connection()
        if self._server.on_connect is not None:
            await self._server.on_connect(self)
        await self.flush()
        while True:
            data = await self._stream.receive()
            await self._reads.wait()
            for event in self.h2.receive_data(data):
                self._apply(event, tasks)
            with contextlib.suppress(*_GONE):  # there may be more to read
                await self.flush()

    def _apply(self, event: h2.events.Event, tasks: anyio.abc.TaskGroup) -> None:
        match event:
            case h2.events.RequestReceived():
                exchange = H2Exchange(self, event.stream_id, event.headers)
                self.exchanges[event.stream_id] = exchange
                tasks.start_soon(self._handle, exchange)
            case h2.events.DataReceived():
                self.exchanges[event.stream_id].body += event.data
                if self._server.grant_windows:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                self.exchanges[event.stream_id].complete.set()
            case h2.events.StreamReset():
                exchange = self.exchanges[event.stream_id]
                exchange.reset_code = event.error_code
                exchange.ended.set()
                self._open_window()
            case h2.events.WindowUpdated():
                granted = self.granted.get(event.stream_id, 0)
                self.granted[event.stream_id] = granted + event.delta
                self._open_window()
            case h2.events.RemoteSettingsChanged():
                self._open_window()
            case h2.events.PingReceived():
                self.pings += 1
            case h2.events.ConnectionTerminated():
                self.goaway = event

    def _open_window(self) -> None:
        self._window_opened.set()
        self._window_opened = anyio.Event()

    async def _handle(self, exchange: H2Exchange) -> None:
        """Run the handler until it returns or its stream is over."""

        async def watch() -> None:
            await exchange.ended.wait()
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            self._server.running += 1
            try:
                await self._server.handler(exchange)
            except _GONE:
                pass
            except h2.exceptions.ProtocolError:
                # Not the handler's fault if the client has just ended the stream or connection.
                if exchange.peer.h2.state_machine.state is h2.connection.ConnectionState.CLOSED:
                    return
                if exchange.stream_id in exchange.peer.h2.streams and not exchange.ended.is_set():
                    raise
            finally:
                self._server.running -= 1
                tasks.cancel_scope.cancel()


class ScriptedH2Server:
    """A server that runs `handler` for each request, on a port of its own.

    Args:
        handler: Answers one request; cancelled if the client resets it.
        settings: The server's SETTINGS.
        on_connect: Called with each new connection, before its SETTINGS are sent.
        grant_windows: Give back window for request bodies as they arrive.
        tls: Serve TLS; the context decides what ALPN offers.

    Attributes:
        url: Where it listens.
        peers: Connections, in the order they came.
        running: Handlers at work now.
        errors: What clients did against the protocol.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        settings: Mapping[SettingCodes, int] | None = None,
        on_connect: Callable[[H2Peer], Awaitable[None]] | None = None,
        grant_windows: bool = True,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.handler = handler
        self.settings: dict[SettingCodes, int] = {SettingCodes.MAX_CONCURRENT_STREAMS: 100}
        self.settings.update(settings or {})
        self.on_connect = on_connect
        self.grant_windows = grant_windows
        self._tls = tls
        self.peers: list[H2Peer] = []
        self.running = 0
        self.errors: list[Exception] = []
        self.url = ""
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        listener: Any = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        if self._tls is not None:
            listener = TLSListener(listener, self._tls, standard_compatible=False)
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{port}"
        await self._stack.enter_async_context(listener)
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(listener.serve, self._serve)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> bool | None:
        return await self._stack.__aexit__(exc_type, exc_value, traceback)

    async def _serve(self, stream: anyio.abc.ByteStream) -> None:
        peer = H2Peer(self, stream)
        self.peers.append(peer)
        await peer.serve()


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Build any HTTP/2 frame, right or wrong (RFC 9113 section 4.1)."""
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream_id) + payload
