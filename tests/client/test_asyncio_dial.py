"""Connecting on asyncio: by name, with several addresses, with some that do not answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from fullbore.transport import _asyncio_dial
from fullbore.transport._asyncio_dial import connect

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


class Names(asyncio.AbstractEventLoop):
    """The running loop, but for the addresses of a name."""

    def __init__(self, addresses: list[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._addresses = addresses

    def __getattribute__(self, name: str) -> Any:
        if name in ("_loop", "_addresses", "getaddrinfo"):
            return object.__getattribute__(self, name)
        return getattr(self._loop, name)

    async def getaddrinfo(self, host: Any, port: Any, **rest: Any) -> Any:
        """Return the addresses given."""
        return [(socket.AF_INET, 0, 0, "", (address, port)) for address in self._addresses]


class Kept(asyncio.Protocol):
    """A protocol that can be closed."""

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self.transport = transport


@pytest.fixture
async def port() -> Any:
    """A server that accepts and says nothing."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def resolved(addresses: list[str]) -> list[str]:
    """What a name with these addresses is resolved to."""
    return await _asyncio_dial._resolve(Names(addresses), "name.example", 1)


async def test_an_address_is_not_looked_up() -> None:
    """It is one already."""
    assert await _asyncio_dial._resolve(asyncio.get_running_loop(), "::1", 1) == ["::1"]
    assert await resolved(["127.0.0.2", "127.0.0.3"]) == ["127.0.0.2", "127.0.0.3"]


async def test_a_name_is_reached(port: int) -> None:
    """Whatever ``localhost`` has for addresses, the one that listens is found."""
    protocol = await connect(Kept, "localhost", port)
    protocol.transport.abort()


async def test_nobody_at_any_address() -> None:
    """The first error is the one to tell."""
    with pytest.raises(OSError, match=r"127\.0\.0\.1|::1|Connect"):
        await connect(Kept, "localhost", 9)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_hundreds_cancelled_wherever_they_are_leave_no_socket(host: str, port: int) -> None:
    """Unclosed ones are warned of, and warnings are errors."""
    for turn in range(400):
        task = asyncio.ensure_future(connect(Kept, host, port))
        for _ in range(turn % 12):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await task).transport.abort()
