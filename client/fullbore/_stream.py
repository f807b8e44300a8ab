"""One answer, read as it is written, no faster than it is asked for.

Owns what a user sees of a streamed answer. The reading itself is done by ``Call``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from ._attempt import Call
from ._clock import Clock
from ._types import Result, Usage
from .errors import ClientStateError


class TextStream:
    """The text of an answer, piece by piece.

    ::

        async with client.stream("Tell me a story") as stream:
            async for delta in stream:
                print(delta, end="")
        print(stream.usage)

    The socket is read only when a piece is asked for, so a slow reader slows the server down
    instead of filling memory here. Leaving the ``async with`` early cuts the answer off, at the
    server too. Until the first text has come, failures are retried; after that they are raised,
    with what had arrived in ``error.partial``, and never retried: no text comes twice.
    """

    def __init__(self, call: Call, clock: Clock) -> None:
        self._call = call
        self._clock = clock
        self._given = 0
        self._paused_at: float | None = None
        self._result: Result | None = None

    async def __aenter__(self) -> Self:
        await self._call.open()
        self._paused_at = self._clock()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._call.aclose()
        if self._result is None:
            self._result = self._call.result()

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        """Return the next piece of text, as it was sent.

        :raises RequestError: the answer broke; ``partial`` holds all text so far.
        """
        exchange = self._call.exchange
        if exchange is None or self._paused_at is None:
            raise ClientStateError(
                "Open the stream first: `async with client.stream(…) as stream`."
            )
        parts = exchange.answer.parts
        while self._given == len(parts):
            exchange.extend_deadlines(self._clock() - self._paused_at)
            try:
                more = await self._call.advance()
            finally:
                self._paused_at = self._clock()
            if not more and self._given == len(parts):
                if self._result is None:
                    self._result = self._call.result()
                raise StopAsyncIteration
        self._given += 1
        return parts[self._given - 1]

    @property
    def text(self) -> str:
        """All text that has arrived so far."""
        exchange = self._call.exchange
        return "" if exchange is None else exchange.answer.text

    @property
    def result(self) -> Result:
        """The whole answer with usage, cost and timing; whole once the stream has ended.

        :raises ClientStateError: the stream has neither ended nor been left.
        """
        if self._result is None:
            if self._call.error is None:
                raise ClientStateError(
                    "The result is there when the stream has ended or been left."
                )
            self._result = self._call.result()
        return self._result

    @property
    def usage(self) -> Usage:
        """Tokens of the answer, once the stream has ended."""
        return self.result.usage
