"""The real `openai` SDK on our transport as people use it: never entered, rarely closed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx2
import openai
import pytest

from fullbore._h2_server import H2Exchange, ScriptedH2Server
from fullbore.transport.http2 import HTTP2Config, HTTP2Transport

pytestmark = [
    pytest.mark.anyio,
    # The SDK leaves generators to the garbage collector, which trio complains of.
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]


def chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    return b"data: " + json.dumps({**body, "choices": [choice]}).encode() + b"\n\n"


async def chat(exchange: H2Exchange) -> None:
    """Stream the words of the last message back."""
    await exchange.complete.wait()
    words = json.loads(exchange.body)["messages"][-1]["content"].split()
    await exchange.start(200, [(b"content-type", b"text/event-stream")])
    for word in words:
        await exchange.send(chunk(word))
        if word == "wait":
            await anyio.sleep_forever()
    await exchange.send(b"data: [DONE]\n\n", end=True)


@asynccontextmanager
async def sdk(
    config: HTTP2Config | None = None,
) -> AsyncIterator[tuple[openai.AsyncOpenAI, ScriptedH2Server]]:
    async with ScriptedH2Server(chat) as server:
        transport = HTTP2Transport(prior_knowledge=True, config=config)
        client = openai.AsyncOpenAI(
            base_url=f"{server.url}/v1",
            api_key="key",
            http_client=httpx2.AsyncClient(transport=transport),
            max_retries=0,
        )
        with anyio.fail_after(60):
            yield client, server
            await transport.aclose()
        assert server.errors == []


async def ask(client: openai.AsyncOpenAI, text: str) -> list[str]:
    stream = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": text}], stream=True
    )
    return [part.choices[0].delta.content or "" async for part in stream]


async def test_streams_without_entering_the_client() -> None:
    """Many streams at once, on the connections they need, each with its own text."""
    async with sdk(HTTP2Config(max_streams_per_lane=10)) as (client, server):

        async def one(number: int) -> None:
            assert await ask(client, f"a {number} z") == ["a", str(number), "z"]

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(one, number)
        assert 1 <= len(server.peers) <= 5


async def test_the_first_request_may_be_cancelled() -> None:
    """The connection it opened outlives it, and its stream ends on the server."""
    async with sdk() as (client, server):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, client, "please wait")
            while not server.running:
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        exchange = server.peers[0].exchanges[1]
        await exchange.ended.wait()
        assert await ask(client, "still there") == ["still", "there"]
        assert len(server.peers) == 1


async def test_closing_a_stream_early_ends_it_on_the_server() -> None:
    """`stream.close()` resets the request; the next one uses the same connection."""
    async with sdk() as (client, server):
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "one wait"}], stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        await server.peers[0].exchanges[1].ended.wait()
        assert await ask(client, "two") == ["two"]
        assert len(server.peers) == 1
