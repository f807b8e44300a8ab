"""Requests cancelled at any await, by the thousand: nothing is left here or on the server."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from contextlib import aclosing, suppress

import anyio
import httpx2
import pytest
from anyio.lowlevel import checkpoint
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from fullbore._h2_server import H2Exchange, ScriptedH2Server
from fullbore.transport.http2 import HTTP2Config, HTTP2Transport

pytestmark = pytest.mark.anyio

KINDS = ["quick", "trickle", "large", "stall", "refuse", "reset", "goaway", "hang-up", "echo"]
# Faults that a request may meet although it was not cancelled.
EXPECTED = (httpx2.RemoteProtocolError, httpx2.NetworkError, httpx2.StreamClosed)


async def answer(exchange: H2Exchange) -> None:
    """Behave as the path says."""
    match exchange.path[1:]:
        case "trickle":
            await exchange.start()
            for _ in range(20):
                await exchange.send(b"data: token\n\n")
                await checkpoint()
            await exchange.send(b"data: [DONE]\n\n", end=True)
        case "large":
            await exchange.start()
            await exchange.send(b"x" * 30_000, end=True)
        case "stall":
            await exchange.start()
            await anyio.sleep_forever()
        case "refuse":
            await exchange.abort(ErrorCodes.REFUSED_STREAM)
        case "reset":
            await exchange.start()
            await exchange.send(b"some")
            await exchange.abort(ErrorCodes.INTERNAL_ERROR)
        case "goaway":
            await exchange.peer.goaway_above(exchange.stream_id)
            await exchange.respond(b"last")
        case "hang-up":
            await exchange.peer.close()
        case "echo":
            await exchange.complete.wait()
            await exchange.respond(bytes(exchange.body))
        case _:
            await exchange.respond(b"quick")


async def request(client: httpx2.AsyncClient, dice: random.Random) -> None:
    """One request of a random kind, read in whole, in part, or not at all."""
    kind = dice.choice(KINDS)
    body = b"y" * dice.choice([0, 10, 30_000])
    built = client.build_request("POST", f"/{kind}", content=body)
    response = await client.send(built, stream=True)
    manner = dice.choice(["read", "part", "close", "drop"])
    if manner == "read":
        await response.aread()
    elif manner == "part":
        async with aclosing(response.aiter_raw()) as chunks:
            await anext(chunks, None)
    elif manner == "close":
        await response.aclose()


async def cancelled_request(client: httpx2.AsyncClient, dice: random.Random) -> None:
    """Cancel a request after a random number of turns of the event loop."""
    scope = anyio.CancelScope()

    async def cancel() -> None:
        for _ in range(dice.choice([0, 1, 3, 10, 30, 100, 300])):
            await checkpoint()
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel)
        with scope, suppress(*EXPECTED):
            await request(client, dice)


def resources(backend: str) -> tuple[int, int]:
    """Living tasks and open file descriptors (0 where /proc is not)."""
    if backend == "asyncio":
        tasks = len(asyncio.all_tasks())
    else:
        import trio

        tasks = trio.lowlevel.current_statistics().tasks_living
    return tasks, len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.mark.parametrize(
    "count",
    [
        300,
        pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
async def test_random_cancellations(count: int, anyio_backend_name: str) -> None:
    """No task, socket, stream or slot is left, and the next request is served."""
    dice = random.Random(count)
    settings = {
        SettingCodes.MAX_CONCURRENT_STREAMS: 10,
        SettingCodes.INITIAL_WINDOW_SIZE: 20_000,
    }
    config = HTTP2Config(max_lanes=3, max_streams_per_lane=8, stream_window=4_000)
    async with ScriptedH2Server(answer, settings=settings) as server:
        await anyio.wait_all_tasks_blocked()  # the server has started all of its own
        before = resources(anyio_backend_name)
        transport = HTTP2Transport(prior_knowledge=True, config=config)
        client = httpx2.AsyncClient(transport=transport, base_url=server.url, timeout=None)
        async with anyio.create_task_group() as tasks:
            workers = anyio.CapacityLimiter(40)

            async def work(seed: int) -> None:
                async with workers:
                    await cancelled_request(client, random.Random(seed))

            for _ in range(count):
                tasks.start_soon(work, dice.random().__hash__())
        (pool,) = transport._pools.values()
        gc.collect()  # responses that were dropped are in cycles with their streams
        with anyio.fail_after(30):
            while server.running or any(lane.load for lane in pool.lanes):
                await anyio.sleep(0.01)
        assert pool.waiting == 0
        assert all(not lane._connection.streams for lane in pool.lanes)
        assert (await client.get("/quick")).text == "quick"
        await client.aclose()
        with anyio.fail_after(30):
            for peer in server.peers:
                await peer.ended.wait()
            while resources(anyio_backend_name) != before:
                await anyio.sleep(0.01)
        assert server.errors == []
