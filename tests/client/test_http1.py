"""The HTTP/1.1 transport over a real server: reuse, replay, limits on time, hostile peers."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import anyio
import anyio.lowlevel
import httpx2
import pytest
from anyio.streams.tls import TLSAttribute, TLSListener

from fullbore.testing import FaultServer, Reply, Visit, hang_up, hold, pieces, reset, status
from fullbore.transport._h1_connection import HIGH_WATER
from fullbore.transport.http1 import HTTP1Transport

pytestmark = pytest.mark.anyio

TEXT = {"content-type": "text/plain"}


@asynccontextmanager
async def opened(
    *replies: Reply, idle_expiry: float = 60.0, timeout: float | None = None
) -> AsyncIterator[tuple[httpx2.AsyncClient, HTTP1Transport, FaultServer]]:
    """Open a server with these replies, and a client on the transport."""
    transport = HTTP1Transport(idle_expiry=idle_expiry)
    async with (
        FaultServer(*replies) as server,
        httpx2.AsyncClient(transport=transport, base_url=server.url, timeout=timeout) as client,
    ):
        yield client, transport, server


def text(*data: bytes | str) -> Reply:
    """Answer with these pieces."""
    return pieces(*data, headers=TEXT)


def raw(data: bytes) -> Reply:
    """Answer with these bytes and close."""

    async def reply(visit: Visit) -> None:
        await visit.send_raw(data)
        await visit.hang_up()

    return reply


async def test_one_connection_serves_one_request_after_another() -> None:
    """Requests that do not overlap share it; a POST's body arrives whole."""
    async with opened(text("one", "two")) as (client, transport, server):
        for _ in range(5):
            response = await client.post("/x?a=b", content=b"body", headers={"X-A": "1"})
            assert response.text == "onetwo"
        assert server.connections == transport.connections == 1
    assert server.requests[-1].path == "/v1/x?a=b"
    assert server.requests[-1].body == b"body"
    assert server.requests[-1].headers["x-a"] == "1"
    assert response.http_version == "HTTP/1.1"


async def test_requests_at_once_have_a_connection_each() -> None:
    """And no limit but the caller's."""
    everyone = anyio.Event()
    async with opened(hold(everyone, text("x"))) as (client, transport, server):
        async with anyio.create_task_group() as group:
            for _ in range(120):
                group.start_soon(client.get, "/")
            await server.until(lambda: server.in_progress == 120)
            everyone.set()
        assert server.connections == transport.connections == 120
        await client.get("/")
        assert server.connections == 120


async def test_a_body_without_a_length_is_sent_in_chunks() -> None:
    """The server puts it together again."""

    async def body() -> AsyncIterator[bytes]:
        yield b"one"
        yield b""
        yield b"two" * 50_000

    async with opened(text("x")) as (client, _, server):
        await client.post("/", content=body())
        await client.post("/", content=body())
        assert server.requests[0].body == server.requests[1].body == b"one" + b"two" * 50_000
        assert server.connections == 1


async def test_a_body_of_another_length_than_it_says_is_refused() -> None:
    """And the connection is not used again: the server still waits for the rest."""

    async def body() -> AsyncIterator[bytes]:
        yield b"123"

    async with opened(text("x")) as (client, transport, _):
        for length in ("5", "2"):
            with pytest.raises(httpx2.LocalProtocolError, match="content-length"):
                await client.post("/", content=body(), headers={"Content-Length": length})
            assert transport.connections == 0


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\0"], ids=repr)
async def test_a_header_cannot_carry_another(value: str) -> None:
    """No request is sent."""
    async with opened(text("x")) as (client, _, server):
        with pytest.raises(httpx2.LocalProtocolError, match="forbids"):
            await client.get("/", headers={"X-A": value})
        assert not server.requests


async def test_a_response_read_half_way_closes_its_connection() -> None:
    """The server notices at once; the next request has a connection of its own."""
    async with opened(pieces("one", then="hold", headers=TEXT), text("x")) as (client, _, server):
        async with client.stream("GET", "/") as response, aclosing(response.aiter_bytes()) as body:
            assert await anext(body) == b"one"
        await server.until(lambda: server.open_connections == 0)
        assert (await client.get("/")).text == "x"


async def test_a_response_that_is_dropped_closes_its_connection() -> None:
    """Neither read nor closed, only forgotten."""
    async with opened(pieces("one", then="hold", headers=TEXT)) as (client, transport, server):
        response = await transport.handle_async_request(client.build_request("GET", "/"))
        assert transport.connections == 1
        del response
        gc.collect()
        await server.until(lambda: server.open_connections == 0)
        assert transport.connections == 0


async def test_a_cancelled_request_closes_its_connection() -> None:
    """Wherever it was."""
    async with opened(hold()) as (client, transport, server):
        async with anyio.create_task_group() as group:
            group.start_soon(client.get, "/")
            await server.until(lambda: server.in_progress == 1)
            group.cancel_scope.cancel()
        assert transport.connections == 0
        await server.until(lambda: server.open_connections == 0)


