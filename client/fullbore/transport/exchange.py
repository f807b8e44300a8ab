"""One request on the wire and its answer, read only as the caller asks for it.

Owns the sending, the limits on time, the decoding and the closing of one attempt. Knows nothing
of retries, admission or prices.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Final

import anyio
import httpx2

from .. import errors
from .._clock import Clock
from .._types import Request, Timeouts
from .connect import Endpoint
from .headers import retry_after
from .sse import EventStreamParser, EventTooLargeError
from .wire import Answer, read_error_event, read_status_error

MAX_ERROR_BODY: Final = 64 * 1024
"""Bytes read of an error body before the connection is given up instead of reused."""
MAX_ANSWER_BODY: Final = 256 * 1024 * 1024
"""Bytes an unstreamed answer may have."""
DRAIN_GRACE: Final = 1.0
"""Seconds the server has to end the response after ``[DONE]``; then it is closed on our side."""
CLOSE_GRACE: Final = 2.0
"""Seconds that closing a response may take, even while being cancelled."""

_NO_HEADERS: Mapping[str, str] = {}


class Exchange:
    """One attempt at a request. Times are on ``clock``, in seconds.

    :param deadline: the moment by which the whole request must be over, if there is one.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        request: Request,
        timeouts: Timeouts,
        *,
        clock: Clock,
        wall: Clock,
        deadline: float | None = None,
    ) -> None:
        self.answer = Answer()
        self.status: int | None = None
        self.headers: Mapping[str, str] = _NO_HEADERS
        self.sent_at = clock()
        self.first_token_at: float | None = None
        self.finished = False
        self._endpoint = endpoint
        self._request = request
        self._timeouts = timeouts
        self._clock = clock
        self._wall = wall
        self._total_deadline = deadline if deadline is not None else float("inf")
        self._token_deadline = float("inf")
        self._stall_armed_at = 0.0
        self._response: httpx2.Response | None = None
        self._pieces: AsyncIterator[bytes] | None = None
        self._parser: EventStreamParser | None = None
        self._body: list[bytes] = []
        self._body_size = 0
        if request.stream and timeouts.first_token is not None:
            self._token_deadline = self.sent_at + timeouts.first_token

    async def advance(self, *, to_end: bool) -> None:
        """Read on: to the end, or until there is more text than before (or the end).

        :raises RequestError: the attempt failed; close it.
        """
        scope = anyio.CancelScope(deadline=self._next_deadline())
        with scope:
            if self._pieces is None:
                await self._open()
            seen = len(self.answer.parts)
            while not self.finished and (to_end or len(self.answer.parts) == seen):
                await self._read_piece(scope)
            return
        if self.answer.done:  # the server did not end the response after its end mark
            self.finished = True
            return
        raise self._timed_out()

    def _next_deadline(self) -> float:
        if self.answer.done:
            return min(self._total_deadline, self._clock() + DRAIN_GRACE)
        return min(self._token_deadline, self._total_deadline)

    def extend_deadlines(self, pause: float) -> None:
        """Do not count ``pause`` seconds in which the caller did not want to read."""
        self._total_deadline += pause
        self._token_deadline += pause
        self._stall_armed_at += pause

    async def aclose(self) -> None:
        """Give the connection back, or close it if the answer was not read to its end."""
        response, self._response = self._response, None
        if response is None:
            return
        with anyio.move_on_after(CLOSE_GRACE, shield=True):
            with contextlib.suppress(httpx2.TransportError, OSError, anyio.BrokenResourceError):
                await response.aclose()
            if not self.finished and isinstance(self._pieces, AsyncGenerator):
                await _run_out(self._pieces)

    async def _open(self) -> None:
        try:
            response = await self._endpoint.post(self._request.path, self._request.content)
        except (httpx2.TransportError, httpx2.InvalidURL, OSError, anyio.BrokenResourceError) as e:
            raise self._unreachable(e) from e
        self._response = response
        self.status = response.status_code
        self.headers = response.headers
        # The stream itself, without the layers of Response, unless there is decoding to do.
        if "content-encoding" in response.headers:
            self._pieces = response.aiter_bytes()
        else:
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            self._pieces = response.stream.__aiter__()
        if not 200 <= self.status < 300:
            raise await self._refused(self.status)
        if "event-stream" in response.headers.get("content-type", ""):
            self._parser = EventStreamParser()

    def _unreachable(self, exc: Exception) -> errors.RequestError:
        where, why = self._endpoint.base_url, str(exc) or type(exc).__name__
        if isinstance(exc, httpx2.ConnectTimeout):
            return errors.ConnectTimeoutError(
                f"No connection to {where} within {self._timeouts.connect} s (Timeouts.connect)."
            )
        if isinstance(
            exc, httpx2.ConnectError | httpx2.ProxyError | httpx2.UnsupportedProtocol | OSError
        ):
            return errors.ConnectionFailedError(
                f"Cannot connect to {where}: {why}. Is the server up, and is the URL right?"
            )
        return errors.ConnectionLostError(
            f"The connection to {where} was lost before an answer came: {why}."
        )

    async def _refused(self, status: int) -> errors.StatusError:
        body = b""
        assert self._pieces is not None
        try:
            async for piece in self._pieces:
                body += piece
                if len(body) > MAX_ERROR_BODY:
                    break
        except (httpx2.TransportError, OSError, anyio.BrokenResourceError):
            pass  # the status says enough
        wait = retry_after(self.headers, now=self._wall())
        return read_status_error(status, self.headers, body, retry_after=wait)

    async def _read_piece(self, scope: anyio.CancelScope) -> None:
        assert self._pieces is not None
        try:
            piece = await self._pieces.__anext__()
        except StopAsyncIteration:
            self._ended()
            return
        except (httpx2.TransportError, httpx2.DecodingError, OSError) as exc:
            self._broken(exc)
            return
        if self._parser is None:
            self._take_body(piece)
        elif not self.answer.done:
            before = self.answer.pieces
            done = self._take_events(self._parser, piece)
            if self.answer.pieces != before:
                self._progressed(scope)
            if done:
                scope.deadline = self._next_deadline()

    def _take_events(self, parser: EventStreamParser, piece: bytes) -> bool:
        """Take in a piece; return whether the end mark was in it."""
        answer = self.answer
        try:
            events = parser.feed(piece)
        except EventTooLargeError as exc:
            raise errors.MalformedAnswerError(str(exc), partial=answer.text) from exc
        for event in events:
            data = event.data
            if data == b"[DONE]":
                answer.done = True
                return True
            if event.event == "error":
                raise read_error_event(data, partial=answer.text)
            answer.add(data)
        return False

    def _take_body(self, piece: bytes) -> None:
        self._body.append(piece)
        self._body_size += len(piece)
        if self._body_size > MAX_ANSWER_BODY:
            raise errors.MalformedAnswerError(f"The answer is larger than {MAX_ANSWER_BODY} bytes.")

    def _progressed(self, scope: anyio.CancelScope) -> None:
        """There was a token: move the stall limit, but not at every token, for that costs."""
        now = self._clock()
        if self.first_token_at is None:
            self.first_token_at = now
        elif now < self._stall_armed_at:
            return
        stall = self._timeouts.stall
        if stall is None:
            self._token_deadline = self._stall_armed_at = float("inf")
        else:
            self._stall_armed_at = now + stall / 8
            self._token_deadline = now + stall + stall / 8
        scope.deadline = self._next_deadline()

    def _ended(self) -> None:
        answer = self.answer
        if self._parser is None:
            answer.add(b"".join(self._body))
            answer.done = True
        elif not answer.complete:
            raise errors.IncompleteStreamError(
                f"The stream ended after {answer.pieces} pieces of text without a finish reason "
                "and without [DONE]; the server or a proxy cut it short.",
                partial=answer.text,
            )
        self.finished = True

    def _broken(self, exc: Exception) -> None:
        if self._parser is not None and self.answer.complete:
            self.finished = True  # only what comes after the answer is lost
            return
        why = str(exc) or type(exc).__name__
        raise errors.ConnectionLostError(
            f"The connection to {self._endpoint.base_url} was lost in the middle of the answer: "
            f"{why}.",
            partial=self.answer.text,
            answered=True,
        ) from exc

    def _timed_out(self) -> errors.DeadlineError:
        partial = self.answer.text
        if self._clock() >= self._total_deadline:
            return errors.TotalTimeoutError(
                f"The request took longer than {self._timeouts.total} s (Timeouts.total).",
                partial=partial,
            )
        if self.first_token_at is None:
            return errors.FirstTokenTimeoutError(
                f"No text within {self._timeouts.first_token} s of sending the request "
                "(Timeouts.first_token). The endpoint may be overloaded: lower the concurrency."
            )
        return errors.StallTimeoutError(
            f"No text for {self._timeouts.stall} s in the middle of the answer (Timeouts.stall).",
            partial=partial,
        )


async def _run_out(pieces: AsyncGenerator[bytes, None]) -> None:
    """Let a generator find that its connection is closed.

    httpx2 does not close the generators beneath the outermost one, and one left half way is
    reported by trio and finalised by asyncio at some later time.
    """
    with contextlib.suppress(Exception):
        while True:
            await pieces.__anext__()
