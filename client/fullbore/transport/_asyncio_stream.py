"""A TCP connection of asyncio's as an anyio byte stream that is always read.

anyio's own stream has the kernel watch the socket before each read and stop after it, since it
cannot know whether anybody will read on. A connection that many streams share is read all the time,
so here the kernel is told only when nobody has read for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
import anyio.abc
import anyio.lowlevel

HIGH_WATER = 524_288
"""Bytes received and not taken above which the socket is not read."""


class AsyncioStream(asyncio.Protocol, anyio.abc.ByteStream):
    """Both what asyncio calls and what a transport reads and writes."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received: list[bytes] = []
        self._held = 0
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._paused = False
        self._full = False
        self._ended = False
        self._closed = False
        self._cause: Exception | None = None
        self._take: Callable[[bytes], object] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._take is not None:
            self._hand(data)
            return
        self._received.append(data)
        self._held += len(data)
        if self._held > HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        _wake(self._readable)

    def eof_received(self) -> bool:
        self._ended = True
        _wake(self._readable)
        return True  # what is still to be sent may be

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._transport = None
        self._cause = exc
        _wake(self._readable)
        _wake(self._writable)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        _wake(self._writable)

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        """Return all that has arrived, whatever ``max_bytes`` is, once there is something."""
        if not self._received and not self._ended:
            self._readable = asyncio.get_running_loop().create_future()
            try:
                await self._readable
            finally:
                self._readable = None
        if self._received:
            data = b"".join(self._received) if len(self._received) > 1 else self._received[0]
            self._received.clear()
            self._held = 0
            if self._paused and self._transport is not None:
                self._paused = False
                self._transport.resume_reading()
            return data
        if self._closed:
            raise anyio.ClosedResourceError
        if self._cause is not None:
            raise anyio.BrokenResourceError from self._cause
        raise anyio.EndOfStream

    async def pour(self, take: Callable[[bytes], object]) -> None:
        """Have `take` called with all that arrives, at once, until the connection ends.

        It spares a task switch for each piece received.

        Raises:
            Exception: What `take` raised; nothing is handed to it after that.
            anyio.EndOfStream, anyio.BrokenResourceError: As `receive` does.
        """
        while True:
            take(await self.receive())
            self._take = take
            self._readable = asyncio.get_running_loop().create_future()
            try:
                await self._readable
            finally:
                self._take = self._readable = None

    def _hand(self, data: bytes) -> None:
        assert self._take is not None
        try:
            self._take(data)
        except Exception as error:
            self._take = None
            if self._readable is not None and not self._readable.done():
                self._readable.set_exception(error)

    async def send(self, item: bytes) -> None:
        transport = self._transport
        if self._closed:
            raise anyio.ClosedResourceError
        if transport is None or transport.is_closing():
            raise anyio.BrokenResourceError from self._cause
        transport.write(item)
        while self._full and self._transport is not None:
            self._writable = asyncio.get_running_loop().create_future()
            try:
                await self._writable
            finally:
                self._writable = None
        if self._transport is None:
            raise anyio.BrokenResourceError from self._cause
        await anyio.lowlevel.checkpoint_if_cancelled()

    async def send_eof(self) -> None:
        if self._transport is not None:
            self._transport.write_eof()

    async def aclose(self) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.close()
            await asyncio.sleep(0)
        if self._transport is not None:
            self._transport.abort()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
