"""A request of httpx2 as HTTP/2 wants it: a header list and a body that can be sent again.

Owns the translation and its checks (RFC 9113 sections 8.2 and 8.3). Knows nothing of connections.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from functools import lru_cache

import httpx2
from hpack import NeverIndexedHeaderTuple

from ._h2_stream import Headers

REPLAY_SIZE = 1_048_576
"""Bytes of a streamed request body that are kept so that it can be sent a second time."""

IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
"""Methods that may be sent again although the first one may have been acted upon (RFC 9110)."""

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_IN_VALUE = re.compile(rb"[\x00\r\n]")
# Specific to a connection of HTTP/1.1.
_DROPPED = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Kept out of the compression state, also by proxies on the way (RFC 7541 section 7.1.3).
_SECRET = frozenset({b"authorization", b"proxy-authorization", b"cookie", b"api-key", b"x-api-key"})


def header_list(request: httpx2.Request) -> Headers:
    """Return the header list of a request, pseudo-headers first.

    Raises:
        httpx2.LocalProtocolError: A name or value that HTTP forbids.
    """
    url, authority = request.url, b""
    fields: Headers = []
    for raw_name, raw_value in request.headers.raw:
        name = _field_name(raw_name)
        if name is None:
            continue
        if name == b"host":
            authority = authority or raw_value
        elif name in _SECRET:
            fields.append(NeverIndexedHeaderTuple(name, _field_value(name, raw_value)))
        else:
            fields.append(_field(name, raw_value))
    return [
        (b":method", request.method.encode("ascii")),
        (b":authority", authority or url.netloc),
        (b":scheme", url.raw_scheme),
        (b":path", url.raw_path),
        *fields,
    ]


@lru_cache(maxsize=1024)
def _field(name: bytes, raw_value: bytes) -> tuple[bytes, bytes]:
    """A field to send; most requests have the same ones. No secret is ever kept here."""
    return name, _field_value(name, raw_value)


def _field_value(name: bytes, raw: bytes) -> bytes:
    value = raw.strip(b" \t")
    if _BAD_IN_VALUE.search(value):
        raise httpx2.LocalProtocolError(f"The header {name!r} has a line break or NUL in it.")
    return value


@lru_cache(maxsize=1024)
def _field_name(raw: bytes) -> bytes | None:
    name = raw.lower()
    if name in _DROPPED:
        return None
    if _NAME.fullmatch(name) is None:
        raise httpx2.LocalProtocolError(f"{raw!r} is not a header name.")
    return name


class RequestBody:
    """A request body that can be sent again as long as it is small or held in memory anyway.

    Attributes:
        length: What the request's content-length says, or None.
        empty: Whether there is none, so that the headers end the request.
        replayable: Whether `chunks` may be called once more.
        whole: All of it, if it is in memory anyway; `chunks` gives the same.
    """

    def __init__(self, request: httpx2.Request) -> None:
        declared, chunked = None, False
        for name, value in request.headers.raw:
            if len(name) == 14 and name.lower() == b"content-length":
                declared = int(value)
            elif len(name) == 17 and name.lower() == b"transfer-encoding":
                chunked = True
        self.length: int | None = declared
        self.empty = not declared and not chunked
        self.replayable = True
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        self._source: AsyncIterator[bytes] = request.stream.__aiter__()
        self.whole: bytes | None = None
        if isinstance(request.stream, httpx2.ByteStream):
            self.whole = b"".join(request.stream)
        self._in_memory = self.whole is not None
        self._kept: list[bytes] = []
        self._kept_size = 0

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body from its start: what was sent before, then the rest of the source."""
        for chunk in self._kept:
            yield chunk
        async for chunk in self._source:
            if self.replayable:
                self._kept.append(chunk)
                self._kept_size += len(chunk)
                if self._kept_size > REPLAY_SIZE and not self._in_memory:
                    self.replayable = False
                    self._kept.clear()
            yield chunk

    async def aclose(self) -> None:
        """Close the source, if it is a generator that may be left half-way."""
        if isinstance(self._source, AsyncGenerator):
            await self._source.aclose()
