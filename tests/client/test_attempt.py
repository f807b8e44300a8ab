"""One request: answers, failures, retries, limits on time; over a real server that misbehaves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from decimal import Decimal
from typing import Any, Protocol

import anyio
import pytest

from fullbore import (
    AnswerFailedError,
    AuthenticationError,
    Client,
    ConnectionFailedError,
    ConnectionLostError,
    FirstTokenTimeoutError,
    IncompleteStreamError,
    MalformedAnswerError,
    NotFoundError,
    PerRequest,
    QuotaExceededError,
    RequestError,
    Retry,
    RetryAfterTooLongError,
    ServerError,
    StallTimeoutError,
    Timeouts,
    TotalTimeoutError,
    Usage,
)
from fullbore.testing import (
    EVENT_STREAM,
    FaultServer,
    Reply,
    Visit,
    answer,
    chunk,
    hang_up,
    hold,
    pieces,
    reset,
    sse,
    status,
)

pytestmark = pytest.mark.anyio

QUICK = Retry(base=0.0)
ONCE = Retry(attempts=1)
HELLO = sse(chunk("hel"), chunk("lo"))
STOP = sse(chunk(None, finish_reason="stop"))


class Opened(Protocol):
    """Opens a server with these replies and a client of it."""

    def __call__(
        self, *replies: Reply, **settings: Any
    ) -> AbstractAsyncContextManager[tuple[Client, FaultServer]]: ...


@pytest.fixture(params=[False, True], ids=["HTTP/1.1", "HTTP/2"])
def opened(request: pytest.FixtureRequest) -> Opened:
    """What is promised of an attempt holds over either protocol."""

    @asynccontextmanager
    async def open_both(
        *replies: Reply, **settings: Any
    ) -> AsyncIterator[tuple[Client, FaultServer]]:
        http2 = request.param
        settings = {"model": "m", "concurrency": 4, "retry": QUICK, "http2": http2, **settings}
        server = FaultServer(*replies, http2=http2)
        async with server, Client(server.url, **settings) as client:
            yield client, server

    return open_both


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("prompt", ["hi", {"prompt": "hi"}], ids=["chat", "completion"])
async def test_an_answer(opened: Opened, prompt: Any, stream: bool) -> None:
    """Text, usage, cost, timing and the model's name, whichever way it comes."""
    async with opened(answer("one two three"), pricing=PerRequest("0.002")) as (client, server):
        result = await client.complete(prompt, stream=stream, max_tokens=9)
    assert (result.ok, result.text, result.finish_reason) == (True, "one two three", "stop")
    assert result.usage == Usage(input_tokens=5, output_tokens=3)
    assert result.cost == Decimal("0.002")
    assert (result.timing.first_token is not None) == stream
    assert len(result.attempts) == 1
    assert server.requests[0].json["max_tokens"] == 9
    assert server.requests[0].json["model"] == result.model == "m"


@pytest.mark.parametrize(
    "fault",
    [
        status(429, retry_after=0),
        status(500),
        status(503, b"<html>bad gateway</html>"),
        reset(),
        hang_up(),
        pieces(HELLO, then="hang_up"),
        pieces(HELLO, then="reset"),
        pieces(HELLO, then="end"),
        pieces(sse({"error": {"message": "overloaded", "type": "server_error"}})),
    ],
    ids=[
        "429",
        "500",
        "503 with a body that is no JSON",
        "reset",
        "hang-up",
        "cut short",
        "reset in the middle",
        "ended without [DONE]",
        "error in the stream",
    ],
)
async def test_a_passing_fault_is_retried(opened: Opened, fault: Reply) -> None:
    """The second attempt's text alone is the result; both attempts are on record."""
    async with opened(fault, answer("good")) as (client, server):
        result = await client.complete("hi")
        assert client.limiter.in_flight == 0
        totals = client.ledger.totals()
    assert result.text == "good"
    assert len(result.attempts) == len(server.requests) == 2
    assert result.attempts[0].error is not None
    assert (totals.ok, totals.failed) == (1, 1)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (status(401), AuthenticationError),
        (status(404), NotFoundError),
        (status(429, {"error": {"code": "insufficient_quota"}}), QuotaExceededError),
        (pieces(b"data: {nonsense\n\n"), MalformedAnswerError),
        (pieces(b"<html>", headers={"content-type": "text/html"}), MalformedAnswerError),
        (pieces(sse({"error": {"message": "no", "code": 400}})), AnswerFailedError),
        (pieces(b'event: error\ndata: {"type": "invalid"}\n\n'), AnswerFailedError),
    ],
    ids=["401", "404", "no quota", "no JSON", "a web page", "error object", "error event"],
)
async def test_a_lasting_fault_is_not(
    opened: Opened, fault: Reply, kind: type[RequestError]
) -> None:
    """One request, one typed error."""
    async with opened(fault) as (client, server):
        with pytest.raises(kind):
            await client.complete("hi")
    assert len(server.requests) == 1


