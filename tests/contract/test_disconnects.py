"""Peers that leave, at any point and by any version of HTTP, leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fullbore_backend.server.thread import ThreadServer

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


def chat(*, stream: bool, index: int = 0, n: int = 1) -> dict[str, Any]:
    return {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": f"Write story number {index}."}],
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": stream,
        "n": n,
    }


async def leave_http1(url: str, body: dict[str, Any], rng: random.Random) -> None:
    """Send some or all of a request, read some or nothing, and go."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw
    if rng.random() < 0.1:
        writer.write(request[: rng.randrange(len(request))])
    else:
        writer.write(request)
        if body["stream"]:
            events = rng.randrange(3)
            if events:
                assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
            for _ in range(events):
                await reader.readuntil(b"\n\n")
        else:
            await asyncio.sleep(rng.random() * 0.1)
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


async def leave_http2(connection: Any, body: dict[str, Any], rng: random.Random) -> None:
    """Send a request on a shared connection, read some or nothing, and reset its stream."""
    stream = connection.post(CHAT, body)
    if body["stream"]:
        await connection.read(stream, events=rng.randrange(3))
    else:
        await asyncio.sleep(rng.random() * 0.1)
    connection.reset(stream)


async def test_two_hundred_peers_that_leave_at_random_points(
    server: ThreadServer,
    http2: Callable[[], Any],
    assert_nothing_left: Callable[[], Awaitable[None]],
) -> None:
    """Afterwards nothing runs, nothing waits, and no block is held."""
    admitted = asyncio.Semaphore(24)
    before = server.engine.stats().requests_finished.get("cancelled", 0)

    async def one(index: int, connection: Any) -> None:
        rng = random.Random(index)
        body = chat(stream=rng.random() < 0.6, index=index, n=rng.choice((1, 1, 2)))
        async with admitted:
            if index % 2:
                await leave_http2(connection, body, rng)
            else:
                await leave_http1(server.url, body, rng)

    async with http2() as connection:
        await asyncio.gather(*(one(index, connection) for index in range(200)))
        await assert_nothing_left()
        cancelled = server.engine.stats().requests_finished.get("cancelled", 0) - before
        assert cancelled > 100  # most had reached the engine
        stream = connection.post(CHAT, {**chat(stream=False), "max_tokens": 2})
        assert b'"finish_reason":"length"' in await connection.read(stream)
    await assert_nothing_left()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_reset_stream_ends_its_request_and_no_other(
    server: ThreadServer,
    http2: Callable[[], Any],
    assert_nothing_left: Callable[[], Awaitable[None]],
    stream: bool,
) -> None:
    """RST_STREAM on a connection that stays open cancels one of two requests."""
    async with http2() as connection:
        kept = connection.post(CHAT, {**chat(stream=True), "max_tokens": 30})
        left = connection.post(CHAT, chat(stream=stream))
        await connection.read(kept, events=3)
        connection.reset(left)
        assert (await connection.read(kept)).endswith(b"data: [DONE]\n\n")
        await assert_nothing_left()


async def test_a_closed_connection_ends_all_its_requests(
    http2: Callable[[], Any], assert_nothing_left: Callable[[], Awaitable[None]]
) -> None:
    """Twenty streams on one connection that breaks."""
    async with http2() as connection:
        streams = [connection.post(CHAT, chat(stream=True, index=i)) for i in range(20)]
        await connection.read(streams[0], events=2)
    await assert_nothing_left()
