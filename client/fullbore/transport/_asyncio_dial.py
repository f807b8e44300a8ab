"""A TCP connection on asyncio, by whichever address answers first, that no cancellation can leak.

asyncio's own race between addresses loses a socket when it is cancelled at the moment it is won
(CPython 3.11); so the race is run here, and each connection is made by asyncio alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

import anyio

HAPPY_EYEBALLS_DELAY = 0.25
"""Seconds until another address of the same name is tried in parallel (RFC 8305, section 5)."""

P = TypeVar("P", bound=asyncio.Protocol)


async def connect(
    make: Callable[[], P],
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    server_name: str | None = None,
) -> P:
    """Connect and return the protocol, made by `make`.

    Raises:
        OSError: Nobody listens, the name does not resolve; TLS errors among them.
    """
    loop = asyncio.get_running_loop()

    async def reach(address: str) -> tuple[asyncio.Transport, P]:
        return await loop.create_connection(
            make, address, port, ssl=tls, server_hostname=server_name if tls is not None else None
        )

    addresses = await _resolve(loop, host, port)
    if len(addresses) == 1:
        return (await reach(addresses[0]))[1]
    won: list[tuple[asyncio.Transport, P]] = []
    errors: list[OSError] = []

    async def attempt(address: str, failed: anyio.Event) -> None:
        try:
            reached = await reach(address)
        except OSError as error:
            errors.append(error)
            failed.set()
            return
        if won:
            reached[0].abort()
        won.append(reached)
        group.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as group:
            for address in addresses:
                failed = anyio.Event()
                group.start_soon(attempt, address, failed)
                with anyio.move_on_after(HAPPY_EYEBALLS_DELAY):
                    await failed.wait()
    except BaseException:
        for transport, _ in won:
            transport.abort()
        raise
    if not won:
        raise errors[0]
    return won[0][1]


async def _resolve(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[str]:
    """Every address of a name, IPv6 and IPv4 in turns, in the order the system prefers."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return [host]  # an address already: no need to ask, which takes a thread
    families: dict[int, list[str]] = {}
    for family, _, _, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        families.setdefault(family, []).append(str(address[0]))
    turns = itertools.chain(*itertools.zip_longest(*families.values()))
    return [address for address in turns if address is not None]
