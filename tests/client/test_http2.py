"""Requests, flow control and timeouts of the HTTP/2 transport, against a scripted server."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager

import anyio
import httpx2
import pytest
from anyio.lowlevel import checkpoint
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from fullbore._h2_server import H2Exchange, Handler, ScriptedH2Server
from fullbore.transport.http2 import HTTP2Config, HTTP2Transport

pytestmark = pytest.mark.anyio

WINDOW = 65_536


@asynccontextmanager
async def session(
    handler: Handler,
    *,
    config: HTTP2Config | None = None,
    settings: Mapping[SettingCodes, int] | None = None,
    grant_windows: bool = True,
) -> AsyncIterator[tuple[httpx2.AsyncClient, ScriptedH2Server]]:
    """A server and a client of it; at the end the client has kept to the protocol."""
    server = ScriptedH2Server(handler, settings=settings, grant_windows=grant_windows)
    transport = HTTP2Transport(prior_knowledge=True, config=config)
    with anyio.fail_after(60):
        async with server:
            client = httpx2.AsyncClient(transport=transport, base_url=server.url, timeout=30)
            async with client:
                yield client, server
            assert server.errors == []


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until a condition holds (the session's guard ends a vain wait)."""
    while not condition():
        await anyio.sleep(0.001)


async def nth_exchange(server: ScriptedH2Server, stream_id: int) -> H2Exchange:
    """Wait until the server has seen the request that went out on a stream."""
    await until(lambda: stream_id in server.peers[0].exchanges)
    return server.peers[0].exchanges[stream_id]


async def echo(exchange: H2Exchange) -> None:
    await exchange.complete.wait()
    await exchange.respond(bytes(exchange.body))


async def test_round_trip() -> None:
    """Status, headers, body and extensions arrive as they were sent."""

    async def handler(exchange: H2Exchange) -> None:
        await exchange.complete.wait()
        assert exchange.headers[b":method"] == b"POST"
        assert exchange.headers[b":authority"] == server.url.removeprefix("http://").encode()
        assert exchange.headers[b"authorization"] == b"Bearer key"
        assert not {b"host", b"connection", b"transfer-encoding"} & exchange.headers.keys()
        await exchange.respond(b"<" + exchange.body + b">", 201, [(b"x-thing", b"a")])

    async with session(handler) as (client, server):
        headers = {"Authorization": "Bearer key", "Transfer-Encoding": "chunked"}
        response = await client.post("/v1?q=1", content=b"hello", headers=headers)
        assert (response.status_code, response.content) == (201, b"<hello>")
        assert response.headers["x-thing"] == "a"
        assert response.http_version == "HTTP/2"
        assert response.extensions["stream_id"] == 1


async def test_chunks_arrive_as_they_are_sent() -> None:
    """A chunk is handed out before the server sends the next."""
    received = anyio.Event()

    async def handler(exchange: H2Exchange) -> None:
        await exchange.start()
        await exchange.send(b"one")
        await received.wait()
        await exchange.send(b"two", end=True)

    async with session(handler) as (client, _), client.stream("GET", "/") as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == b"one"
        received.set()
        assert [chunk async for chunk in chunks] == [b"two"]


async def test_a_slow_consumer_stops_the_server_and_loses_nothing() -> None:
    """The server sends one stream window, waits, and goes on as the consumer reads."""
    body = bytes(range(256)) * 2048

    async def handler(exchange: H2Exchange) -> None:
        await exchange.start()
        await exchange.send(body if exchange.path == "/slow" else b"quick", end=True)

    async with session(handler) as (client, server), client.stream("GET", "/slow") as response:
        exchange = server.peers[0].exchanges[1]
        await until(lambda: exchange.sent == WINDOW)
        for _ in range(20):
            assert (await client.get("/quick")).text == "quick"
        assert exchange.sent == WINDOW
        assert await response.aread() == body


async def test_stalled_streams_do_not_block_the_others_of_their_connection() -> None:
    """With every other stream stalled at its limit, one still gets far more than a window."""
    body = b"x" * (20 * WINDOW)

    async def handler(exchange: H2Exchange) -> None:
        await exchange.start()
        await exchange.send(body, end=True)

    config = HTTP2Config(max_streams_per_lane=4, max_lanes=1)
    async with session(handler, config=config) as (client, server):
        stalled = [
            await client.send(client.build_request("GET", "/"), stream=True) for _ in range(3)
        ]
        assert (await client.get("/")).content == body
        for response in stalled:
            assert await response.aread() == body
        assert len(server.peers) == 1


async def test_unread_bytes_of_closed_streams_come_back_to_the_connection() -> None:
    """Streams closed with a full window unread cost the connection none of its credit."""

    async def handler(exchange: H2Exchange) -> None:
        await exchange.start()
        await exchange.send(b"x" * WINDOW)
        await anyio.sleep_forever()

    async with session(handler) as (client, server):
        for stream_id in range(1, 200, 2):
            async with client.stream("GET", "/"):
                exchange = server.peers[0].exchanges[stream_id]
                await until(lambda exchange=exchange: exchange.sent == WINDOW)
            await exchange.ended.wait()
        peer = server.peers[0]
        await until(lambda: peer.h2.outbound_flow_control_window > 99 * WINDOW)
        assert all(e.reset_code == ErrorCodes.CANCEL for e in peer.exchanges.values())