@pytest.mark.parametrize("fault", [hang_up(), reset()], ids=["closed", "reset"])
async def test_an_idle_connection_that_goes_under_a_get_is_replaced(fault: Reply) -> None:
    """Once, because a GET may be sent twice."""
    async with opened(text("one"), fault, text("two")) as (client, _, server):
        assert (await client.get("/")).text == "one"
        assert (await client.get("/")).text == "two"
    assert len(server.requests) == 3


async def test_only_one_replay() -> None:
    """The second failure is the caller's."""
    async with opened(text("one"), hang_up()) as (client, _, server):
        await client.get("/")
        with pytest.raises(httpx2.RemoteProtocolError, match="without a response"):
            await client.get("/")
    assert len(server.requests) == 3


async def test_a_post_that_may_have_been_acted_on_is_not_sent_twice() -> None:
    """That is for whoever pays to decide."""
    async with opened(text("one"), hang_up(), text("two")) as (client, _, server):
        await client.post("/", content=b"x")
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.post("/", content=b"x")
    assert len(server.requests) == 2


async def test_a_get_that_was_answered_in_part_is_not_sent_twice() -> None:
    """Half an answer is an answer."""
    async with opened(text("one"), raw(b"HTTP/1.1 2"), text("two")) as (client, _, server):
        await client.get("/")
        with pytest.raises(httpx2.RemoteProtocolError, match="a part of the response's head"):
            await client.get("/")
    assert len(server.requests) == 2


async def test_an_idle_connection_the_server_has_closed_is_not_used() -> None:
    """Not even tried: a POST goes through."""

    async def answer_and_close(visit: Visit) -> None:
        await text("one")(visit)
        await visit.hang_up()

    async with opened(answer_and_close, text("two")) as (client, _, server):
        await client.post("/")
        await server.until(lambda: server.open_connections == 0)
        await anyio.sleep(0.05)  # the news of it is on its way through the kernel
        assert (await client.post("/")).text == "two"
    assert len(server.requests) == 2


async def test_idle_connections_expire() -> None:
    """Before the server closes them."""
    async with opened(text("x"), idle_expiry=0.0) as (client, transport, server):
        await client.get("/")
        await anyio.sleep(0.01)
        await client.get("/")
        assert server.connections == 2
        assert transport.connections == 1


async def test_a_server_that_says_close_is_obeyed() -> None:
    """Its connection is not used again."""
    async with opened(status(200, b"x", headers={"connection": "close"})) as (client, _, server):
        await client.get("/")
        await client.get("/")
        assert server.connections == 2


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello",
    ],
    ids=["smuggling", "another protocol", "a bad chunk", "cut short"],
)
async def test_what_is_no_response_is_an_error(data: bytes) -> None:
    """Of the kind httpx2 raises, and the connection is gone."""
    async with opened(raw(data)) as (client, transport, _):
        with pytest.raises(httpx2.RemoteProtocolError, match="The server sent"):
            await client.post("/", content=b"x")
        assert transport.connections == 0


async def test_bytes_nobody_asked_for_end_an_idle_connection() -> None:
    """They must not be taken for the answer to the next request."""

    async def too_much(visit: Visit) -> None:
        await text("one")(visit)
        await visit.send_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")

    async with opened(too_much, text("two")) as (client, _, server):
        assert (await client.post("/")).text == "one"
        await anyio.sleep(0.05)
        assert (await client.post("/")).text == "two"
        assert server.connections == 2


async def test_an_answer_before_the_whole_request_is_heard() -> None:
    """A server that refuses a large body says so and closes."""

    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65_536
            await anyio.lowlevel.checkpoint()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)

        async def serve(stream: anyio.abc.SocketStream) -> None:
            async with stream:
                await stream.receive()
                await stream.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
                await stream.send_eof()
                with anyio.move_on_after(0.2):
                    while True:
                        await stream.receive()

        async with anyio.create_task_group() as group:
            group.start_soon(listener.serve, serve)
            async with httpx2.AsyncClient(transport=HTTP1Transport(), timeout=20) as client:
                url = f"http://127.0.0.1:{port}/"
                response = await client.post(url, content=body())
                assert (response.status_code, response.text) == (413, "big")
            group.cancel_scope.cancel()


async def test_informational_responses_and_trailers() -> None:
    """The first are skipped, the last handed over."""
    data = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n"
    )
    async with opened(raw(data)) as (client, _, _):
        response = await client.get("/")
        assert response.text == "ok"
        assert response.extensions["trailers"] == [(b"X-Sum", b"1")]


