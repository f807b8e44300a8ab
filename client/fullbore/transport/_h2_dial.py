"""From an origin to a byte stream that speaks HTTP/2: TCP, proxy tunnel, TLS with ALPN.

Owns the connecting of sockets and the naming of what can go wrong there. Knows nothing of frames,
pools or requests.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import ssl
from typing import NamedTuple

import anyio
import anyio.abc
import h11
import httpx2
from anyio.streams.tls import TLSAttribute, TLSStream

from ._asyncio_dial import connect
from ._asyncio_stream import AsyncioStream

_MAX_PROXY_HEADER = 65_536


class NotHTTP2(httpx2.ConnectError):
    """The server chose another protocol in the TLS handshake."""


class Origin(NamedTuple):
    """Where connections go: scheme, host and port, and the name TLS asks for."""

    scheme: str
    host: str
    port: int
    server_name: str


class _OrderedSends(anyio.abc.ByteStream):
    """A byte stream whose concurrent sends queue up instead of failing.

    A TLS session may have to answer while reading (a key update) at the moment the writer sends.
    """

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self._stream = stream
        self._lock = anyio.Lock(fast_acquire=True)

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        return await self._stream.receive(max_bytes)

    async def send(self, item: bytes) -> None:
        async with self._lock:
            await self._stream.send(item)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


async def dial(
    origin: Origin, ssl_context: ssl.SSLContext, proxy: httpx2.Proxy | None
) -> anyio.abc.ByteStream:
    """Open a connection on which HTTP/2 may start at once.

    `https` origins negotiate by ALPN, through a CONNECT tunnel if there is a proxy; `http` origins
    are taken to speak HTTP/2 without negotiation (prior knowledge, RFC 9113 section 3.3).

    Raises:
        NotHTTP2: The TLS handshake chose another protocol, or none.
        httpx2.ConnectError: Nobody listens, the name does not resolve, TLS failed, ...
        httpx2.ProxyError: The proxy refused the tunnel.
    """
    where = f"{origin.host}:{origin.port}"
    try:
        if proxy is None:
            stream = await _connect(origin.host, origin.port)
        else:
            stream = await _tunnel(proxy, origin)
        if origin.scheme == "http":
            return stream
        return await _start_tls(stream, ssl_context, origin.server_name, ["h2", "http/1.1"])
    except (OSError, ssl.SSLError) as error:
        raise httpx2.ConnectError(_explain(error, where)) from error
    except (anyio.BrokenResourceError, anyio.EndOfStream) as error:
        cause = error.__cause__ or error
        raise httpx2.ConnectError(f"{where} closed the connection at once: {cause!r}") from error


async def _connect(host: str, port: int) -> anyio.abc.ByteStream:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return await anyio.connect_tcp(host, port)
    return await connect(AsyncioStream, host, port)


async def _start_tls(
    stream: anyio.abc.ByteStream, context: ssl.SSLContext, server_name: str, protocols: list[str]
) -> anyio.abc.ByteStream:
    try:
        context.set_alpn_protocols(protocols)  # read when the session is made, right below
        tls = await TLSStream.wrap(
            _OrderedSends(stream),
            server_side=False,
            hostname=server_name,
            ssl_context=context,
            standard_compatible=False,
        )
    except BaseException:
        await anyio.aclose_forcefully(stream)
        raise
    if "h2" in protocols and tls.extra(TLSAttribute.alpn_protocol, None) != "h2":
        await anyio.aclose_forcefully(tls)
        raise NotHTTP2("The server does not offer HTTP/2 (ALPN).")
    return tls


async def _tunnel(proxy: httpx2.Proxy, origin: Origin) -> anyio.abc.ByteStream:
    """Ask an HTTP proxy for a tunnel to the origin (CONNECT, RFC 9110 section 9.3.6)."""
    url = proxy.url
    port = url.port or (443 if url.scheme == "https" else 80)
    stream = await _connect(url.host, port)
    if url.scheme == "https":
        context = proxy.ssl_context or httpx2.create_ssl_context()
        stream = await _start_tls(stream, context, url.host, ["http/1.1"])
    try:
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        target = f"{host}:{origin.port}".encode("ascii")
        headers = [(b"host", target), (b"accept", b"*/*"), *proxy.headers.raw]
        if proxy.raw_auth is not None:
            credentials = base64.b64encode(b":".join(proxy.raw_auth))
            headers.append((b"proxy-authorization", b"Basic " + credentials))
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_PROXY_HEADER)
        await stream.send(http.send(h11.Request(method=b"CONNECT", target=target, headers=headers)))
        while (event := http.next_event()) is h11.NEED_DATA or isinstance(
            event, h11.InformationalResponse
        ):
            if event is h11.NEED_DATA:
                http.receive_data(await stream.receive())
        if not isinstance(event, h11.Response) or not 200 <= event.status_code < 300:
            status = getattr(event, "status_code", "no answer")
            raise httpx2.ProxyError(f"The proxy {url} refused a tunnel to {target!r}: {status}.")
        return stream
    except h11.RemoteProtocolError as error:
        await anyio.aclose_forcefully(stream)
        raise httpx2.ProxyError(f"The proxy {url} does not speak HTTP: {error}.") from error
    except BaseException:
        await anyio.aclose_forcefully(stream)
        raise


def _explain(error: OSError, where: str) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            f"No file descriptor is left for a connection to {where}. Close what is not needed or "
            "raise the limit (`ulimit -n`)."
        )
    return f"Could not connect to {where}: {error}"
