"""``stream``: pieces of text as they come, backpressure, and how it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import anyio
import pytest

from fullbore import (
    BadRequestError,
    Client,
    ClientStateError,
    ConnectionLostError,
    IncompleteStreamError,
    PerRequest,
    Retry,
    Timeouts,
    Usage,
)
from fullbore.testing import (
    EVENT_STREAM,
    FaultServer,
    Reply,
    Visit,
    answer,
    chunk,
    hold,
    pieces,
    sse,
    status,
)

pytestmark = pytest.mark.anyio

HELLO = sse(chunk("hel"), chunk("lo"))


@asynccontextmanager
async def opened(*replies: Reply, **settings: Any) -> AsyncIterator[tuple[Client, FaultServer]]:
    """Open a server with these replies and a client of it."""
    settings = {"model": "m", "concurrency": 4, "retry": Retry(base=0.0), **settings}
    async with FaultServer(*replies) as server, Client(server.url, **settings) as client:
        yield client, server


async def test_pieces_come_as_they_were_sent() -> None:
    """Text, then the whole result."""
    async with opened(answer("one two three"), pricing=PerRequest("0.002")) as (client, _):
        async with client.stream("hi", max_tokens=7) as stream:
            assert [delta async for delta in stream] == ["one", " two", " three"]
        assert stream.text == stream.result.text == "one two three"
        assert stream.usage == Usage(input_tokens=5, output_tokens=3)
        assert stream.result.cost == client.ledger.cost == Decimal("0.002")
        assert stream.result.timing.first_token is not None
        assert client.limiter.in_flight == 0


async def test_a_piece_is_there_before_the_next_is_written() -> None:
    """Nothing is held back."""
    go_on = anyio.Event()

    async def in_two(visit: Visit) -> None:
        await visit.start(200, EVENT_STREAM)
        await visit.send(sse(chunk("a")))
        await go_on.wait()
        await visit.send(sse(chunk("b", finish_reason="stop"), "[DONE]"))
        await visit.end()

    async with opened(in_two) as (client, _), client.stream("hi") as stream:
        assert await anext(stream) == "a"
        assert stream.text == "a"
        go_on.set()
        assert [delta async for delta in stream] == ["b"]


async def test_a_reader_that_does_not_read_stops_the_server() -> None:
    """The socket is left alone, so the server's sending blocks, and goes on when it is read."""
    sent = 0
    count = 3000
    piece = sse(chunk("x" * 10_000))

    async def flood(visit: Visit) -> None:
        nonlocal sent
        await visit.start(200, EVENT_STREAM)
        for _ in range(count):
            await visit.send(piece)
            sent += 1
        await visit.send(sse(chunk(None, finish_reason="stop"), "[DONE]"))
        await visit.end()

    async with opened(flood) as (client, _), client.stream("hi") as stream:
        await anext(stream)
        before = -1
        while sent != before:  # until it no longer moves
            before = sent
            with anyio.move_on_after(0.1):
                await anyio.sleep_forever()
        assert sent < count
        rest = [delta async for delta in stream]
        assert len(rest) == count - 1


async def test_failures_before_the_first_text_are_retried() -> None:
    """Nobody has seen anything yet."""
    silent = pieces(sse(chunk(None, delta={"role": "assistant"})), then="hang_up")
    async with opened(status(503), silent, answer("ok")) as (client, server):
        async with client.stream("hi") as stream:
            assert [delta async for delta in stream] == ["ok"]
        assert len(stream.result.attempts) == 3
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("then", "kind"), [("hang_up", ConnectionLostError), ("end", IncompleteStreamError)]
)
async def test_a_stream_that_breaks_after_text_is_never_retried(
    then: str, kind: type[Exception]
) -> None:
    """The error holds the text; so does the result; no text comes twice."""
    async with opened(pieces(HELLO, then=then), answer("hello again")) as (client, server):
        got = []
        with pytest.raises(kind) as caught:
            async with client.stream("hi") as stream:
                async for delta in stream:
                    got.append(delta)  # noqa: PERF401 - kept also when it raises
        assert got == ["hel", "lo"]
        assert caught.value.partial == stream.result.text == "hello"  # type: ignore[attr-defined]
        assert stream.result.error is caught.value
        assert client.limiter.in_flight == 0
        assert client.ledger.totals().maybe_billed == 1
    assert len(server.requests) == 1


async def test_refused_at_the_door() -> None:
    """Raised where the stream is opened."""
    async with opened(status(400)) as (client, _):
        with pytest.raises(BadRequestError):
            async with client.stream("hi"):
                pytest.fail("there is no stream")
        assert client.limiter.in_flight == 0


async def test_leaving_early_cuts_the_answer_off() -> None:
    """At the server too; what came so far is on the ledger as perhaps billed."""
    async with opened(pieces(HELLO, then="hold")) as (client, server):
        async with client.stream("hi") as stream:
            async for _ in stream:
                break
        await server.until(lambda: server.in_progress == 0)
        assert client.limiter.in_flight == 0
        totals = client.ledger.totals()
        assert (totals.cancelled, totals.maybe_billed) == (1, 1)
        assert isinstance(stream.result.error, IncompleteStreamError)


async def test_cancelled_while_reading() -> None:
    """As any await."""
    async with opened(pieces(HELLO, then="hold")) as (client, server):
        with anyio.move_on_after(0.1) as scope:
            async with client.stream("hi") as stream:
                async for _ in stream:
                    pass
        assert scope.cancelled_caught
        await server.until(lambda: server.in_progress == 0)
        assert client.limiter.in_flight == 0


async def test_cancelled_while_opening() -> None:
    """Before anything came."""
    async with opened(hold()) as (client, server):
        with anyio.move_on_after(0.1):
            async with client.stream("hi"):
                pytest.fail("nothing has come yet")
        await server.until(lambda: server.in_progress == 0)
        assert client.limiter.in_flight == 0


async def test_the_time_a_reader_takes_is_not_the_servers() -> None:
    """A reader slower than every limit still gets all of it."""
    async with opened(
        answer(" ".join("abcdef")), timeout=Timeouts(first_token=0.2, stall=0.2, total=0.4)
    ) as (client, _):
        got = ""
        async with client.stream("hi") as stream:
            async for delta in stream:
                await anyio.sleep(0.15)
                got += delta
    assert got == "a b c d e f"


async def test_an_answer_without_text() -> None:
    """Tool calls alone, say."""
    async with opened(pieces(sse(chunk(None, finish_reason="stop"), "[DONE]"))) as (client, _):
        async with client.stream("hi") as stream:
            assert [delta async for delta in stream] == []
        assert stream.result.ok


async def test_the_result_is_not_there_before_the_end() -> None:
    """And says so."""
    async with opened(pieces(HELLO, then="hold")) as (client, _), client.stream("hi") as stream:
        await anext(stream)
        with pytest.raises(ClientStateError, match="ended"):
            stream.result
        with pytest.raises(ClientStateError, match="async with"):
            await anext(client.stream("other"))
