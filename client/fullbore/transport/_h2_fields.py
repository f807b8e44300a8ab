"""What a response's header block may hold (RFC 9113, 8.2 and 8.3).

Owns the rules that make a response malformed. Knows nothing of frames, compression or streams.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from ._h2_stream import Headers

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\x00\r\n]|^[ \t]|[ \t]$")
_LENGTH = re.compile(rb"[0-9]{1,18}")  # above any body, and below what `int` refuses to convert
_CONNECTION_SPECIFIC = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)


class MalformedError(Exception):
    """A block that ends its stream; the message completes "The server sent ..."."""


def read_head(block: Iterable[tuple[bytes, bytes]]) -> tuple[int, Headers]:
    """Split the header list of a response into its status and its fields.

    Raises:
        MalformedError: Something HTTP/2 forbids.
    """
    status: int | None = None
    fields: Headers = []
    for name, value in block:
        if name == b":status" and status is None and not fields:
            if len(value) != 3 or not value.isdigit() or value < b"100":
                raise MalformedError(f"the status {value!r}")
            status = int(value)
        else:
            _check_field(name, value)
            fields.append((name, value))
    if status is None:
        raise MalformedError("a header block without a status")
    return status, fields


def read_trailers(block: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The fields of a trailer section.

    Raises:
        MalformedError: Something HTTP/2 forbids.
    """
    trailers = list(block)
    for name, value in trailers:
        _check_field(name, value)
    return trailers


def content_length(fields: Headers) -> int | None:
    """What the fields say about the size of the body.

    Raises:
        MalformedError: No number, one beyond any body, or numbers that differ.
    """
    length: int | None = None
    for name, value in fields:
        if name == b"content-length":
            if not _LENGTH.fullmatch(value) or (length is not None and length != int(value)):
                raise MalformedError(f"the content-length {value[:40]!r}")
            length = int(value)
    return length


def _check_field(name: bytes, value: bytes) -> None:
    if not _name_allowed(name):
        raise MalformedError(f"the header name {name!r}")
    if _BAD_VALUE.search(value):
        raise MalformedError(f"a value of {name.decode()} with a blank or break at a wrong place")


@lru_cache(maxsize=256)
def _name_allowed(name: bytes) -> bool:
    """Most responses have the same names; those special to a connection are not HTTP/2's."""
    return _NAME.fullmatch(name) is not None and name not in _CONNECTION_SPECIFIC
