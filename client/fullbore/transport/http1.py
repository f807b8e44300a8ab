"""An HTTP/1.1 transport for httpx2 that costs little: a tenth of a millisecond a request.

Owns the connections: which are idle, which may be used again, when one request may be sent twice.
It has no limit of its own on their number, for a limiter decides how much is in flight, and a
second queue under it would only hide from it what waits. What it does not speak (proxies) is left
to httpx2's own transport.

When a request is sent again: once, if the connection had been used before and then closed without a
byte of an answer, and either nothing of the request can have reached the server or the method is
idempotent (RFC 9110, section 9.2.2). A POST that has left may have been acted upon, and charged
for: whether to pay twice is its caller's decision.
"""

from __future__ import annotations

import ssl
from collections import defaultdict, deque
from types import TracebackType
from typing import Self

import anyio
import httpx2

from ._h1_connection import H1Body, H1Connection, request_head
from ._h1_wire import Address, open_wire
from ._h2_dial import _explain
from ._h2_request import IDEMPOTENT, RequestBody
from ._runtime import Runtime, enter_loop

__all__ = ["HTTP1Transport"]

_DEFAULT_PORT = {"http": 80, "https": 443}
_GONE = (httpx2.NetworkError, httpx2.RemoteProtocolError)
_Key = tuple[str, str, int, str]  # scheme, host, port, name for TLS


class HTTP1Transport(httpx2.AsyncBaseTransport):
    """Sends requests over as many HTTP/1.1 connections as there are requests at once.

    Works on asyncio and trio, on the one event loop it is first used on, entered as a context
    manager or not. Timeouts are those of httpx2, per request; there is no pool to wait for.

    Args:
        verify: As in httpx2: True, False, or an `ssl.SSLContext`. Its ALPN protocols are set here.
        trust_env: Whether `SSL_CERT_FILE` and `SSL_CERT_DIR` are heeded.
        idle_expiry: Seconds an idle connection is kept. The default is below the five seconds
            after which uvicorn, the quickest of the common servers, closes it.
    """

    def __init__(
        self,
        *,
        verify: ssl.SSLContext | bool = True,
        trust_env: bool = True,
        idle_expiry: float = 4.0,
    ) -> None:
        self._tls = httpx2.create_ssl_context(verify=verify, trust_env=trust_env)
        self._idle_expiry = idle_expiry
        self._idle: defaultdict[_Key, deque[H1Connection]] = defaultdict(deque)
        self._busy: dict[H1Connection, _Key] = {}
        self._runtime: Runtime | None = None
        self._closed = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request and return its response once the headers have arrived.

        `response.extensions` has `http_version`, and `trailers`: a list of header pairs that is
        filled when the body has been read to its end.

        Raises:
            httpx2.TransportError: Of the kind httpx2's own transport raises.
            RuntimeError: The transport is closed, or belongs to another event loop.
        """
        runtime = self._enter_loop()
        key = _key_of(request)
        head = request_head(request)
        method = request.method.encode("ascii")
        body = RequestBody(request)
        timeouts = request.extensions.get("timeout", {})
        read = timeouts.get("read")
        again = False
        try:
            while True:
                connection = self._take_idle(key, runtime)
                reused = connection is not None
                if connection is None:
                    connection = await self._connect(key, timeouts.get("connect"))
                self._busy[connection] = key
                try:
                    await connection.send(head, method, body, timeouts.get("write"))
                    status, fields = await connection.response(read)
                except BaseException as error:
                    self._drop(connection)
                    if (
                        again
                        or not (reused and isinstance(error, _GONE))
                        or not self._may_send_again(connection, request.method, body)
                    ):
                        raise
                    again = True
                    continue
                stream = H1Body(connection, read, self._release, runtime.post)
                return httpx2.Response(
                    status,
                    headers=fields,
                    stream=stream,
                    extensions={"http_version": b"HTTP/1.1", "trailers": stream.trailers},
                )
        finally:
            await body.aclose()

    async def aclose(self) -> None:
        """Close every connection, those in use included."""
        self._closed = True
        for connections in (*self._idle.values(), [*self._busy]):
            for connection in connections:
                connection.close()
        self._idle.clear()
        self._busy.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self.aclose()

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._busy) + sum(map(len, self._idle.values()))

    @staticmethod
    def _may_send_again(connection: H1Connection, method: str, body: RequestBody) -> bool:
        if connection.answered or not body.replayable:
            return False
        return connection.untouched or method in IDEMPOTENT

    def _take_idle(self, key: _Key, runtime: Runtime) -> H1Connection | None:
        """The connection that was used last: under light load the others grow old and go."""
        idle = self._idle.get(key)
        if not idle:
            return None
        oldest = runtime.clock() - self._idle_expiry
        while idle and idle[0].idle_since < oldest:
            idle.popleft().close()
        while idle:
            connection = idle.pop()
            if not connection.stale:
                return connection
            connection.close()
        return None

    async def _connect(self, key: _Key, timeout: float | None) -> H1Connection:
        scheme, host, port, name = key
        tls = self._tls if scheme == "https" else None
        connection = H1Connection()
        address = Address(host=host, port=port, tls=tls, server_name=name)
        try:
            with anyio.move_on_after(timeout):
                connection.wire = await open_wire(address, connection)
        except OSError as error:  # TLS errors among them
            raise httpx2.ConnectError(_explain(error, f"{host}:{port}")) from error
        if connection.wire is None:
            raise httpx2.ConnectTimeout(f"No connection to {host}:{port} after {timeout} s.")
        return connection

    def _release(self, connection: H1Connection) -> None:
        """A response is over: keep its connection if it can be used again."""
        key = self._busy.pop(connection, None)
        if key is None:
            return
        if self._closed or self._runtime is None or not connection.reset_for_reuse():
            connection.close()
            return
        connection.idle_since = self._runtime.clock()
        self._idle[key].append(connection)

    def _drop(self, connection: H1Connection) -> None:
        self._busy.pop(connection, None)
        connection.close()

    def _enter_loop(self) -> Runtime:
        self._runtime = enter_loop(self._runtime, closed=self._closed)
        return self._runtime


def _key_of(request: httpx2.Request) -> _Key:
    url = request.url
    scheme, host = url.scheme, url.raw_host.decode("ascii")
    if scheme not in _DEFAULT_PORT:
        raise httpx2.UnsupportedProtocol(f"No transport for {scheme!r} URLs.")
    name = request.extensions.get("sni_hostname") or host
    return scheme, host, url.port or _DEFAULT_PORT[scheme], name
