"""The governor inside a transport: other people's clients gain limits, retries and the ledger.

Requests that generate (POSTs to chat completions, completions, responses, embeddings) are
admitted, retried until their status line is good, and counted from what passes by. Everything
else goes straight through. The bytes handed on are never changed. The client's limits on time hold
here too: what passes one raises `httpx2.ReadTimeout`, which other people's clients know.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import anyio
import httpx2
import msgspec

from ._clock import Clock
from ._deadlines import Deadlines
from ._governor import Governor, billed, make_outcome, outcome_kind
from ._types import Usage
from .errors import ConnectionFailedError, ConnectionLostError, DeadlineError, RequestError
from .limits import OutcomeKind, Permit
from .transport._runtime import Runtime, current_runtime
from .transport.headers import retry_after
from .transport.sse import EventStreamParser, EventTooLargeError
from .transport.wire import WireUsage, read_status_error, read_usage

logger = logging.getLogger("fullbore.transport")

GENERATING_PATHS = ("/completions", "/responses", "/embeddings")
MAX_METERED_BODY = 64 * 1024 * 1024
"""Bytes of an unstreamed answer that are kept to read its usage; a larger one is estimated."""
NO_KEY = "no-key"
"""What stands for the key of an endpoint that needs none; it is not sent."""


class _Asked(msgspec.Struct):
    model: str = ""
    stream: bool | None = None


class _Seen(msgspec.Struct):
    usage: WireUsage | None = None
    model: str | None = None
    service_tier: str | None = None
    response: _Seen | None = None  # where streamed responses carry it


_decode_asked = msgspec.json.Decoder(_Asked).decode
_decode_seen = msgspec.json.Decoder(_Seen).decode


class GovernedTransport(httpx2.AsyncBaseTransport):
    """A transport whose every generating request is governed.

    :param governor_of: finds the governor of a URL.
    :param label: what the ledger files the requests under.

    A streamed answer is counted as the endpoint reports it, so ask for
    ``stream_options={"include_usage": True}``; without that its tokens are estimated and flagged.
    """

    def __init__(self, governor_of: Callable[[httpx2.URL], Governor], *, label: str | None) -> None:
        self._governor_of = governor_of
        self._label = label

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request under the client's limits."""
        if request.headers.get("authorization") == f"Bearer {NO_KEY}":
            del request.headers["authorization"]
        governor = self._governor_of(request.url)
        send = governor.endpoint.transport.handle_async_request
        if request.method != "POST" or not request.url.path.endswith(GENERATING_PATHS):
            return await send(request)
        content = await request.aread()
        request.headers["accept-encoding"] = "identity"
        asked = _read_asked(content)
        meter = _Meter(governor, model=asked.model, size=len(content), label=self._label)
        deadlines = meter.deadlines
        attempt, first_sent_at = 0, None
        while True:
            await meter.admit(self)
            attempt += 1
            if first_sent_at is None:
                first_sent_at = governor.clock()
            deadlines.sent(streamed=bool(asked.stream))
            try:
                with anyio.move_on_after(deadlines.remaining()) as scope:
                    response = await send(request)
                if scope.cancelled_caught:
                    raise _Overdue(deadlines.error())
                error: RequestError | None = None
                if response.status_code >= 400:
                    error, response = await _read_refusal(response, governor)
            except httpx2.TransportError as exc:
                error = exc.error if isinstance(exc, _Overdue) else _as_error(exc)
                meter.fail(error)
                delay = _delay(governor, error, attempt, first_sent_at)
                if delay is None:
                    raise
            except BaseException:
                meter.cancel()
                raise
            else:
                if error is None:
                    return _metered(response, meter)
                meter.fail(error, response.headers)
                delay = _delay(governor, error, attempt, first_sent_at)
                if delay is None:
                    return response
            await governor.sleep(delay)


