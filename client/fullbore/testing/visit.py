"""One request being answered, over HTTP/1.1 or HTTP/2: what a reply function works with.

Owns how each thing that a server may do is said in either protocol. Knows nothing of scripts.
"""

from __future__ import annotations

import json
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.abc
import h11
from h2.errors import ErrorCodes

from .._h2_server import H2Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One request as it arrived; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


class HangUpError(Exception):
    """The connection, or over HTTP/2 the stream, is over now."""


class Visit(ABC):
    """One request being answered.

    :ivar request: what arrived.
    :ivar number: how many requests had arrived before it, in all.
    """

    def __init__(self, request: Received, number: int) -> None:
        self.request = request
        self.number = number

    @abstractmethod
    async def start(self, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send the status and headers; without a ``content-length`` the body has no set length."""

    @abstractmethod
    async def send(self, data: bytes | str) -> None:
        """Send a piece of the body at once."""

    @abstractmethod
    async def send_part(self, data: bytes, missing: int) -> None:
        """Send a piece of the body that is announced as ``missing`` bytes longer than it is."""

    @abstractmethod
    async def end(self) -> None:
        """End the body properly."""

    @abstractmethod
    async def send_raw(self, data: bytes) -> None:
        """Write bytes to the socket, past all of HTTP."""

    @abstractmethod
    async def reset(self) -> None:
        """Reset the connection (RST), as a crashed server does; over HTTP/2 only the stream."""

    @abstractmethod
    async def hang_up(self) -> None:
        """Close the connection where it stands: the body stays cut short."""

    @abstractmethod
    async def goaway(self, *, processed: bool) -> None:
        """Announce that the connection ends, after this request or before it was processed.

        :raises RuntimeError: the request came over HTTP/1.1, which has no such thing.
        """

    async def until_left(self) -> None:
        """Wait until the client goes away; as in any reply, that cancels it."""
        await anyio.sleep_forever()


Reply = Callable[[Visit], Awaitable[None]]
"""Answers one request."""


class H1Visit(Visit):
    """Over HTTP/1.1."""

    def __init__(
        self,
        request: Received,
        number: int,
        connection: h11.Connection,
        stream: anyio.abc.SocketStream,
    ) -> None:
        super().__init__(request, number)
        self._connection = connection
        self._stream = stream

    async def start(self, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        fields = list((headers or {}).items())
        await self._send(h11.Response(status_code=status, headers=fields))

    async def send(self, data: bytes | str) -> None:
        await self._send(h11.Data(data=data.encode() if isinstance(data, str) else data))

    async def send_part(self, data: bytes, missing: int) -> None:
        await self._stream.send(b"%x\r\n%b" % (len(data) + missing, data))

    async def end(self) -> None:
        await self._send(h11.EndOfMessage())

    async def send_raw(self, data: bytes) -> None:
        await self._stream.send(data)

    async def reset(self) -> None:
        raw = self._stream.extra(anyio.abc.SocketAttribute.raw_socket)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise HangUpError

    async def hang_up(self) -> None:
        raise HangUpError

    async def goaway(self, *, processed: bool) -> None:
        raise RuntimeError("GOAWAY is HTTP/2's; open the server with FaultServer(…, http2=True).")

    async def _send(self, event: h11.Event) -> None:
        data = self._connection.send(event)
        if data:
            await self._stream.send(data)


class H2Visit(Visit):
    """Over HTTP/2.

    :ivar exchange: the stream, for what only HTTP/2 has.
    """

    def __init__(self, request: Received, number: int, exchange: H2Exchange) -> None:
        super().__init__(request, number)
        self.exchange = exchange

    async def start(self, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        fields = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        await self.exchange.start(status, fields)

    async def send(self, data: bytes | str) -> None:
        await self.exchange.send(data.encode() if isinstance(data, str) else data)

    async def send_part(self, data: bytes, missing: int) -> None:
        length = (len(data) + missing) << 8
        await self.send_raw(struct.pack(">IBI", length, 0, self.exchange.stream_id) + data)

    async def end(self) -> None:
        await self.exchange.send(b"", end=True)

    async def send_raw(self, data: bytes) -> None:
        await self.exchange.peer.raw(data)

    async def reset(self) -> None:
        await self.exchange.abort(ErrorCodes.INTERNAL_ERROR)
        raise HangUpError

    async def hang_up(self) -> None:
        await self.exchange.peer.close()
        raise HangUpError

    async def goaway(self, *, processed: bool) -> None:
        last = self.exchange.stream_id
        await self.exchange.peer.goaway_above(last if processed else max(last - 2, 0))
