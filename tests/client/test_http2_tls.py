"""TLS, ALPN, HTTP/1.1 fallback and proxies of the HTTP/2 transport, over real sockets."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import httpx2
import pytest
from anyio.streams.tls import TLSListener

from fullbore._h2_server import H2Exchange, ScriptedH2Server
from fullbore.transport.http2 import HTTP2Transport

pytestmark = pytest.mark.anyio


async def ok(exchange: H2Exchange) -> None:
    await exchange.respond(b"ok")


@asynccontextmanager
async def http1_server(
    answer: Callable[[bytes, anyio.abc.ByteStream], Awaitable[None]],
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """A server that reads one request head a connection and hands it over; yields its port."""

    async def serve(stream: anyio.abc.ByteStream) -> None:
        head = b""
        async with stream:
            while b"\r\n\r\n" not in head:
                try:
                    head += await stream.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    return
            await answer(head, stream)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    wrapped = listener if tls is None else TLSListener(listener, tls, standard_compatible=False)
    async with wrapped, anyio.create_task_group() as tasks:
        tasks.start_soon(wrapped.serve, serve)
        yield port
        tasks.cancel_scope.cancel()


async def test_http2_by_alpn(
    server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> None:
    """A server that offers h2 is spoken to in HTTP/2, with the user's own CA."""
    server_context.set_alpn_protocols(["h2", "http/1.1"])
    async with ScriptedH2Server(ok, tls=server_context) as server:
        transport = HTTP2Transport(verify=client_context)
        async with httpx2.AsyncClient(transport=transport, base_url=server.url) as client:
            for _ in range(3):
                response = await client.get("/")
                assert (response.text, response.http_version) == ("ok", "HTTP/2")
        assert len(server.peers) == 1