async def test_the_error_after_the_last_attempt_is_the_last_one(opened: Opened) -> None:
    """As a value too, with every attempt."""
    async with opened(status(500), status(503), status(500), retry=Retry(attempts=3, base=0)) as (
        client,
        server,
    ):
        result = await client.complete("hi", on_error="return")
    assert isinstance(result.error, ServerError)
    assert [attempt.status for attempt in result.attempts] == [500, 503, 500]
    assert len(server.requests) == 3


async def test_retry_after_longer_than_the_deadline_fails_at_once(opened: Opened) -> None:
    """61 s against a total of 30 s: no wait, an error that says so."""
    async with opened(status(429, retry_after=61), timeout=Timeouts(total=30)) as (client, server):
        with pytest.raises(RetryAfterTooLongError, match="61 s"):
            await client.complete("hi")
    assert len(server.requests) == 1


async def test_nobody_there() -> None:
    """The error names the place and asks the right question."""
    async with Client("http://127.0.0.1:9/v1", model="m", retry=ONCE) as client:
        with pytest.raises(ConnectionFailedError, match=r"127\.0\.0\.1:9.*Is the server up"):
            await client.complete("hi")
        assert client.ledger.totals().maybe_billed == 0


@pytest.mark.parametrize(
    ("reply", "timeouts", "kind", "partial"),
    [
        (hold(), Timeouts(first_token=0.05), FirstTokenTimeoutError, ""),
        (
            pieces(b": ping\n\n", then="hold"),
            Timeouts(first_token=0.05),
            FirstTokenTimeoutError,
            "",
        ),
        (pieces(HELLO, then="hold"), Timeouts(stall=0.05), StallTimeoutError, "hello"),
        (pieces(HELLO, then="hold"), Timeouts(total=0.1), TotalTimeoutError, "hello"),
        (hold(), Timeouts(total=0.05), TotalTimeoutError, ""),
    ],
    ids=["no answer", "only keep-alives", "stalled", "total, half way", "total"],
)
async def test_limits_on_time(
    opened: Opened, reply: Reply, timeouts: Timeouts, kind: type[RequestError], partial: str
) -> None:
    """Each is its own error, keeps the partial text, and leaves the server alone."""
    async with opened(reply, timeout=timeouts, retry=ONCE) as (client, server):
        result = await client.complete("hi", on_error="return")
        assert type(result.error) is kind
        assert isinstance(result.error, RequestError)
        assert result.error.partial == partial == result.text
        await server.until(lambda: server.in_progress == 0)
        assert client.limiter.in_flight == 0
        assert client.ledger.totals().maybe_billed == 1


async def test_total_holds_against_a_trickle(opened: Opened) -> None:
    """A server that sends something every moment cannot stretch the deadline."""

    async def trickle(visit: Visit) -> None:
        await visit.start(200, EVENT_STREAM)
        while True:
            await visit.send(sse(chunk("x")))
            await anyio.sleep(0.005)

    async with opened(trickle, timeout=Timeouts(total=0.2, stall=0.1), retry=ONCE) as (client, _):
        result = await client.complete("hi", on_error="return")
    assert isinstance(result.error, TotalTimeoutError)
    assert result.text.startswith("xx")


async def test_tokens_that_keep_coming_do_not_stall(opened: Opened) -> None:
    """The stall limit moves on with every token: longer than it in all, never in between."""

    async def slowly(visit: Visit) -> None:
        await visit.start(200, EVENT_STREAM)
        for _ in range(20):
            await visit.send(sse(chunk("x")))
            await anyio.sleep(0.02)
        await visit.send(STOP + sse("[DONE]"))
        await visit.end()

    async with opened(slowly, timeout=Timeouts(stall=0.3), retry=ONCE) as (client, _):
        assert (await client.complete("hi")).text == "x" * 20


async def test_a_stream_without_done_but_with_a_finish_reason_is_whole(opened: Opened) -> None:
    """Some servers send no end mark."""
    async with opened(pieces(HELLO, STOP)) as (client, _):
        assert (await client.complete("hi")).text == "hello"


async def test_a_stream_cut_after_its_finish_reason_is_whole(opened: Opened) -> None:
    """Only what comes after the answer is lost."""
    async with opened(pieces(HELLO, STOP, then="hang_up"), retry=ONCE) as (client, _):
        result = await client.complete("hi")
    assert (result.text, result.usage.estimated) == ("hello", True)


async def test_a_stream_that_ends_too_soon_says_what_is_missing(opened: Opened) -> None:
    """The partial text is not lost."""
    async with opened(pieces(HELLO), retry=ONCE) as (client, _):
        with pytest.raises(IncompleteStreamError, match="without a finish reason") as caught:
            await client.complete("hi")
    assert caught.value.partial == "hello"


