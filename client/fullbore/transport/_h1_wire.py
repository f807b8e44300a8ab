"""What an HTTP/1.1 connection needs of a socket, and the two event loops it may get it from.

Owns the interface between the two. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Protocol

READ_SIZE = 262_144
"""Bytes asked of the socket at once, as asyncio does."""


class Sink(Protocol):
    """What a wire pours into."""

    def feed(self, data: bytes) -> bool:
        """Take bytes in; say whether what is waited for is there now."""
        ...

    def lost(self, cause: Exception | None) -> None:
        """The other side has closed (no cause), or the connection broke. May be called again."""
        ...


class Wire(Protocol):
    """A connected socket, TLS included. Everything but `send` and `wait` is instant."""

    async def send(self, data: bytes) -> bool:
        """Send it all; False if the connection is gone and this piece has not left."""
        ...

    async def wait(self) -> None:
        """Return once the sink says that what is waited for is there, or was told of the end."""
        ...

    def pause(self) -> None:
        """Let the socket fill, so that the server has to wait."""
        ...

    def resume(self) -> None:
        """Read again."""
        ...

    def is_stale(self) -> bool:
        """Whether an idle connection has been closed by the server, or been sent something."""
        ...

    def close(self) -> None:
        """Close it at once, whatever is under way. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to connect. With a TLS context the server has to prove to be `server_name`."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    server_name: str


async def open_wire(address: Address, sink: Sink) -> Wire:
    """Connect.

    Raises:
        OSError, ssl.SSLError: As sockets do; trio's may be a group of them.
    """
    if address.tls is not None:
        address.tls.set_alpn_protocols(["http/1.1"])  # read when the session is made, soon
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        from ._h1_trio import open_trio_wire

        return await open_trio_wire(address, sink)
    from ._h1_asyncio import open_asyncio_wire

    return await open_asyncio_wire(address, sink)


__all__ = ["READ_SIZE", "Address", "Sink", "Wire", "open_wire"]
