"""One real server with the real model for the whole run, and raw clients that can misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Self

import h2.config
import h2.connection
import h2.events
import openai
import pytest

from fullbore_backend import AsyncEngine, Engine, EngineConfig
from fullbore_backend.server import ServerConfig
from fullbore_backend.server.thread import ThreadServer

MAX_NUM_SEQS, MAX_WAITING = 8, 100


@pytest.fixture
def anyio_backend() -> str:
    """The clients here are asyncio's."""
    return "asyncio"


@pytest.fixture(scope="session")
def server() -> Iterator[ThreadServer]:
    """A server on a free port; small limits, so that they can be reached."""
    config = EngineConfig(
        kv_cache_bytes=96 * 2**20,
        max_model_len=1024,
        max_num_seqs=MAX_NUM_SEQS,
        max_waiting=MAX_WAITING,
    )
    with ThreadServer(AsyncEngine(Engine(config)), ServerConfig(port=0)) as running:
        yield running


@pytest.fixture
async def sdk(server: ThreadServer) -> AsyncIterator[openai.AsyncOpenAI]:
    """The real SDK; it does not retry, so that the first answer is seen."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def until(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    """Poll until it holds; fail when it does not come to hold."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come to hold"
        await asyncio.sleep(0.01)


@pytest.fixture
def assert_nothing_left(server: ThreadServer) -> Callable[[], Awaitable[None]]:
    """Fails unless the engine comes to hold no request and no block."""

    def idle() -> bool:
        stats = server.engine.stats()
        return not (
            stats.num_running or stats.num_waiting or stats.num_paused or stats.num_blocks_used
        )

    return lambda: until(idle)


class Http2:
    """An HTTP/2 connection by prior knowledge that resets streams as told.

    One task at a time reads; what it reads for other streams is kept for them.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self._h2 = h2.connection.H2Connection(config)
        self._bodies: dict[int, bytes] = {}
        self._ended: set[int] = set()
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        self._h2.initiate_connection()
        self._flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()

    def post(self, path: str, body: dict[str, Any]) -> int:
        """Send a request; returns its stream."""
        stream = self._h2.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", "localhost"),
            (":path", path),
            ("content-type", "application/json"),
        ]
        self._bodies[stream] = b""
        self._h2.send_headers(stream, headers)
        self._h2.send_data(stream, json.dumps(body).encode(), end_stream=True)
        self._flush()
        return stream

    async def read(self, stream: int, *, events: int | None = None) -> bytes:
        """The body until it holds that many server-sent events, or until its end."""
        while stream not in self._ended:
            if events is not None and self._bodies[stream].count(b"\n\n") >= events:
                break
            async with self._turn:
                self._receive(await self._reader.read(65536))
        return self._bodies[stream]

    def reset(self, stream: int) -> None:
        """Leave one stream; the connection stays."""
        if stream not in self._ended:
            self._h2.reset_stream(stream, error_code=8)
            self._flush()

    def _receive(self, data: bytes) -> None:
        assert data, "the server closed the connection"
        for event in self._h2.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                self._bodies[event.stream_id] += event.data
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                self._ended.add(event.stream_id)
        self._flush()

    def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())


@pytest.fixture
def http2(server: ThreadServer) -> Callable[[], Http2]:
    """Makes raw HTTP/2 connections to the server."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    return lambda: Http2(host, int(port))