async def test_a_server_that_holds_the_connection_after_done_does_not_hold_us(
    opened: Opened,
) -> None:
    """The answer is complete; the connection is closed on our side."""
    async with opened(pieces(HELLO, STOP, sse("[DONE]"), then="hold")) as (client, server):
        assert (await client.complete("hi")).text == "hello"
        await server.until(lambda: server.in_progress == 0)


@pytest.mark.parametrize("size", [1, 7], ids="pieces of {}".format)
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
async def test_any_split_and_line_end(opened: Opened, size: int, newline: bytes) -> None:
    """Events cut anywhere, comments between them, letters of several bytes."""
    stream = b": hi\n\n" + sse(chunk("grüße "), chunk("😀")) + STOP + sse("[DONE]")
    stream = stream.replace(b"\n", newline)
    cut = [stream[i : i + size] for i in range(0, len(stream), size)]
    async with opened(pieces(*cut), retry=ONCE) as (client, _):
        assert (await client.complete("hi")).text == "grüße 😀"


async def test_usage_is_asked_for_and_estimated_when_not_given(opened: Opened) -> None:
    """Estimates are flagged, in the result and on the ledger."""
    async with opened(pieces(HELLO, STOP, sse("[DONE]"))) as (client, server):
        result = await client.complete("hi")
        assert client.ledger.totals().estimated == 1
    assert server.requests[0].json["stream_options"] == {"include_usage": True}
    assert result.usage.estimated
    assert result.usage.output_tokens == 2
    assert result.usage.input_tokens > 0


async def test_an_unstreamed_answer_to_a_streamed_request_is_taken(opened: Opened) -> None:
    """Some endpoints ignore ``stream``."""

    async def whole(visit: Visit) -> None:
        body = json.dumps({"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}]})
        await visit.start(200, {"content-type": "application/json"})
        await visit.send(body)
        await visit.end()

    async with opened(whole) as (client, _):
        assert (await client.complete("hi")).text == "hello"


async def test_an_error_object_in_an_unstreamed_200_is_an_error(opened: Opened) -> None:
    """Some gateways answer 200 whatever happens."""
    bad = pieces(
        b'{"error": {"message": "no", "code": 400}}', headers={"content-type": "application/json"}
    )
    async with opened(bad) as (client, _):
        with pytest.raises(AnswerFailedError, match="no"):
            await client.complete("hi", stream=False)


async def test_compressed_answers_are_read(opened: Opened) -> None:
    """Not asked for, but some proxies do it anyway."""
    import gzip

    content = gzip.compress(HELLO + STOP + sse("[DONE]"))
    packed = pieces(content, headers={**EVENT_STREAM, "content-encoding": "gzip"})
    async with opened(packed) as (client, _):
        assert (await client.complete("hi")).text == "hello"


async def test_a_redirect_is_explained(opened: Opened) -> None:
    """POSTs are not redirected silently: the key would go along."""
    moved = status(308, headers={"location": "https://elsewhere/v1"})
    async with opened(moved) as (client, _):
        with pytest.raises(RequestError, match="elsewhere"):
            await client.complete("hi")


async def test_an_idle_connection_closed_by_the_server_is_replaced(opened: Opened) -> None:
    """The request that met it is sent once more, at once, whatever the back-off."""

    async def close_after(visit: Visit) -> None:
        await answer("first")(visit)

    slow = Retry(base=1e6, cap=1e6)
    async with opened(close_after, hang_up(), answer("second"), retry=slow) as (client, server):
        assert (await client.complete("1")).text == "first"
        assert (await client.complete("2")).text == "second"
    assert len(server.requests) == 3


async def test_a_storm_of_429_leaves_no_connection_and_no_permit(opened: Opened) -> None:
    """Error bodies are read, so that their connections serve again."""
    async with opened(status(429), retry=ONCE, concurrency=2) as (client, server):
        results = await client.map([str(i) for i in range(50)])
        assert not any(result.ok for result in results)
        assert client.limiter.in_flight == 0
        assert server.connections <= 2


async def test_connection_loss_before_the_answer_is_typed(opened: Opened) -> None:
    """And may have been billed."""
    async with opened(reset(), retry=ONCE, pricing=PerRequest("0.002")) as (client, _):
        with pytest.raises(ConnectionLostError):
            await client.complete("hi")
        totals = client.ledger.totals()
    assert (totals.ok, totals.cost) == (0, 0)
    assert (totals.maybe_billed, totals.maybe_cost) == (1, Decimal("0.002"))


async def test_cancelling_leaves_nothing_behind(opened: Opened) -> None:
    """Neither a connection at the server nor a permit here."""
    async with opened(pieces(HELLO, then="hold")) as (client, server):
        async with anyio.create_task_group() as group:
            group.start_soon(client.complete, "hi")
            await server.until(lambda: server.in_progress == 1)
            group.cancel_scope.cancel()
        await server.until(lambda: server.in_progress == 0)
        assert client.limiter.in_flight == 0
        assert client.ledger.totals().cancelled == 1
