"""``http_client``: other people's libraries under our limits, retries and ledger."""

from __future__ import annotations

import gc
from decimal import Decimal
from typing import Any

import anyio
import httpx2
import openai
import pytest

from fullbore import Ledger, PerRequest, Rates, Retry, http_client
from fullbore.errors import ConfigError
from fullbore.testing import (
    FaultServer,
    answer,
    chunk,
    hang_up,
    hold,
    pieces,
    respond_json,
    sse,
    status,
)

pytestmark = [
    pytest.mark.anyio,
    # The SDK leaves its own async generators half read, which trio points out.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def sdk(server: FaultServer, http: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    """The real SDK on a governed client that nobody has entered."""
    return openai.AsyncOpenAI(base_url=server.url, api_key="k", http_client=http, max_retries=0)


@pytest.mark.parametrize("http2", [None, True], ids=["HTTP/1.1", "HTTP/2"])
async def test_the_openai_sdk_gains_limits_retries_and_a_ledger(http2: bool | None) -> None:
    """Without ``async with``; streamed and not."""
    good = answer("one two")
    async with FaultServer(status(503), good, hang_up(), good, http2=bool(http2)) as server:
        governed = http_client(
            pricing=PerRequest("0.002"), retry=Retry(base=0), http2=http2, label="mine"
        )
        client = sdk(server, governed)
        reply = await client.chat.completions.create(**CHAT)
        assert reply.choices[0].message.content == "one two"
        stream = await client.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        )
        texts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
        await client.close()
    assert "".join(texts) == "one two"
    totals = governed.ledger.totals(label="mine")
    assert (totals.ok, totals.failed, totals.output_tokens) == (2, 2, 4)
    assert totals.cost == Decimal("0.004")


async def test_its_limit_holds_for_all_who_share_it() -> None:
    """Two SDK clients on one governed client."""
    async with FaultServer(answer("x")) as server, http_client(concurrency=3) as governed:
        async with anyio.create_task_group() as group:
            for client in [sdk(server, governed), sdk(server, governed)] * 10:

                async def create(client: openai.AsyncOpenAI = client) -> None:
                    await client.chat.completions.create(**CHAT)

                group.start_soon(create)
        assert server.peak <= 3
        limiter = governed.limiter(server.url)
        assert limiter is not None
        assert (limiter.limit, limiter.in_flight) == (3, 0)


async def test_each_endpoint_has_a_limiter_of_its_own() -> None:
    """A busy one does not hold up another; the ledger is one."""
    async with (
        FaultServer(hold()) as busy,
        FaultServer(answer("x")) as free,
        http_client(concurrency=1) as governed,
        anyio.create_task_group() as group,
    ):

        async def block() -> None:
            await sdk(busy, governed).chat.completions.create(**CHAT)

        group.start_soon(block)
        await busy.until(lambda: busy.in_progress == 1)
        await sdk(free, governed).chat.completions.create(**CHAT)
        assert governed.limiter(busy.url) is not governed.limiter(free.url)
        group.cancel_scope.cancel()
    assert governed.ledger.totals().ok == 1
    assert governed.ledger.totals().cancelled == 1


async def test_plain_httpx2_use() -> None:
    """Any library that takes such a client: its own base URL, headers, hooks, timeouts."""
    async with (
        FaultServer(answer("x"), status(200, {"data": []})) as server,
        http_client(base_url=server.url, headers={"x-team": "a"}, timeout=None) as client,
    ):
        response = await client.post("/chat/completions", json=CHAT)
        assert response.json()["choices"][0]["message"]["content"] == "x"
        assert server.requests[0].headers["x-team"] == "a"
        assert (await client.get("/models")).status_code == 200
        assert client.ledger.totals().calls == 1


async def test_a_transport_and_a_ledger_of_ones_own() -> None:
    """Shared with other clients, or without a network."""
    ledger = Ledger()

    def handle(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json={"usage": {"prompt_tokens": 2, "completion_tokens": 3}})

    for _ in range(2):
        async with http_client(transport=httpx2.MockTransport(handle), ledger=ledger) as client:
            await client.post("http://x/v1/completions", json=CHAT)
    assert ledger.totals().output_tokens == 6


async def test_a_stream_that_is_dropped_gives_everything_back() -> None:
    """Permit and connection, without anybody closing it."""
    held = pieces(sse(chunk("a")), then="hold")
    async with FaultServer(held) as server, http_client(concurrency=1) as governed:
        for _ in range(3):
            await sdk(server, governed).chat.completions.create(**CHAT, stream=True)
            gc.collect()
        await server.until(lambda: server.in_progress == 0)


async def test_closing_the_sdk_closes_every_connection() -> None:
    """The SDK closes the client it was given."""
    async with FaultServer(answer("x")) as server:
        client = sdk(server, http_client())
        await client.chat.completions.create(**CHAT)
        assert server.open_connections == 1
        await client.close()
        await server.until(lambda: server.open_connections == 0)


async def test_usage_that_makes_no_sense_is_estimated(caplog: pytest.LogCaptureFixture) -> None:
    """And said so."""

    async def odd(visit: Any) -> None:
        await respond_json(visit, {"choices": [], "usage": {"prompt_tokens": "many"}})

    async with FaultServer(odd) as server, http_client(base_url=server.url) as client:
        await client.post("/chat/completions", json=CHAT)
        assert client.ledger.totals().estimated == 1
    assert "usage that cannot be read" in caplog.text


def test_senseless_settings_are_refused_at_once() -> None:
    """As the client does."""
    with pytest.raises(ConfigError, match="'auto'"):
        http_client(concurrency=0)
    with pytest.raises(ConfigError, match="not both"):
        http_client(limiter=object(), rates=Rates(requests_per_day=1))  # type: ignore[arg-type]