async def test_padding_is_credited_and_not_delivered() -> None:
    """Padded frames use up windows, which come back although nobody reads padding."""
    body = b"y" * (4 * WINDOW)

    async def handler(exchange: H2Exchange) -> None:
        await exchange.start()
        await exchange.send(body, end=True, padding=255)

    async with session(handler) as (client, _):
        assert (await client.get("/")).content == body


async def test_an_upload_waits_for_the_windows_of_the_server() -> None:
    """A body larger than every window arrives whole, in pieces the server has allowed."""
    body = bytes(range(256)) * 1000
    async with session(echo, settings={SettingCodes.INITIAL_WINDOW_SIZE: 1000}) as (client, _):
        assert (await client.post("/", content=body)).content == body


async def test_an_upload_follows_a_change_of_the_initial_window() -> None:
    """SETTINGS_INITIAL_WINDOW_SIZE moves the windows of streams that are open (RFC 9113, 6.9.2)."""

    async def handler(exchange: H2Exchange) -> None:
        await until(lambda: len(exchange.body) == 10)
        await exchange.peer.settings({SettingCodes.INITIAL_WINDOW_SIZE: 5})
        await exchange.peer.settings({SettingCodes.INITIAL_WINDOW_SIZE: 100})
        await exchange.complete.wait()
        await exchange.respond(bytes(exchange.body))

    settings = {SettingCodes.INITIAL_WINDOW_SIZE: 10}
    async with session(handler, settings=settings, grant_windows=False) as (client, _):
        assert (await client.post("/", content=b"z" * 100)).content == b"z" * 100


async def test_write_timeout_ends_its_own_stream_only() -> None:
    """An upload that the server does not take fails; the neighbour goes on."""
    go = anyio.Event()

    async def handler(exchange: H2Exchange) -> None:
        if exchange.path == "/stuck":
            await anyio.sleep_forever()
        await exchange.start()
        await go.wait()
        await exchange.send(b"fine", end=True)

    settings = {SettingCodes.INITIAL_WINDOW_SIZE: 10}
    async with session(handler, settings=settings, grant_windows=False) as (client, server):
        async with client.stream("GET", "/") as neighbour:
            with pytest.raises(httpx2.WriteTimeout):
                timeout = httpx2.Timeout(30, write=0.05)
                await client.post("/stuck", content=b"x" * 100, timeout=timeout)
            go.set()
            assert await neighbour.aread() == b"fine"
        assert len(server.peers) == 1


async def test_an_early_answer_ends_the_upload() -> None:
    """A complete response to a request that is still being sent is delivered."""

    async def handler(exchange: H2Exchange) -> None:
        await exchange.respond(b"too large", 413)

    settings = {SettingCodes.INITIAL_WINDOW_SIZE: 10}
    async with session(handler, settings=settings, grant_windows=False) as (client, server):
        response = await client.post("/", content=b"x" * 1000)
        assert (response.status_code, response.text) == (413, "too large")
        assert (await client.get("/")).status_code == 413
        assert server.peers[0].exchanges[1].reset_code == ErrorCodes.CANCEL


async def test_streamed_request_body_with_unknown_length() -> None:
    """A generator's chunks are sent as they come."""

    async def body() -> AsyncIterator[bytes]:
        yield b"a"
        yield b""
        yield b"b"

    async with session(echo) as (client, _):
        assert (await client.post("/", content=body())).content == b"ab"


async def test_a_request_body_that_raises_resets_its_stream() -> None:
    """The error is the caller's own; the server learns that the request is off."""

    async def body() -> AsyncIterator[bytes]:
        yield b"a"
        raise RuntimeError("mine")

    async with session(echo) as (client, server):
        with pytest.raises(RuntimeError, match="mine"):
            await client.post("/", content=body())
        exchange = await nth_exchange(server, 1)
        await exchange.ended.wait()
        assert exchange.reset_code == ErrorCodes.CANCEL


@pytest.mark.parametrize("length", [3, 5])
async def test_request_body_must_match_its_content_length(length: int) -> None:
    """A body that is too short or too long is the caller's error."""

    async def body() -> AsyncIterator[bytes]:
        yield b"four"

    async with session(echo) as (client, _):
        with pytest.raises(httpx2.LocalProtocolError, match="content-length"):
            await client.post("/", content=body(), headers={"Content-Length": str(length)})


