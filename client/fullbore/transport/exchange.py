"""One request on the wire and its answer, read only as the caller asks for it.

Owns the sending, the limits on time, the decoding and the closing of one attempt. Knows nothing
of retries, admission or prices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

import anyio
import httpx2

from .. import errors
from .._clock import Clock
from .._types import Request, Timeouts
from .body import FillingBody, IteratedBody
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

AT_LEISURE: Final = 16_384
"""Bytes of an answer that are left to arrive before they are read, where only the whole matters.
They are looked at once a second all the same, and at once when the answer ends."""

_NO_HEADERS = httpx2.Headers()


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
        self.headers = _NO_HEADERS
        self.sent_at = clock()
        self.first_token_at: float | None = None
        self.finished = False
        self.sent = False
        """Whether the endpoint may have seen any of it."""
        self._endpoint = endpoint
        self._request = request
        self._timeouts = timeouts
        self._clock = clock
        self._wall = wall
        self._total_deadline = deadline if deadline is not None else float("inf")
        self._token_deadline = float("inf")
        self._stall_armed_at = 0.0
        self._look_at = float("inf")
        self._look_every = 1.0 if timeouts.stall is None else min(1.0, timeouts.stall / 16)
        self._response: httpx2.Response | None = None
        self._source: FillingBody | IteratedBody | None = None
        self._parser: EventStreamParser | None = None
        self._whole: list[bytes] = []
        self._whole_size = 0
        if request.stream and timeouts.first_token is not None:
            self._token_deadline = self.sent_at + timeouts.first_token

    async def advance(self, *, to_end: bool) -> None:
        """Read on: to the end, or until there is more text than before (or the end).

        :raises RequestError: the attempt failed; close it.
        """
        parts = self.answer.parts
        seen = len(parts)
        await self._advance(lambda: not to_end and len(parts) > seen, leisurely=to_end)

    async def begin(self) -> None:
        """Read until the first token has come (or the end).

        :raises RequestError: the attempt failed; close it.
        """
        await self._advance(lambda: self.first_token_at is not None, leisurely=False)

    async def _advance(self, enough: Callable[[], bool], *, leisurely: bool) -> None:
        while True:
            scope = anyio.CancelScope(deadline=self._next_deadline())
            with scope:
                if self._source is None:
                    await self._open()
                while not self.finished and not enough():
                    await self._read(scope, leisurely=leisurely)
                return
            if self._is_over():
                return

    def _next_deadline(self) -> float:
        if self.answer.done:
            return min(self._total_deadline, self._clock() + DRAIN_GRACE)
        return min(self._token_deadline, self._total_deadline, self._look_at)

    def _is_over(self) -> bool:
        """A deadline has passed: see what it was for.

        :raises DeadlineError: it was one of the limits on time.
        """
        if self.answer.done:  # the server did not end the response after its end mark
            self.finished = True
            return True
        self._look_at = float("inf")
        if self._source is not None:
            self._take(self._source.take())  # what has arrived so far was in time
        if self._clock() >= min(self._token_deadline, self._total_deadline):
            raise self._timed_out()
        return False

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
        if isinstance(self._source, FillingBody):
            await self._source.aclose()  # ours never block
            return
        with anyio.move_on_after(CLOSE_GRACE, shield=True):
            with contextlib.suppress(httpx2.TransportError, OSError, anyio.BrokenResourceError):
                await response.aclose()
            if not self.finished and self._source is not None:
                await self._source.run_out()

    async def _open(self) -> None:
        self.sent = True
        try:
            response = await self._endpoint.post(self._request.path, self._request.content)
        except (httpx2.TransportError, httpx2.InvalidURL, OSError, anyio.BrokenResourceError) as e:
            raise self._unreachable(e) from e
        self._response = response
        self.status = response.status_code
        self.headers = response.headers
        # The stream itself, without the layers of Response, unless there is decoding to do.
        kind, encoded = _content(response.headers)
        if encoded:
            self._source = IteratedBody(response.aiter_bytes())
        elif isinstance(response.stream, FillingBody):
            self._source = response.stream
        else:
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            self._source = IteratedBody(response.stream.__aiter__())
        if not 200 <= self.status < 300:
            raise await self._refused(self._source, self.status)
        if b"event-stream" in kind:
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

    async def _refused(self, source: FillingBody | IteratedBody, status: int) -> errors.StatusError:
        body = b""
        try:
            while len(body) <= MAX_ERROR_BODY and (piece := await source.receive()):
                body += piece
        except (httpx2.TransportError, OSError, anyio.BrokenResourceError):
            pass  # the status says enough
        wait = retry_after(self.headers, now=self._wall())
        return read_status_error(status, self.headers, body, retry_after=wait)

    async def _read(self, scope: anyio.CancelScope, *, leisurely: bool) -> None:
        """Read a piece: the next one, or where nobody waits for it, many at once."""
        assert self._source is not None
        at_least, mark = 1, b""
        if leisurely and not self.answer.done and isinstance(self._source, FillingBody):
            if self._parser is None:
                at_least = AT_LEISURE
            elif self.first_token_at is not None:
                at_least, mark = AT_LEISURE, b"[DONE]"
                self._look_at = self._clock() + self._look_every
                scope.deadline = self._next_deadline()
        try:
            piece = await self._source.receive(at_least, mark)
        except (httpx2.TransportError, httpx2.DecodingError, OSError) as exc:
            self._broken(exc)
            return
        if not piece:
            self._ended()
            return
        if self._take(piece):
            scope.deadline = self._next_deadline()

    def _take(self, piece: bytes) -> bool:
        """Take a piece in; return whether that moves the next deadline."""
        if self._parser is None:
            self._take_whole(piece)
            return False
        if self.answer.done:
            return False
        before = self.answer.pieces
        done = self._take_events(self._parser, piece)
        return (self.answer.pieces != before and self._progressed()) or done

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

    def _take_whole(self, piece: bytes) -> None:
        self._whole.append(piece)
        self._whole_size += len(piece)
        if self._whole_size > MAX_ANSWER_BODY:
            raise errors.MalformedAnswerError(f"The answer is larger than {MAX_ANSWER_BODY} bytes.")

    def _progressed(self) -> bool:
        """There was a token: move the stall limit, but not at every token, for that costs."""
        now = self._clock()
        if self.first_token_at is None:
            self.first_token_at = now
        elif now < self._stall_armed_at:
            return False
        stall = self._timeouts.stall
        if stall is None:
            self._token_deadline = self._stall_armed_at = float("inf")
        else:
            self._stall_armed_at = now + stall / 16
            self._token_deadline = now + stall + stall / 16
        return True

    def _ended(self) -> None:
        answer = self.answer
        if self._parser is None:
            answer.add(b"".join(self._whole))
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


def _content(headers: httpx2.Headers) -> tuple[bytes, bool]:
    """Return the content type and whether the content is encoded; ``Headers.get`` is slow."""
    kind, encoded = b"", False
    for raw_name, value in headers.raw:
        if len(raw_name) in (12, 16):
            name = raw_name.lower()
            if name == b"content-type":
                kind = value.lower()
            elif name == b"content-encoding":
                encoded = True
    return kind, encoded
