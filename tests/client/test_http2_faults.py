"""The four faults of the HTTP/2 stacks in Python, on a scripted server and on granian.

Each scenario returns whether the client came through. It must for our transport, and must not for
httpx2's own: if that one is ever repaired, these tests will say so.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any

import anyio
import httpx2
import pytest

from fullbore._h2_server import H2Exchange, ScriptedH2Server
from fullbore.transport.http2 import HTTP2Transport

pytestmark = pytest.mark.anyio

PATIENCE = 20.0  # a hang guard where success is expected
IMPATIENCE = 1.0  # how long the other transport may take to fail


class Stage:
    """What the server's handlers share with the test, across threads."""

    def __init__(self) -> None:
        self.running = 0
        self.entered = 0
        self.released = False
        self._changed = threading.Condition()

    def enter(self, step: int) -> None:
        with self._changed:
            self.running += step
            self.entered += step > 0
            self._changed.notify_all()

    async def reaches(self, goal: Callable[[], bool], timeout: float) -> bool:
        """Whether the goal is met before the timeout."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(goal, timeout)

        return await anyio.to_thread.run_sync(wait, abandon_on_cancel=True)


async def scripted(stage: Stage, exchange: H2Exchange) -> None:
    """Serve /hold: a chunk, then another once released; anything else: ok."""
    if exchange.path != "/hold":
        await exchange.respond(b"ok")
        return
    stage.enter(+1)
    try:
        await exchange.start()
        await exchange.send(b"first")
        while not stage.released:
            await anyio.sleep(0.01)
        await exchange.send(b"last", end=True)
    finally:
        stage.enter(-1)


async def disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def asgi(stage: Stage) -> Callable[..., Awaitable[None]]:
    """The same as an ASGI application."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] != "/hold":
            await send({"type": "http.response.body", "body": b"ok"})
            return
        stage.enter(+1)
        try:
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            gone = asyncio.ensure_future(disconnect(receive))
            while not (stage.released or gone.done()):
                await asyncio.sleep(0.01)
            gone.cancel()
            await send({"type": "http.response.body", "body": b"last"})
        finally:
            stage.enter(-1)

    return app


@contextmanager
def granian(app: Callable[..., Awaitable[None]]) -> Iterator[str]:
    """Run granian in a thread, on a free port; yield its URL."""
    from granian.server.embed import Server

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started: list[tuple[asyncio.AbstractEventLoop, Server]] = []
    ready = threading.Event()

    def main() -> None:
        async def serve() -> None:
            server = Server(
                app, address="127.0.0.1", port=port, interface="asgi", log_enabled=False
            )
            started.append((asyncio.get_running_loop(), server))
            ready.set()
            await server.serve()

        asyncio.run(serve())

    thread = threading.Thread(target=main)
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop, server = started[0]
        loop.call_soon_threadsafe(server.stop)
        thread.join()


@asynccontextmanager
async def serve(kind: str, stage: Stage) -> AsyncIterator[str]:
    if kind == "scripted":
        async with ScriptedH2Server(lambda exchange: scripted(stage, exchange)) as server:
            yield server.url
            assert server.errors == []
    else:
        with granian(asgi(stage)) as url:
            yield url


async def settle(client: httpx2.AsyncClient) -> None:
    """Wait until the server answers."""
    while True:
        try:
            await client.get("/")
            return
        except httpx2.ConnectError:
            await anyio.sleep(0.02)


async def hold(client: httpx2.AsyncClient, *, timeout: Any = 60.0) -> bytes:
    async with client.stream("GET", "/hold", timeout=timeout) as response:
        return await response.aread()


async def many_streams(client: httpx2.AsyncClient, stage: Stage, patience: float) -> bool:
    """250 requests run at once although one connection carries 100 or 200 streams."""
    async with anyio.create_task_group() as tasks:
        for _ in range(250):
            tasks.start_soon(hold, client)
        together = await stage.reaches(lambda: stage.running == 250, patience)
        stage.released = True
    return together


async def early_close(client: httpx2.AsyncClient, stage: Stage, patience: float) -> bool:
    """A stream that the reader leaves ends on the server."""
    async with (
        client.stream("GET", "/hold", timeout=60) as response,
        aclosing(response.aiter_raw()) as chunks,
    ):
        assert await anext(chunks) == b"first"
    ended = await stage.reaches(lambda: stage.running == 0, patience)
    stage.released = True
    return ended


async def cancellations(client: httpx2.AsyncClient, stage: Stage, patience: float) -> bool:
    """After 200 cancelled requests the next one is served."""
    try:
        for goal in (100, 200):
            async with anyio.create_task_group() as tasks:
                for _ in range(100):
                    tasks.start_soon(hold, client)
                assert await stage.reaches(lambda goal=goal: stage.entered == goal, patience)
                tasks.cancel_scope.cancel()
        with anyio.fail_after(patience):
            return (await client.get("/")).text == "ok"
    except* (httpx2.LocalProtocolError, TimeoutError):
        pass
    finally:
        stage.released = True
    return False


async def timeout_of_a_sibling(client: httpx2.AsyncClient, stage: Stage, patience: float) -> bool:
    """One request's read timeout leaves the other streams alone."""
    result: list[bytes] = []

    async def sibling() -> None:
        with suppress(httpx2.ReadTimeout):
            result.append(await hold(client))

    async with anyio.create_task_group() as tasks:
        with pytest.raises(httpx2.ReadTimeout):
            async with client.stream("GET", "/hold", timeout=0.2) as response:
                tasks.start_soon(sibling)
                await response.aread()
        stage.released = True
    return result == [b"firstlast"]


@pytest.mark.parametrize("server", ["scripted", "granian"])
@pytest.mark.parametrize(
    ("transport", "survives"),
    [
        pytest.param(lambda: HTTP2Transport(prior_knowledge=True), True, id="fullbore"),
        pytest.param(
            lambda: httpx2.AsyncHTTPTransport(http1=False, http2=True),
            False,
            id="httpx2-fails",
            # It leaves its generators to the garbage collector, which trio complains of.
            marks=pytest.mark.filterwarnings(
                "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
            ),
        ),
    ],
)
@pytest.mark.parametrize(
    "scenario",
    [many_streams, early_close, cancellations, timeout_of_a_sibling],
    ids=lambda scenario: scenario.__name__,
)
async def test_fault(
    scenario: Callable[[httpx2.AsyncClient, Stage, float], Awaitable[bool]],
    transport: Callable[[], httpx2.AsyncBaseTransport],
    survives: bool,
    server: str,
) -> None:
    """Our transport comes through each fault; httpx2's own does not."""
    stage = Stage()
    async with (
        serve(server, stage) as url,
        httpx2.AsyncClient(transport=transport(), base_url=url) as client,
    ):
        await settle(client)
        patience = PATIENCE if survives else IMPATIENCE
        assert await scenario(client, stage, patience) is survives
