"""What a hostile or broken server may send, and that it costs one request or one connection.

After each case the same transport serves a request again: no state is poisoned.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable

import anyio
import hpack
import httpx2
import pytest
from h2.errors import ErrorCodes

from fullbore._h2_server import H2Exchange, H2Peer, ScriptedH2Server, frame
from fullbore.transport.http2 import HTTP2Config, HTTP2Transport

pytestmark = pytest.mark.anyio

DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
OK_HEADERS = hpack.Encoder().encode([(b":status", b"200")])


def head(*fields: tuple[bytes, bytes], flags: int = 0x4) -> bytes:
    """A HEADERS frame on stream 1."""
    return frame(HEADERS, flags, 1, hpack.Encoder().encode([(b":status", b"200"), *fields]))


BREAKS_THE_CONNECTION = {
    "overlong frame": frame(DATA, 0, 1, b"x" * 16_385),
    "data on an idle stream": frame(DATA, 0, 7, b"x"),
    "data on a server stream": frame(DATA, 0, 2, b"x"),
    "headers on an idle stream": frame(HEADERS, 0x4, 7, OK_HEADERS),
    "headers on a server stream": frame(HEADERS, 0x4, 2, OK_HEADERS),
    "headers on stream 0": frame(HEADERS, 0x4, 0, OK_HEADERS),
    "push": frame(PUSH, 0x4, 1, struct.pack(">I", 2) + OK_HEADERS),
    "reset on an idle stream": frame(RST, 0, 9, b"\0\0\0\0"),
    "reset on stream 0": frame(RST, 0, 0, b"\0\0\0\0"),
    "short reset": frame(RST, 0, 1, b"\0\0\0"),
    "window of nothing": frame(WINDOW, 0, 0, b"\0\0\0\0"),
    "window above 2^31 - 1": frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff") * 2,
    "window on an idle stream": frame(WINDOW, 0, 9, b"\0\0\0\1"),
    "settings with a stream": frame(SETTINGS, 0, 1),
    "settings of odd length": frame(SETTINGS, 0, 0, b"12345"),
    "settings out of range": frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31)),
    "frame size out of range": frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 16_383)),
    "settings that push": frame(SETTINGS, 0, 0, struct.pack(">HI", 2, 1)),
    "settings' answer with settings": frame(SETTINGS, 1, 0, struct.pack(">HI", 3, 1)),
    "a window that settings widen too far": frame(WINDOW, 0, 1, b"\x7f\xff\x00\x00")
    + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31 - 1)),
    "short ping": frame(PING, 0, 0, b"123"),
    "short goaway": frame(GOAWAY, 0, 0, b"123"),
    "goaway on a stream": frame(GOAWAY, 0, 1, b"12345678"),
    "padding longer than its frame": head() + frame(DATA, 0x8, 1, b"\x05abc"),
    "continuation of nothing": frame(CONTINUATION, 0x4, 1, OK_HEADERS),
    "data inside a header block": head(flags=0) + frame(DATA, 0, 1, b"x"),
    "ping inside a header block": head(flags=0) + frame(PING, 0, 0, b"12345678"),
    "unknown frame inside a header block": head(flags=0) + frame(0xEE, 0, 0, b"x"),
    "endless continuations": head(flags=0) + frame(CONTINUATION, 0, 1) * 200,
    "undecodable headers": frame(HEADERS, 0x4, 1, b"\xff\xff\xff\xff\xff\xff"),
    "header bomb": head((b"a", b"x" * 4000)) + frame(HEADERS, 0x4, 1, bytes([0x80 | 62]) * 100),
}

# On a stream that the client has reset.
BREAKS_THE_CONNECTION_LATE = {
    "header block interrupted": frame(HEADERS, 0, 1, OK_HEADERS) + frame(DATA, 0, 1, b"x"),
    "header block of another stream": frame(HEADERS, 0, 1, OK_HEADERS)
    + frame(CONTINUATION, 0x4, 3, OK_HEADERS),
    "undecodable headers": frame(HEADERS, 0x4, 1, b"\xff\xff\xff\xff\xff\xff"),
    "endless headers": frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1, b"\0" * 16_384) * 5,
    "padding longer than its frame": frame(HEADERS, 0xC, 1, b"\x05abc"),
}

BREAKS_THE_STREAM = {
    "data before headers": frame(DATA, 0, 1, b"x"),
    "more data than the stream's window": head() + frame(DATA, 0, 1, b"x" * 10_001),
    "status that is no number": frame(
        HEADERS, 0x4, 1, hpack.Encoder().encode([(b":status", b"2x0")])
    ),
    "endless informational responses": frame(
        HEADERS, 0x4, 1, hpack.Encoder().encode([(b":status", b"103")])
    )
    * 100,
    "more data than announced": head((b"content-length", b"1")) + frame(DATA, 1, 1, b"xx"),
    "less data than announced": head((b"content-length", b"3")) + frame(DATA, 1, 1, b"xx"),
    "no data although announced": head((b"content-length", b"3"), flags=0x5),
    "upper-case header name": head((b"X-Upper", b"1")),
    "header with a line break": head((b"x", b"a\r\nb: c")),
    "connection header": head((b"connection", b"close")),
    "no status": frame(HEADERS, 0x4, 1, hpack.Encoder().encode([(b"x", b"1")])),
    "contradictory content-lengths": head((b"content-length", b"1"), (b"content-length", b"2")),
    "second response headers": head() + head(),
    "content-length that is no number": head((b"content-length", b"-1")),
    "content-length of 5,000 digits": head((b"content-length", b"9" * 5_000)),
    "status after a field": frame(
        HEADERS, 0x4, 1, hpack.Encoder().encode([(b"x", b"1"), (b":status", b"200")])
    ),
    "two statuses": head((b":status", b"200")),
    "a request's pseudo-header": head((b":path", b"/")),
    "a blank before a value": head((b"x", b" 1")),
    "an empty header name": head((b"", b"1")),
    "switching protocols": frame(HEADERS, 0x4, 1, hpack.Encoder().encode([(b":status", b"101")])),
    "informational response as the end": frame(
        HEADERS, 0x5, 1, hpack.Encoder().encode([(b":status", b"103")])
    ),
    "status in trailers": head() + head(flags=0x5),
    "stream window of nothing": frame(WINDOW, 0, 1, b"\0\0\0\0"),
    "stream window above 2^31 - 1": frame(WINDOW, 0, 1, b"\x7f\xff\xff\xff"),
}

HARMLESS = {
    "unknown frames": frame(0xEE, 0xFF, 5, b"x" * 100),
    "priority": frame(PRIORITY, 0, 1, b"\0\0\0\3\1"),
    "settings and their answer": frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0),
    "ping answer nobody asked for": frame(PING, 1, 0, b"12345678"),
    "empty data": head() + frame(DATA, 0, 1) * 1000,
}


async def outcome(
    script: bytes | Callable[[H2Exchange], Awaitable[None]], read_timeout: float | None = 0.5
) -> tuple[str, int]:
    """Send a script in answer to the first request; return how that one ended and how many
    connections the second needed in all."""

    async def handler(exchange: H2Exchange) -> None:
        if exchange.peer is server.peers[0] and exchange.stream_id == 1:
            if isinstance(script, bytes):
                await exchange.peer.raw(script)
            else:
                await script(exchange)
            await anyio.sleep_forever()
        await exchange.respond(b"ok")

    server = ScriptedH2Server(handler)
    config = HTTP2Config(stream_window=10_000)
    transport = HTTP2Transport(prior_knowledge=True, config=config)
    with anyio.fail_after(30):
        async with server, httpx2.AsyncClient(transport=transport, base_url=server.url) as client:
            try:
                await client.post("/", timeout=httpx2.Timeout(20, read=read_timeout))
                result = "served"
            except httpx2.TransportError as error:
                result = type(error).__name__
            assert (await client.get("/")).text == "ok"
            (pool,) = transport._pools.values()
            assert all(lane.reserved == 0 for lane in pool.lanes)
            return result, len(server.peers)


@pytest.mark.parametrize("script", BREAKS_THE_CONNECTION.values(), ids=BREAKS_THE_CONNECTION)
async def test_a_broken_connection_is_given_up(script: bytes) -> None:
    """The request fails as a protocol error; the next one gets a new connection."""
    assert await outcome(script) == ("RemoteProtocolError", 2)


@pytest.mark.parametrize("script", BREAKS_THE_STREAM.values(), ids=BREAKS_THE_STREAM)
async def test_a_broken_stream_is_given_up_alone(script: bytes) -> None:
    """The request fails as a protocol error; the connection serves the next one."""
    assert await outcome(script) == ("RemoteProtocolError", 1)


@pytest.mark.parametrize("script", HARMLESS.values(), ids=HARMLESS)
async def test_what_means_nothing_is_passed_over(script: bytes) -> None:
    """Frames without meaning here leave the request waiting, and the connection in use."""
    assert await outcome(script) == ("ReadTimeout", 1)


async def test_a_server_that_makes_us_answer_and_does_not_read() -> None:
    """A flood of PINGs whose answers are not taken ends the connection, not our memory."""

    async def flood(exchange: H2Exchange) -> None:
        exchange.peer.stop_reading()
        while True:
            await exchange.peer.raw(frame(PING, 0, 0, b"12345678") * 20_000)

    result, connections = await outcome(flood, read_timeout=None)
    assert result in ("WriteError", "ReadError", "RemoteProtocolError")
    assert connections == 2


async def test_frames_for_streams_that_are_over_are_passed_over() -> None:
    """Late frames cross a reset all the time: data is credited, the rest ignored."""

    async def handler(exchange: H2Exchange) -> None:
        if exchange.stream_id > 1:
            late = frame(DATA, 0, 1, b"x" * 16_384) * 4 + frame(WINDOW, 0, 1, b"\0\0\0\1")
            late += frame(HEADERS, 0x4, 1, hpack.Encoder().encode([(b":status", b"103")]))
            late += frame(HEADERS, 0x28, 1, b"\x02\0\0\0\0\0" + OK_HEADERS + b"\0\0")
            late += frame(CONTINUATION, 0x4, 1, b"") + frame(RST, 0, 1, b"\0\0\0\x08")
            await exchange.peer.raw(late)
            await exchange.respond(b"ok")
        else:
            await exchange.ended.wait()

    async with ScriptedH2Server(handler) as server:
        transport = HTTP2Transport(prior_knowledge=True)
        async with httpx2.AsyncClient(transport=transport, base_url=server.url) as client:
            with pytest.raises(httpx2.ReadTimeout):
                await client.get("/", timeout=httpx2.Timeout(20, read=0.02))
            for _ in range(100):
                assert (await client.get("/")).text == "ok"
            assert len(server.peers) == 1


@pytest.mark.parametrize(
    "script", BREAKS_THE_CONNECTION_LATE.values(), ids=BREAKS_THE_CONNECTION_LATE
)
async def test_a_broken_header_block_counts_on_streams_that_are_over(script: bytes) -> None:
    """The compression state is the connection's: without it nothing more can be read."""

    async def handler(exchange: H2Exchange) -> None:
        if exchange.peer is server.peers[0]:
            await exchange.ended.wait() if exchange.stream_id == 1 else None
            await exchange.peer.raw(script)
            await anyio.sleep_forever()
        await exchange.respond(b"ok")

    async with ScriptedH2Server(handler) as server:
        transport = HTTP2Transport(prior_knowledge=True)
        async with httpx2.AsyncClient(transport=transport, base_url=server.url) as client:
            with pytest.raises(httpx2.ReadTimeout):
                await client.get("/", timeout=httpx2.Timeout(20, read=0.02))
            with pytest.raises(httpx2.RemoteProtocolError, match="broke the HTTP/2 protocol"):
                await client.post("/")
            assert (await client.get("/")).text == "ok"


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9\r\n"])
async def test_a_server_that_does_not_speak_http2(answer: bytes) -> None:
    """Prior knowledge that is wrong is named as such, with what the server said."""

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(answer)
            await stream.receive()

    async with anyio.create_task_group() as tasks:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with httpx2.AsyncClient(transport=HTTP2Transport(prior_knowledge=True)) as client:
            with pytest.raises(httpx2.RemoteProtocolError, match="does not speak HTTP/2") as error:
                await client.get(f"http://127.0.0.1:{port}/")
            assert repr(answer[:9])[2:-1] in str(error.value)
        tasks.cancel_scope.cancel()
    await listener.aclose()


async def test_a_server_that_closes_every_connection_is_not_hammered() -> None:
    """Connections that never carry a response are errors, not a loop."""

    async def on_connect(peer: H2Peer) -> None:
        await peer.raw(frame(SETTINGS, 0, 0))
        await peer.goaway_above(0, ErrorCodes.ENHANCE_YOUR_CALM)

    async def silent(exchange: H2Exchange) -> None:
        await anyio.sleep_forever()

    async with ScriptedH2Server(silent, on_connect=on_connect) as server:
        transport = HTTP2Transport(prior_knowledge=True)
        async with httpx2.AsyncClient(transport=transport, base_url=server.url) as client:
            with pytest.raises(httpx2.TransportError):
                await client.get("/")
        assert len(server.peers) < 5
