"""An endpoint and the connections to it: base URL, headers, TLS, proxy, pool, file descriptors.

Builds httpx2 transports and sends POSTs through them. Does not read answers, and knows nothing of
prompts. The API key lives in the headers here and is shown by no ``repr`` and no error.
"""

from __future__ import annotations

import os
import ssl
import urllib.request
from collections.abc import AsyncIterator, Mapping
from typing import Final

import httpx2

from ..errors import ConfigError
from .http1 import HTTP1Transport
from .http2 import HTTP2Config, HTTP2Transport

OPENAI_URL = "https://api.openai.com/v1"
IDLE_EXPIRY: Final = 4.0
"""Seconds an idle connection is kept: below the five after which uvicorn closes it."""
SPARE_DESCRIPTORS: Final = 64
"""File descriptors left for everything that is not a connection of ours."""

# Which environment variable holds the key of which host. A key is never sent to another host.
_KEY_OF_HOST = {"api.openai.com": "OPENAI_API_KEY", "api.oxlo.ai": "OXLO_API_KEY"}


class Body(httpx2.AsyncByteStream):
    """A request body that is one piece of bytes and can be sent again."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content


class Endpoint:
    """Where requests go, and the transport they go through.

    :param base_url: such as ``https://api.openai.com/v1``.
    :param transport: sends the requests; closed by whoever opened it.
    :param api_key: sent as a bearer token, or ``None`` to send none.
    :param headers: sent with every request, besides our own.
    :param connect_timeout: seconds to open a connection; ``None`` is no limit.
    """

    def __init__(
        self,
        base_url: httpx2.URL,
        transport: httpx2.AsyncBaseTransport,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        connect_timeout: float | None = None,
    ) -> None:
        self.base_url = base_url
        self.transport = transport
        self._urls: dict[str, httpx2.URL] = {}
        mine = {
            "Host": base_url.netloc.decode("ascii"),
            "Accept": "text/event-stream, application/json",
            "Accept-Encoding": "identity",  # decompression would hold back tokens
            "Content-Type": "application/json",
            "User-Agent": "fullbore",
        }
        if api_key is not None:
            mine["Authorization"] = f"Bearer {api_key}"
        merged = httpx2.Headers(mine)
        merged.update(headers or {})
        self._headers = merged.raw
        self._extensions = {
            # Only connecting is timed by the transport; every other limit on time is kept by the
            # reader of the answer. No wait for the pool: the limiter decides what may be sent.
            "timeout": {"connect": connect_timeout, "read": None, "write": None, "pool": None}
        }

    async def post(self, path: str, content: bytes) -> httpx2.Response:
        """Send a request; return its answer with the body still to be read and closed.

        :raises httpx2.TransportError: as the transport does.
        """
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = join(self.base_url, path)
        length = (b"Content-Length", str(len(content)).encode("ascii"))
        request = httpx2.Request(
            "POST",
            url,
            headers=[*self._headers, length],
            stream=Body(content),
            extensions=self._extensions,
        )
        return await self.transport.handle_async_request(request)

    def __repr__(self) -> str:
        return f"Endpoint({str(self.base_url)!r})"


def parse_base_url(base_url: str | None) -> httpx2.URL:
    """Return the URL requests go below: the one given, ``OPENAI_BASE_URL``, or OpenAI's own.

    :raises ConfigError: it is not an absolute ``http`` or ``https`` URL.
    """
    text = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as exc:
        raise ConfigError(f"The base URL {text!r} cannot be read: {exc}.") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(
            f"The base URL is {text!r}; it must be absolute, such as 'http://127.0.0.1:8000/v1'."
        )
    return url


def join(base_url: httpx2.URL, path: str) -> httpx2.URL:
    """Return the URL of a path below the base URL; a query in the base URL stays."""
    return base_url.copy_with(path=f"{base_url.path.rstrip('/')}/{path}")


def find_api_key(base_url: httpx2.URL, api_key: str | None) -> str | None:
    """Return the key to send: the one given, or the one in the host's environment variable.

    ``OPENAI_API_KEY`` is used for api.openai.com, and for the host of ``OPENAI_BASE_URL``, since
    the two are set together; ``OXLO_API_KEY`` for api.oxlo.ai. No other host is sent a key that
    was not given for it.

    :raises ConfigError: a host known to need a key has none.
    """
    if api_key is not None:
        if not api_key.isascii() or any(c.isspace() for c in api_key) or not api_key:
            raise ConfigError(
                "The API key is empty or holds spaces or other characters that no header can "
                "carry. Check how it was read: a trailing newline is the usual cause."
            )
        return api_key
    variable = _KEY_OF_HOST.get(base_url.host)
    if variable is None:
        configured = os.environ.get("OPENAI_BASE_URL")
        same_host = configured and httpx2.URL(configured).host == base_url.host
        return os.environ.get("OPENAI_API_KEY") if same_host else None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"{base_url.host} needs an API key. Set the environment variable {variable} or pass "
            "api_key=…"
        )
    return key


def open_transport(
    base_url: httpx2.URL,
    *,
    http2: bool | None = None,
    verify: ssl.SSLContext | bool = True,
    most: int = 1024,
) -> httpx2.AsyncBaseTransport:
    """Build the transport of an endpoint. None of them has a limit of its own below ``most``.

    The limiter is the only one that makes a request wait: in a second queue under it, requests
    would wait, or time out, where it does not see them. Proxies are taken from the environment.

    :param http2: ``None`` asks a server over TLS (ALPN) and speaks HTTP/2 if it does, and speaks
        HTTP/1.1 over cleartext, where nobody can be asked. ``True`` speaks HTTP/2 over cleartext
        too (prior knowledge, RFC 9113, section 3.3); ``False`` never does.
    :param most: requests that may be in flight at once.
    """
    proxy = environment_proxy(base_url)
    secure = base_url.scheme == "https"
    http1: httpx2.AsyncBaseTransport
    if proxy is None:
        http1 = HTTP1Transport(verify=verify, idle_expiry=IDLE_EXPIRY)
    else:
        limits = httpx2.Limits(keepalive_expiry=IDLE_EXPIRY)
        http1 = httpx2.AsyncHTTPTransport(verify=verify, proxy=proxy, limits=limits)
    if http2 is not False and (secure or (http2 and proxy is None)):
        # A lane for every request is needed only by a server that takes one stream a connection.
        config = HTTP2Config(max_lanes=max(most, HTTP2Config().max_lanes))
        return HTTP2Transport(
            verify=verify, proxy=proxy, prior_knowledge=True, config=config, http1=http1
        )
    return http1


def environment_proxy(base_url: httpx2.URL) -> str | None:
    """Return the proxy that ``HTTPS_PROXY`` and its kin ask for, ``NO_PROXY`` heeded."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(base_url.scheme) or proxies.get("all")
    if proxy is None or urllib.request.proxy_bypass(base_url.netloc.decode("ascii")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def allowed_connections(wanted: int) -> int:
    """Return how many of these connections the process may hold, one file descriptor each.

    Raises the soft limit as far as it takes and the hard one allows.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit on sockets
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    return max(soft - SPARE_DESCRIPTORS, 1)


def check_descriptors(connections: int) -> None:
    """Make sure that the process may hold that many connections.

    :raises ConfigError: it may not; says how to allow it.
    """
    allowed = allowed_connections(connections)
    if allowed < connections:
        needed = connections + SPARE_DESCRIPTORS
        raise ConfigError(
            f"concurrency={connections} needs about {needed} file descriptors, more than this "
            f"process may hold. Lower concurrency to {allowed}, raise the limit (ulimit -Hn "
            f"{needed}, or LimitNOFILE in systemd), or use http2=True, which needs one for many "
            "requests."
        )
