"""A client that the user opened, as a transport: its proxies, mounts, auth and hooks all apply.

It may be httpx2's, or that of httpx, the library that httpx2 continues. The second is translated
here: requests, answers and errors are httpx2's on our side. httpx is imported only where a client
of it is given.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import httpx2

from ..errors import ConfigError

if TYPE_CHECKING:
    import httpx


def user_transport(client: httpx2.AsyncClient | httpx.AsyncClient) -> httpx2.AsyncBaseTransport:
    """A transport that sends through `client`, and leaves it open.

    :raises ConfigError: it is neither library's ``AsyncClient``.
    """
    if isinstance(client, httpx2.AsyncClient):
        return ClientTransport(client)
    if any(_is_httpx_client(each) for each in type(client).__mro__):
        return HttpxTransport(client)
    raise ConfigError(
        f"http_client is a {type(client).__module__}.{type(client).__qualname__}; it must be an "
        "httpx2.AsyncClient or an httpx.AsyncClient."
    )


def _is_httpx_client(kind: type) -> bool:
    return kind.__name__ == "AsyncClient" and kind.__module__.partition(".")[0] == "httpx"


class ClientTransport(httpx2.AsyncBaseTransport):
    """An httpx2 client as a transport."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send through the client; the client stays open, for it is the user's."""
        return await self._client.send(request, stream=True)


class HttpxTransport(httpx2.AsyncBaseTransport):
    """An httpx client as a transport."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send through the client; the client stays open, for it is the user's.

        :raises httpx2.RequestError: as httpx raises its own error of the same name.
        """
        import httpx

        with _translated(request):
            response = await self._client.send(
                httpx.Request(
                    request.method,
                    str(request.url),
                    headers=request.headers.raw,
                    stream=_upload_type()(request),
                    extensions=dict(request.extensions),
                ),
                stream=True,
            )
        known = {"http_version", "reason_phrase"}
        return httpx2.Response(
            response.status_code,
            headers=response.headers.raw,
            stream=_Download(response, request),
            extensions={
                key: response.extensions[key] for key in known if key in response.extensions
            },
            request=request,
        )


@cache
def _upload_type() -> type[Any]:
    """A request's body as httpx wants one: its class is known only once httpx is imported."""
    import httpx

    class Upload(httpx.AsyncByteStream):
        def __init__(self, request: httpx2.Request) -> None:
            self._request = request

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in cast(httpx2.AsyncByteStream, self._request.stream):
                yield piece

    return Upload


class _Download(httpx2.AsyncByteStream):
    """An httpx answer's body as it came, encoded as its headers say."""

    def __init__(self, response: httpx.Response, request: httpx2.Request) -> None:
        self._response = response
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _translated(self._request):
            async for piece in self._response.aiter_raw():
                yield piece

    async def aclose(self) -> None:
        with _translated(self._request):
            await self._response.aclose()


@contextmanager
def _translated(request: httpx2.Request) -> Iterator[None]:
    """Raise httpx's errors as httpx2's of the same name."""
    import httpx

    try:
        yield
    except httpx.RequestError as exc:
        for kind in type(exc).__mro__:
            theirs = getattr(httpx2, kind.__name__, None)
            if isinstance(theirs, type) and issubclass(theirs, httpx2.RequestError):
                raise theirs(str(exc), request=request) from exc
        raise