@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_bodiless_responses(method: str) -> None:
    """Their connections are used again."""
    code = 200 if method == "HEAD" else 204
    data = b"HTTP/1.1 %d X\r\n%b\r\n" % (code, b"Content-Length: 9\r\n" if code == 200 else b"")

    async def reply(visit: Visit) -> None:
        await visit.send_raw(data)
        await visit.until_left()

    async with opened(reply) as (client, transport, _):
        response = await client.request(method, "/")
        assert (response.status_code, response.content) == (code, b"")
        assert transport.connections == 1


@pytest.mark.parametrize(
    ("reply", "timeout", "kind"),
    [
        (hold(), httpx2.Timeout(None, read=0.05), httpx2.ReadTimeout),
        (
            pieces("x", then="hold", headers=TEXT),
            httpx2.Timeout(None, read=0.05),
            httpx2.ReadTimeout,
        ),
    ],
    ids=["no answer", "half an answer"],
)
async def test_timeouts_are_httpx2s(
    reply: Reply, timeout: httpx2.Timeout, kind: type[httpx2.TimeoutException]
) -> None:
    """Per wait, and the connection is closed."""
    async with opened(reply) as (client, transport, _):
        with pytest.raises(kind, match=r"0\.05 s"):
            await client.get("/", timeout=timeout)
        assert transport.connections == 0


async def test_a_server_that_takes_nothing_is_a_write_timeout() -> None:
    """Nobody accepts the connection: the kernel's buffers are full and stay so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with httpx2.AsyncClient(transport=HTTP1Transport()) as client:
            with pytest.raises(httpx2.WriteTimeout):
                await client.post(
                    f"http://127.0.0.1:{port}/",
                    content=b"x" * 64_000_000,
                    timeout=httpx2.Timeout(None, write=0.1),
                )


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "not trusted"])
async def test_tls(
    trusted: bool, server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> None:
    """The certificate is checked against the given authority, and HTTP/1.1 alone is offered."""
    server_context.set_alpn_protocols(["h2", "http/1.1"])
    spoken: list[object] = []

    async def serve(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            spoken.append(stream.extra(TLSAttribute.alpn_protocol))
            for _ in range(2):
                await stream.receive()
                await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    plain = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = plain.extra(anyio.abc.SocketAttribute.local_port)
    listener = TLSListener(plain, server_context, standard_compatible=False)
    verify = client_context if trusted else ssl.create_default_context()
    async with anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        async with httpx2.AsyncClient(transport=HTTP1Transport(verify=verify)) as client:
            url = f"https://127.0.0.1:{port}/"
            if trusted:
                assert (await client.get(url)).text == "ok"
                assert (await client.get(url)).text == "ok"
                assert spoken == ["http/1.1"]
            else:
                with pytest.raises(httpx2.ConnectError, match="certificate"):
                    await client.get(url)
        group.cancel_scope.cancel()
    await listener.aclose()


async def test_nobody_listens() -> None:
    """The error says where."""
    async with httpx2.AsyncClient(transport=HTTP1Transport()) as client:
        with pytest.raises(httpx2.ConnectError, match=r"127\.0\.0\.1:9"):
            await client.get("http://127.0.0.1:9/")
        with pytest.raises(httpx2.UnsupportedProtocol, match="ftp"):
            await client.get("ftp://127.0.0.1/")


async def test_a_reader_that_is_away_stops_the_server() -> None:
    """At a stated number of bytes in this process, whatever the server would send."""
    sent = 0

    async def flood(visit: Visit) -> None:
        nonlocal sent
        await visit.start(200, TEXT)
        while True:
            await visit.send(b"x" * 16_384)
            sent += 16_384

    async with opened(flood) as (client, transport, server):
        async with client.stream("GET", "/") as response:
            stuck = -1
            while stuck != sent:
                stuck = sent
                await anyio.sleep(0.1)
            (connection,) = transport._busy
            assert connection._parser is not None
            assert len(connection._parser.body) <= HIGH_WATER + 262_144
            async with aclosing(response.aiter_bytes()) as body:
                while sent < stuck + 1_000_000:  # it goes on where it stopped
                    await anext(body)
        await server.until(lambda: server.open_connections == 0)


async def test_close_ends_what_is_under_way() -> None:
    """With an error that says so, not a hang."""
    async with opened(hold()) as (client, transport, server):
        failures = []

        async def ask() -> None:
            try:
                await client.get("/")
            except httpx2.TransportError as error:
                failures.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await server.until(lambda: server.in_progress == 1)
            await transport.aclose()
        assert len(failures) == 1
        with pytest.raises(RuntimeError, match="closed"):
            await transport.handle_async_request(client.build_request("GET", "/"))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_use_from_two_event_loops_is_refused() -> None:
    """With the reason."""
    async with opened(text("x")) as (client, transport, _):
        await client.get("/")

        async def use() -> None:
            with pytest.raises(RuntimeError, match="another event loop"):
                await transport.handle_async_request(client.build_request("GET", "/"))

        await asyncio.to_thread(asyncio.run, use())
