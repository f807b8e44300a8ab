"""An HTTP/2 transport for httpx2 that survives many long streams, cancelled ones, and its server.

Owns the life of one request: a slot, headers, body, response, and sending it again where that is
safe. Everything it cannot do over HTTP/2 it leaves to httpx2's own HTTP/1.1 pool.

    transport = HTTP2Transport()
    client = openai.AsyncOpenAI(http_client=httpx2.AsyncClient(transport=transport))

When a request is sent again, and when not:

- REFUSED_STREAM, a GOAWAY whose last stream id is below the request's, and a connection that died
  before a byte of the request left this process: the server did not act on it, whatever the
  method. It is sent again, `max_replays` times at most.
- A connection that died before the response to GET, HEAD, PUT, DELETE, OPTIONS or TRACE: once more.
- The same with POST: never. The server may have done the work, and charged for it; only the caller
  knows whether to pay twice. Servers that close idle connections announce it with a GOAWAY, so the
  common race between an idle close and a new request is of the first kind.
- After the first byte of a response: never.
"""

from __future__ import annotations

import functools
import ssl
from types import TracebackType
from typing import Self

import anyio
import httpx2

from ._h2_config import HTTP2Config
from ._h2_dial import NotHTTP2, Origin, dial
from ._h2_pool import OriginPool
from ._h2_request import IDEMPOTENT, RequestBody, header_list
from ._h2_stream import H2Stream, ResponseBody
from ._runtime import Runtime, enter_loop

__all__ = ["HTTP2Config", "HTTP2Transport"]

_DEFAULT_PORT = {"http": 80, "https": 443}


