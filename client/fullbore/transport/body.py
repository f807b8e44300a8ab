"""A response body that may be left to fill before it is read.

Reading an answer token by token costs a wake-up of its task for each; whoever needs the answer only
as a whole lets the body collect what arrives and takes it in large pieces, and is still woken the
moment it ends. Owns the interface alone; the transports here implement it.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator

import httpx2

MARK_RANGE = 32
"""Bytes at the end of what has arrived in which a mark is looked for."""


class FillingBody(httpx2.AsyncByteStream):
    """A body that can be iterated as any other, or read by `receive`; not both."""

    @abstractmethod
    async def receive(self, at_least: int = 1, mark: bytes = b"") -> bytes:
        """Wait until `at_least` bytes are there, or the body's end; then return all there is.

        Also satisfied as soon as `mark` is among the last `MARK_RANGE` bytes, and by the body's own
        limit of what it holds. Returns `b""` at the end and only there. Cancelling loses nothing.

        Raises:
            httpx2.TransportError: The body broke; what had arrived before was returned before.
        """

    @abstractmethod
    def take(self) -> bytes:
        """Return what has arrived, which may be nothing, without waiting."""


class IteratedBody:
    """Any other body, read by the same calls: piece by piece, whatever is asked for."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._ended = False

    async def receive(self, at_least: int = 1, mark: bytes = b"") -> bytes:
        """Return the next piece, `b""` at the end."""
        async for piece in self._pieces:
            if piece:
                return piece
        self._ended = True
        return b""

    def take(self) -> bytes:
        """Return nothing: what has arrived is known to the transport alone."""
        return b""

    async def run_out(self) -> None:
        """Let a generator whose connection was closed find that out.

        httpx2 does not close the generators beneath the outermost one, and one left half way is
        reported by trio and finalised by asyncio at some later time.
        """
        if self._ended or not isinstance(self._pieces, AsyncGenerator):
            return
        with contextlib.suppress(Exception):
            async for _ in self._pieces:
                pass