@pytest.mark.parametrize("header", [("x-a", "b\r\nc: d"), ("x a", "b"), ("x:a", "b")])
async def test_header_injection_is_refused(header: tuple[str, str]) -> None:
    """Line breaks in values and odd names never reach the wire."""
    async with session(echo) as (client, server):
        with pytest.raises(httpx2.LocalProtocolError):
            await client.get("/", headers=[header])
        assert not any(peer.exchanges for peer in server.peers)
        assert (await client.get("/")).status_code == 200


async def test_informational_responses_and_trailers() -> None:
    """1xx responses are passed over; trailers are there once the body has been read."""

    async def handler(exchange: H2Exchange) -> None:
        await exchange.start(100)
        await exchange.start(103, [(b"link", b"</style>")])
        await exchange.start(200)
        await exchange.send(b"body")
        await exchange.trailers([(b"grpc-status", b"0")])

    async with session(handler) as (client, _), client.stream("GET", "/") as response:
        assert response.status_code == 200
        assert await response.aread() == b"body"
        assert response.extensions["trailers"] == [(b"grpc-status", b"0")]


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 304), ("GET", 204)])
async def test_responses_without_a_body(method: str, status: int) -> None:
    """A content-length that describes no body here is no error."""

    async def handler(exchange: H2Exchange) -> None:
        await exchange.start(status, [(b"content-length", b"99")], end=True)

    async with session(handler) as (client, _):
        response = await client.request(method, "/")
        assert (response.status_code, response.content) == (status, b"")


async def test_what_came_before_a_reset_is_delivered() -> None:
    """The bytes first, then the error."""

    async def handler(exchange: H2Exchange) -> None:
        await exchange.start()
        await exchange.send(b"partial")
        await exchange.abort(ErrorCodes.INTERNAL_ERROR)

    async with session(handler) as (client, _), client.stream("GET", "/") as response:
        chunks = []
        with pytest.raises(httpx2.RemoteProtocolError, match="INTERNAL_ERROR"):
            async with aclosing(response.aiter_raw()) as parts:
                async for part in parts:
                    chunks.append(part)  # noqa: PERF401 - what came before the error counts
        assert b"".join(chunks) == b"partial"


@pytest.mark.parametrize("body", [b"four", b"fourteen bytes"])
async def test_a_response_must_match_its_content_length(body: bytes) -> None:
    """A truncated or overlong body is an error, not a short text."""

    async def handler(exchange: H2Exchange) -> None:
        await exchange.start(200, [(b"content-length", b"5")])
        await exchange.send(body, end=True)
        await exchange.ended.wait()

    async with session(handler) as (client, _):
        with pytest.raises(httpx2.RemoteProtocolError, match="content-length"):
            await client.get("/")


@pytest.mark.parametrize("when", ["headers", "body"])
async def test_read_timeout(when: str) -> None:
    """Silence before the headers or in the body fails the request and resets its stream."""

    async def handler(exchange: H2Exchange) -> None:
        if when == "body":
            await exchange.start()
            await exchange.send(b"x")
        await anyio.sleep_forever()

    async with session(handler) as (client, server):
        with pytest.raises(httpx2.ReadTimeout):
            await client.get("/", timeout=httpx2.Timeout(30, read=0.05))
        exchange = server.peers[0].exchanges[1]
        await exchange.ended.wait()
        assert exchange.reset_code == ErrorCodes.CANCEL


async def test_a_read_timeout_is_for_one_silence_not_for_the_whole() -> None:
    """A stream that trickles for longer than its read timeout lives: totals are for the caller."""

    async def handler(exchange: H2Exchange) -> None:
        await exchange.start()
        for _ in range(10):
            await exchange.send(b".")
            await anyio.sleep(0.03)
        await exchange.send(b"!", end=True)

    async with session(handler) as (client, _):
        response = await client.get("/", timeout=httpx2.Timeout(30, read=0.25))
        assert response.text == "..........!"


async def test_a_response_that_is_dropped_gives_its_slot_back() -> None:
    """Neither read nor closed, only forgotten: the third stream on two slots does not hang."""

    async def handler(exchange: H2Exchange) -> None:
        await exchange.start()
        await anyio.sleep_forever()

    config = HTTP2Config(max_lanes=1, max_streams_per_lane=2)
    async with session(handler, config=config) as (client, server):
        for number in range(6):
            response = await client.send(client.build_request("GET", "/"), stream=True)
            exchange = server.peers[0].exchanges[2 * number + 1]
            del response
            gc.collect()
            await exchange.ended.wait()


async def test_breaking_out_of_an_iteration_ends_the_stream() -> None:
    """The iterator's end is the stream's end, also while the response object lives on."""

    async def handler(exchange: H2Exchange) -> None:
        await exchange.start()
        await exchange.send(b"x")
        await anyio.sleep_forever()

    async with session(handler) as (client, server):
        response = await client.send(client.build_request("GET", "/"), stream=True)
        stream = response.stream
        assert isinstance(stream, httpx2.AsyncByteStream)
        async with aclosing(aiter(stream)) as chunks:  # type: ignore[type-var]
            await anext(chunks)
        await server.peers[0].exchanges[1].ended.wait()
        await checkpoint()