async def test_large_bodies_over_tls(
    server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> None:
    """Reader and writer share a TLS session, in both directions at once."""

    async def echo(exchange: H2Exchange) -> None:
        await exchange.complete.wait()
        await exchange.respond(bytes(exchange.body))

    server_context.set_alpn_protocols(["h2"])
    body = bytes(range(256)) * 4096
    async with ScriptedH2Server(echo, tls=server_context) as server:
        transport = HTTP2Transport(verify=client_context)
        async with httpx2.AsyncClient(
            transport=transport, base_url=server.url, timeout=60
        ) as client:

            async def post() -> None:
                assert (await client.post("/", content=body)).content == body

            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(post)


@pytest.mark.parametrize("alpn", [["http/1.1"], []], ids=["http/1.1", "none"])
async def test_fallback_to_http1_is_remembered(
    alpn: list[str], server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> None:
    """A server without h2 is served by httpx2's pool, after one handshake that found out."""
    if alpn:
        server_context.set_alpn_protocols(alpn)
    requests: list[bytes] = []

    async def answer(head: bytes, stream: anyio.abc.ByteStream) -> None:
        requests.append(head.split(b"\r\n")[0])
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    async with http1_server(answer, server_context) as port:
        transport = HTTP2Transport(verify=client_context)
        async with httpx2.AsyncClient(transport=transport) as client:
            for _ in range(3):
                response = await client.post(f"https://127.0.0.1:{port}/", json={})
                assert (response.text, response.http_version) == ("ok", "HTTP/1.1")
            (pool,) = transport._pools.values()
            assert pool.not_http2
            assert pool.lanes == ()
    assert requests == [b"POST / HTTP/1.1"] * 3


async def test_untrusted_certificate(server_context: ssl.SSLContext) -> None:
    """A certificate that nobody vouches for fails the connection, and says why."""
    server_context.set_alpn_protocols(["h2"])
    async with (
        http1_server(nothing, server_context) as port,
        httpx2.AsyncClient(transport=HTTP2Transport()) as client,
    ):
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.get(f"https://127.0.0.1:{port}/")


async def nothing(head: bytes, stream: anyio.abc.ByteStream) -> None:
    raise AssertionError(head)


async def test_verify_false(server_context: ssl.SSLContext) -> None:
    """`verify=False` takes any certificate, as in httpx2."""
    server_context.set_alpn_protocols(["h2"])
    async with ScriptedH2Server(ok, tls=server_context) as server:
        transport = HTTP2Transport(verify=False)
        async with httpx2.AsyncClient(transport=transport, base_url=server.url) as client:
            assert (await client.get("/")).http_version == "HTTP/2"


async def test_cleartext_without_prior_knowledge_is_http1() -> None:
    """`http` URLs go to httpx2's pool unless the user says that the server speaks HTTP/2."""

    async def answer(head: bytes, stream: anyio.abc.ByteStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    async with (
        http1_server(answer) as port,
        httpx2.AsyncClient(transport=HTTP2Transport()) as client,
    ):
        assert (await client.get(f"http://127.0.0.1:{port}/")).http_version == "HTTP/1.1"


async def test_other_schemes_are_refused() -> None:
    """Neither http nor https: no guess is made."""
    async with HTTP2Transport() as transport:
        with pytest.raises(httpx2.UnsupportedProtocol):
            await transport.handle_async_request(httpx2.Request("GET", "ftp://localhost/"))


async def relay(head: bytes, stream: anyio.abc.ByteStream) -> None:
    """What a CONNECT proxy does."""
    target = head.split(b" ")[1].decode()
    host, port = target.rsplit(":", 1)
    async with await anyio.connect_tcp(host, int(port)) as upstream:
        await stream.send(b"HTTP/1.1 200 Connection established\r\n\r\n")

        async def copy(source: anyio.abc.ByteStream, sink: anyio.abc.ByteStream) -> None:
            try:
                async for data in source:
                    await sink.send(data)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(copy, stream, upstream)
            tasks.start_soon(copy, upstream, stream)


@pytest.mark.parametrize("proxy_tls", [False, True], ids=["http-proxy", "https-proxy"])
async def test_http2_through_a_proxy(
    proxy_tls: bool, server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> None:
    """An https origin is reached over HTTP/2 through a CONNECT tunnel, with credentials."""
    heads: list[bytes] = []

    async def proxy(head: bytes, stream: anyio.abc.ByteStream) -> None:
        heads.append(head)
        await relay(head, stream)

    server_context.set_alpn_protocols(["h2"])
    async with (
        ScriptedH2Server(ok, tls=server_context) as server,
        http1_server(proxy, server_context if proxy_tls else None) as port,
    ):
        scheme = "https" if proxy_tls else "http"
        transport = HTTP2Transport(
            verify=client_context,
            proxy=httpx2.Proxy(
                f"{scheme}://127.0.0.1:{port}",
                auth=("me", "secret"),
                ssl_context=client_context if proxy_tls else None,
            ),
        )
        async with httpx2.AsyncClient(transport=transport, base_url=server.url) as client:
            assert (await client.get("/")).http_version == "HTTP/2"
        (head,) = heads
        assert head.startswith(f"CONNECT {server.url.removeprefix('https://')} ".encode())
        assert b"proxy-authorization: Basic bWU6c2VjcmV0\r\n" in head


async def test_a_proxy_that_refuses() -> None:
    """The proxy's status is in the error; nothing was sent to the origin."""

    async def refuse(head: bytes, stream: anyio.abc.ByteStream) -> None:
        await stream.send(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")

    async with http1_server(refuse) as port:
        transport = HTTP2Transport(proxy=f"http://127.0.0.1:{port}")
        async with httpx2.AsyncClient(transport=transport) as client:
            with pytest.raises(httpx2.ProxyError, match="407"):
                await client.get("https://example.invalid/")


async def test_cleartext_through_a_proxy_is_left_to_httpx2() -> None:
    """A cleartext origin behind a proxy is asked for in HTTP/1.1, in absolute form."""

    async def answer(head: bytes, stream: anyio.abc.ByteStream) -> None:
        assert head.startswith(b"GET http://example.invalid/ HTTP/1.1\r\n")
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    async with http1_server(answer) as port:
        transport = HTTP2Transport(proxy=f"http://127.0.0.1:{port}", prior_knowledge=True)
        async with httpx2.AsyncClient(transport=transport) as client:
            assert (await client.get("http://example.invalid/")).text == "ok"