class _Overdue(httpx2.ReadTimeout):
    """One of the client's own limits on time has passed."""

    def __init__(self, error: DeadlineError) -> None:
        super().__init__(str(error))
        self.error = error
        self.__cause__ = error


def _delay(
    governor: Governor, error: RequestError, attempt: int, first_sent_at: float
) -> float | None:
    elapsed = governor.clock() - first_sent_at
    total = governor.timeouts.total
    decision = governor.retry.decide(
        error,
        attempt=attempt,
        elapsed=elapsed,
        remaining=None if total is None else total - elapsed,
        rng=governor.rng,
    )
    return None if isinstance(decision, RequestError) else decision


class _Meter:
    """Counts one request: its permit, its time, its tokens."""

    def __init__(self, governor: Governor, *, model: str, size: int, label: str | None) -> None:
        self.deadlines = Deadlines(governor.timeouts, governor.clock)
        self._governor = governor
        self._label = label
        self._model = model
        self._estimated_input = size // 4
        self._permit: Permit | None = None
        self._sent_at = 0.0
        self._first_piece_at: float | None = None
        self._headers: httpx2.Headers = httpx2.Headers()
        self._parser: EventStreamParser | None = None
        self._body: list[bytes] = []
        self._body_size = 0
        self._events = 0
        self._done = False  # the end mark has passed; readers rarely read on to the very end
        self._seen = _Seen()

    @property
    def clock(self) -> Clock:
        """The governor's."""
        return self._governor.clock

    async def admit(self, flow: object) -> None:
        """Wait for admission."""
        self._permit = await self._governor.limiter.acquire(flow=flow, tokens=self._estimated_input)
        self._sent_at = self._governor.clock()

    def begin(self, response: httpx2.Response) -> None:
        """The answer begins."""
        self._headers = response.headers
        if "event-stream" in response.headers.get("content-type", ""):
            self._parser = EventStreamParser()

    def take(self, piece: bytes) -> None:
        """Look at a piece of the body as it passes; whatever is wrong with it is not our matter."""
        if self._parser is None:
            self._body_size += len(piece)
            if self._body_size <= MAX_METERED_BODY:
                self._body.append(piece)
            return
        if self._first_piece_at is None:
            self._first_piece_at = self._governor.clock()
        try:
            events = self._parser.feed(piece)
        except EventTooLargeError:
            return
        if events:
            self.deadlines.event()
        for event in events:
            self._events += 1
            if event.data == b"[DONE]" or event.event == "response.completed":
                self._done = True
            if b'"usage"' in event.data:  # few do; the others need no decoding
                self._look_at(event.data)

    def _look_at(self, data: bytes) -> None:
        try:
            seen = _decode_seen(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            logger.warning("The endpoint reports usage that cannot be read (%s): estimated.", exc)
            return
        seen = seen.response or seen
        if seen.usage is not None:
            self._seen = seen

    def finish(self) -> None:
        """The answer has been read to its end."""
        if self._permit is None:
            return
        if self._body and self._body_size <= MAX_METERED_BODY:
            self._look_at(b"".join(self._body))
        usage = self._usage()
        self._release("ok", usage, None)
        cost = self._governor.price(usage, self._seen.model or self._model)
        self._governor.ledger.record(model=self._model, label=self._label, usage=usage, cost=cost)

    def cancel(self) -> None:
        """The answer is closed: cut off on our side, unless its end mark has passed."""
        if self._done:
            self.finish()
        else:
            self._end_badly(None)

    def fail(self, error: RequestError, headers: httpx2.Headers | None = None) -> None:
        """It failed."""
        if headers is not None:
            self._headers = headers
        self._end_badly(error)

    def _end_badly(self, error: RequestError | None) -> None:
        if self._permit is None:
            return
        status = billed(error)
        usage = self._usage() if status == "maybe" else Usage()
        self._release("cancelled" if error is None else outcome_kind(error), usage, error)
        self._governor.ledger.record_failure(
            model=self._model,
            label=self._label,
            usage=usage,
            cost=self._governor.price(usage, self._model) if status == "maybe" else None,
            billed=status,
            cancelled=error is None,
        )

    def _release(
        self,
        kind: OutcomeKind,
        usage: Usage,
        error: RequestError | None,
    ) -> None:
        permit, self._permit = self._permit, None
        assert permit is not None
        first = self._first_piece_at
        permit.release(
            make_outcome(
                kind,
                total=self._governor.clock() - self._sent_at,
                first_token=None if first is None else first - self._sent_at,
                usage=usage,
                error=error,
                headers=self._headers,
            )
        )

    def _usage(self) -> Usage:
        if self._seen.usage is not None:
            return read_usage(self._seen.usage, service_tier=self._seen.service_tier)
        return Usage(
            input_tokens=self._estimated_input,
            output_tokens=max(self._events - 2, 0) or sum(map(len, self._body)) // 4,
            estimated=True,
        )


class _MeteredStream(httpx2.AsyncByteStream):
    """The body on its way to the other client.

    One that is dropped without being read or closed gives its permit and connection back all the
    same: see ``__del__``.
    """

    def __init__(self, stream: httpx2.AsyncByteStream, meter: _Meter, runtime: Runtime) -> None:
        self._stream = stream
        self._meter = meter
        self._runtime = runtime
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces, meter = aiter(self._stream), self._meter
        clock, deadlines = meter.clock, meter.deadlines
        try:
            while True:
                with anyio.move_on_after(deadlines.remaining()) as scope:
                    piece = await anext(pieces, None)
                if scope.cancelled_caught:  # which has closed `pieces`, and reset the stream
                    raise _Overdue(deadlines.error())
                if piece is None:
                    break
                meter.take(piece)
                handed_on = clock()
                yield piece
                deadlines.away(clock() - handed_on)
        except _Overdue as exc:
            meter.fail(exc.error)
            raise
        except httpx2.TransportError as exc:
            meter.fail(ConnectionLostError(str(exc), answered=True))
            raise
        meter.finish()

    async def aclose(self) -> None:
        """Close the answer; unless it was read to its end, that cuts it off."""
        self._closed = True
        try:
            await self._stream.aclose()
        finally:
            self._meter.cancel()

    def __del__(self) -> None:
        if not self._closed:
            stream, meter, runtime = self._stream, self._meter, self._runtime

            async def close() -> None:  # in a task of its own, out of which nothing may come
                with contextlib.suppress(Exception):
                    await stream.aclose()
                meter.cancel()

            runtime.post(lambda: runtime.spawn(close))


def _metered(response: httpx2.Response, meter: _Meter) -> httpx2.Response:
    meter.begin(response)
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    return httpx2.Response(
        response.status_code,
        headers=response.headers,
        stream=_MeteredStream(response.stream, meter, current_runtime()),
        extensions=response.extensions,
    )


async def _read_refusal(
    response: httpx2.Response, governor: Governor
) -> tuple[RequestError, httpx2.Response]:
    """Read an error answer whole, so that its connection is free again, and say what it means."""
    try:
        body = await response.aread()
    finally:
        await response.aclose()
    wait = retry_after(response.headers, now=governor.wall())
    error = read_status_error(response.status_code, response.headers, body, retry_after=wait)
    headers = response.headers.copy()
    for name in ("content-encoding", "content-length", "transfer-encoding"):
        headers.pop(name, None)
    return error, httpx2.Response(response.status_code, headers=headers, content=body)


def _as_error(exc: httpx2.TransportError) -> RequestError:
    if isinstance(exc, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
        return ConnectionFailedError(str(exc))
    return ConnectionLostError(str(exc))


def _read_asked(content: bytes) -> _Asked:
    try:
        return _decode_asked(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Asked()  # the endpoint will say what is wrong with it
