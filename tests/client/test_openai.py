"""``client.openai``: the real SDK on our connections, limits, retries and ledger."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import anyio
import openai
import pytest

from fullbore import Client, PerRequest, Retry
from fullbore.testing import FaultServer, Reply, answer, chunk, hang_up, hold, pieces, sse, status

pytestmark = [
    pytest.mark.anyio,
    # The SDK leaves its own async generators half read, which trio points out.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def opened(*replies: Reply, **settings: Any) -> AsyncIterator[tuple[Client, FaultServer]]:
    """Open a server with these replies and a client of it."""
    settings = {"model": "m", "concurrency": 4, "retry": Retry(base=0.0), **settings}
    async with FaultServer(*replies) as server, Client(server.url, **settings) as client:
        yield client, server


async def test_an_unstreamed_answer_is_counted() -> None:
    """Usage from the body as it passes."""
    async with opened(answer("one two"), pricing=PerRequest("0.002")) as (client, server):
        reply = await client.openai.chat.completions.create(**CHAT)
        totals = client.ledger.totals(label="openai")
        assert client.limiter.in_flight == 0
    assert reply.choices[0].message.content == "one two"
    assert (totals.ok, totals.input_tokens, totals.output_tokens) == (1, 5, 2)
    assert (totals.cost, totals.estimated) == (Decimal("0.002"), 0)
    assert "authorization" not in server.requests[0].headers


async def test_a_streamed_answer_is_counted() -> None:
    """Exactly with include_usage, else estimated and flagged; the chunks are the SDK's own."""
    async with opened(answer("one two")) as (client, _):
        create = client.openai.chat.completions.create
        async with await create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        ) as stream:
            texts = [c.choices[0].delta.content async for c in stream if c.choices]
        assert texts == ["one", " two", None]
        assert client.ledger.totals().output_tokens == 2
        assert client.ledger.totals().estimated == 0
        async with await create(**CHAT, stream=True) as stream:
            assert len([c async for c in stream]) == 3
        assert (client.ledger.totals().ok, client.ledger.totals().estimated) == (2, 1)
        assert client.limiter.in_flight == 0


async def test_its_requests_share_the_limit_with_map() -> None:
    """One limiter for a client, whoever asks."""
    async with opened(answer("x"), concurrency=3) as (client, server):
        async with anyio.create_task_group() as group:
            for _ in range(20):

                async def create() -> None:
                    await client.openai.chat.completions.create(**CHAT)

                group.start_soon(create)
            results = await client.map(["a"] * 20)
        assert all(result.ok for result in results)
        assert server.peak <= 3
        assert client.ledger.totals().ok == 40


@pytest.mark.parametrize("fault", [status(503), status(429, retry_after=0), hang_up()])
async def test_our_retries_are_under_it(fault: Reply) -> None:
    """The SDK's own are off, so nothing is tried twice over."""
    async with opened(fault, answer("ok")) as (client, server):
        reply = await client.openai.chat.completions.create(**CHAT)
        assert reply.choices[0].message.content == "ok"
        assert client.ledger.totals().failed == 1
    assert len(server.requests) == 2


async def test_its_errors_are_its_own() -> None:
    """Code written for the SDK sees what it expects, body and all."""
    body = {"error": {"message": "bad n", "type": "invalid_request_error", "param": "n"}}
    async with opened(status(400, body), retry=Retry(attempts=1)) as (client, server):
        with pytest.raises(openai.BadRequestError, match="bad n") as caught:
            await client.openai.chat.completions.create(**CHAT)
        assert caught.value.param == "n"
        assert client.limiter.in_flight == 0
        assert server.connections == 1


async def test_exhausted_retries_give_the_last_answer() -> None:
    """As the SDK's own error."""
    async with opened(status(503), retry=Retry(attempts=3, base=0)) as (client, server):
        with pytest.raises(openai.InternalServerError):
            await client.openai.chat.completions.create(**CHAT)
    assert len(server.requests) == 3


async def test_lost_connections_are_the_sdks_connection_error() -> None:
    """After our retries."""
    async with opened(hang_up(), retry=Retry(attempts=2, base=0)) as (client, server):
        with pytest.raises(openai.APIConnectionError):
            await client.openai.chat.completions.create(**CHAT)
    assert len(server.requests) == 2


async def test_other_requests_pass_straight_through() -> None:
    """Listing models is no generation: no limit, no ledger."""
    async with opened(status(200, {"object": "list", "data": []})) as (client, server):
        assert (await client.openai.models.list()).data == []
        assert client.ledger.totals().calls == 0
    assert server.requests[0].method == "GET"


async def test_a_stream_closed_early_is_cut_off() -> None:
    """And counted as perhaps billed."""
    async with opened(pieces(sse(chunk("a")), then="hold")) as (client, server):
        stream = await client.openai.chat.completions.create(**CHAT, stream=True)
        await stream.close()
        await server.until(lambda: server.in_progress == 0)
        assert client.limiter.in_flight == 0
        assert client.ledger.totals().cancelled == 1


async def test_streams_neither_read_nor_closed_do_not_block_the_next() -> None:
    """The permit and the connection come back when the stream is gone."""
    async with opened(pieces(sse(chunk("a")), then="hold"), concurrency=1) as (client, server):
        for _ in range(3):
            await client.openai.chat.completions.create(**CHAT, stream=True)
            gc.collect()
        await server.until(lambda: server.in_progress == 0)


async def test_cancelling_a_call() -> None:
    """Leaves no permit."""
    async with opened(hold()) as (client, server):
        with anyio.move_on_after(0.1):
            await client.openai.chat.completions.create(**CHAT)
        await server.until(lambda: server.in_progress == 0)
        assert client.limiter.in_flight == 0


async def test_the_key_is_sent_and_the_client_is_kept() -> None:
    """One SDK client for one of ours."""
    async with opened(answer("x"), api_key="sk-test", headers={"x-team": "a"}) as (client, server):
        assert client.openai is client.openai
        await client.openai.completions.create(model="m", prompt="hi")
    assert server.requests[0].headers["authorization"] == "Bearer sk-test"
    assert server.requests[0].headers["x-team"] == "a"