class HTTP2Transport(httpx2.AsyncBaseTransport):
    """Sends requests over as many HTTP/2 connections as their streams need.

    `https` origins negotiate HTTP/2 by ALPN; one that does not offer it is remembered and served
    by httpx2's HTTP/1.1 pool. `http` origins are served by that pool too, unless
    `prior_knowledge` says that they speak HTTP/2. Timeouts are those of httpx2, per request.

    It works whether or not it is entered as a context manager, on asyncio and on trio, on the one
    event loop it is first used on. `aclose` leaves nothing running.

    Args:
        verify: As in httpx2: True, False, or an `ssl.SSLContext` (for a private CA). Its ALPN
            protocols are set here.
        trust_env: Whether `SSL_CERT_FILE` and `SSL_CERT_DIR` are heeded.
        proxy: An HTTP(S) proxy: `https` origins are reached over HTTP/2 through a CONNECT tunnel.
            Cleartext origins behind any proxy, and everything behind a SOCKS proxy, are left to
            httpx2's own transport, over HTTP/1.1.
        prior_knowledge: Speak HTTP/2 to `http` origins without asking.
        config: Sizes and clocks of the HTTP/2 connections.
        http1_limits: Limits of the HTTP/1.1 pool; by default it has none.
        http1: What to send over HTTP/1.1 with, instead of httpx2's transport; closed with this one.
    """

    def __init__(
        self,
        *,
        verify: ssl.SSLContext | bool = True,
        trust_env: bool = True,
        proxy: httpx2.Proxy | httpx2.URL | str | None = None,
        prior_knowledge: bool = False,
        config: HTTP2Config | None = None,
        http1_limits: httpx2.Limits | None = None,
        http1: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._ssl_context = httpx2.create_ssl_context(verify=verify, trust_env=trust_env)
        self._proxy = httpx2.Proxy(proxy) if isinstance(proxy, (str, httpx2.URL)) else proxy
        self._prior_knowledge = prior_knowledge
        self._config = config or HTTP2Config()
        self._http1_limits = http1_limits or httpx2.Limits()
        self._http1 = http1
        self._pools: dict[Origin, OriginPool] = {}
        self._runtime: Runtime | None = None
        self._closed = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request and return its response once the headers have arrived.

        `response.extensions` has `http_version`, `stream_id`, and `trailers`: a list of header
        pairs that is filled when the body has been read to its end.

        Raises:
            httpx2.TransportError: Of the kind httpx2's own transport raises.
            RuntimeError: The transport is closed, or belongs to another event loop.
        """
        runtime = self._enter_loop()
        origin = self._http2_origin(request)
        pool = None if origin is None else self._pool(origin, runtime)
        if pool is not None and not pool.not_http2:
            try:
                return await self._exchange(pool, request)
            except NotHTTP2:
                pass  # raised before anything was sent; from now on pool.not_http2 says so
        return await self._http1_transport().handle_async_request(request)

    async def aclose(self) -> None:
        """Reset every stream, close every connection, and wait until nothing is left."""
        self._closed = True
        with anyio.CancelScope(shield=True):  # each close is bounded; a half-closed pool would leak
            for pool in self._pools.values():
                await pool.aclose()
            if self._http1 is not None:
                await self._http1.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self.aclose()

    async def _exchange(self, pool: OriginPool, request: httpx2.Request) -> httpx2.Response:
        headers = header_list(request)
        body = RequestBody(request)
        timeouts = request.extensions.get("timeout", {})
        replays = 0
        try:
            while True:
                lane = await pool.acquire(timeouts)
                if not lane.can_open:
                    gone = not lane.accepts  # else the server has lowered its limit: wait again
                    lane.unreserve()
                    if gone and (replays := replays + 1) > self._config.max_replays:
                        raise httpx2.RemoteProtocolError(
                            "The server closes its connections before they carry a request."
                        )
                    continue
                stream = lane.open(headers, body)
                try:
                    if not stream.sent:
                        await lane.send_body(stream, body, timeouts.get("write"))
                    status, fields = await stream.response(timeouts.get("read"))
                except httpx2.TransportError:
                    stream.close()
                    if replays >= self._config.max_replays or not self._may_replay(
                        stream, request, body, replays
                    ):
                        raise
                    replays += 1
                    continue
                except BaseException:
                    stream.close()
                    raise
                return httpx2.Response(
                    status,
                    headers=fields,
                    stream=ResponseBody(stream, timeouts.get("read")),
                    extensions={
                        "http_version": b"HTTP/2",
                        "stream_id": stream.id,
                        "trailers": stream.trailers,
                    },
                )
        finally:
            await body.aclose()

    @staticmethod
    def _may_replay(
        stream: H2Stream, request: httpx2.Request, body: RequestBody, replays: int
    ) -> bool:
        if not body.replayable or stream.head is not None:
            return False
        if stream.unprocessed:
            return True
        return stream.lost and request.method in IDEMPOTENT and replays == 0

    def _enter_loop(self) -> Runtime:
        self._runtime = enter_loop(self._runtime, closed=self._closed)
        return self._runtime

    def _http2_origin(self, request: httpx2.Request) -> Origin | None:
        """The origin to speak HTTP/2 to, or None if the request is httpx2's."""
        url = request.url
        if url.scheme == "http":
            if not self._prior_knowledge or self._proxy is not None:
                return None
        elif url.scheme != "https":
            raise httpx2.UnsupportedProtocol(f"No transport for {url.scheme!r} URLs.")
        if self._proxy is not None and self._proxy.url.scheme not in ("http", "https"):
            return None
        host = url.raw_host.decode("ascii")
        return Origin(
            scheme=url.scheme,
            host=host,
            port=url.port or _DEFAULT_PORT[url.scheme],
            server_name=request.extensions.get("sni_hostname") or host,
        )

    def _pool(self, origin: Origin, runtime: Runtime) -> OriginPool:
        pool = self._pools.get(origin)
        if pool is None:
            opener = functools.partial(dial, origin, self._ssl_context, self._proxy)
            pool = self._pools[origin] = OriginPool(opener, self._config, runtime)
        return pool

    def _http1_transport(self) -> httpx2.AsyncBaseTransport:
        if self._http1 is None:
            self._http1 = httpx2.AsyncHTTPTransport(
                verify=self._ssl_context, proxy=self._proxy, limits=self._http1_limits
            )
        return self._http1
