"""A socket of trio's, read when somebody waits for it, for HTTP/1.1."""

from __future__ import annotations

import select
import ssl

import trio

from ._h1_wire import READ_SIZE, Address, Sink, Wire


class _TrioWire:
    def __init__(self, sink: Sink, socket: trio.SocketStream, stream: trio.abc.Stream) -> None:
        self._sink = sink
        self._socket = socket
        self._stream = stream  # the socket, or TLS on it
        self._closed = False

    async def send(self, data: bytes) -> bool:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError):
            return False
        return True

    async def wait(self) -> None:
        try:
            while not self._closed:
                data = await self._stream.receive_some(READ_SIZE)
                if not data:
                    self._sink.lost(None)
                    return
                if self._sink.feed(bytes(data)):
                    return
        except (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError) as error:
            cause = error.__cause__
            self._sink.lost(cause if isinstance(cause, Exception) else error)

    def pause(self) -> None:
        """Nothing to do: only `wait` reads."""

    def resume(self) -> None:
        """Nothing to do."""

    def is_stale(self) -> bool:
        if self._closed:
            return True
        poll = select.poll()
        poll.register(self._socket.socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._closed = True
        self._socket.socket.close()


async def open_trio_wire(address: Address, sink: Sink) -> Wire:
    """Connect; see `open_wire`."""
    socket = await trio.open_tcp_stream(address.host, address.port)
    if address.tls is None:
        return _TrioWire(sink, socket, socket)
    try:
        stream = trio.SSLStream(
            socket, address.tls, server_hostname=address.server_name, https_compatible=True
        )
        await stream.do_handshake()
    except trio.BrokenResourceError as error:
        socket.socket.close()
        raise error.__cause__ or error from None
    except BaseException:
        socket.socket.close()
        raise
    return _TrioWire(sink, socket, stream)
