"""A socket of asyncio's that pushes what it receives, for HTTP/1.1.

A protocol instead of a stream: a stream costs a task switch and two calls to the kernel (to read
and to stop reading) for each piece received, which is most of the cost of a streamed token.
"""

from __future__ import annotations

import asyncio

from ._asyncio_dial import connect
from ._h1_wire import Address, Sink, Wire


class _AsyncioWire(asyncio.Protocol):
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._transport: asyncio.Transport | None = None
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._paused = False
        self._full = False
        self._closed = False

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._sink.feed(data):
            _wake(self._readable)

    def eof_received(self) -> None:
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        _wake(self._writable)

    def _end(self, cause: Exception | None) -> None:
        if not self._closed:
            self._closed = True
            self._sink.lost(cause)
            _wake(self._readable)
            _wake(self._writable)

    # What a connection calls

    async def send(self, data: bytes) -> bool:
        transport = self._transport
        if self._closed or transport is None:
            return False
        transport.write(data)
        if transport.is_closing():  # the kernel refused it; connection_lost will say why
            await self.wait()
            return False
        while self._full and not self._closed:
            self._writable = asyncio.get_running_loop().create_future()
            try:
                await self._writable
            finally:
                self._writable = None
        return True

    async def wait(self) -> None:
        if self._closed:
            return
        self._readable = asyncio.get_running_loop().create_future()
        try:
            await self._readable
        finally:
            self._readable = None

    def pause(self) -> None:
        if not self._paused and not self._closed and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if not self._closed and self._transport is not None:
                self._transport.resume_reading()

    def is_stale(self) -> bool:
        return self._closed or self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        self._end(None)
        if self._transport is not None:
            self._transport.abort()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


async def open_asyncio_wire(address: Address, sink: Sink) -> Wire:
    """Connect; see `open_wire`."""
    return await connect(
        lambda: _AsyncioWire(sink),
        address.host,
        address.port,
        tls=address.tls,
        server_name=address.server_name,
    )
