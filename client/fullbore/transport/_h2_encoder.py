"""Header blocks for requests that are all alike: each field is encoded once (RFC 7541).

Owns a stateless encoder in place of hpack's. Fields are literals without indexing, so the bytes of
one never depend on what was sent before and can be kept. That makes a block a few hundred bytes
instead of thirty, which beside a prompt is nothing, and costs a twentieth of the time. It also
leaves no compression state for an attacker to probe.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from hpack import NeverIndexedHeaderTuple

DEFAULT_TABLE_SIZE = 4_096

_LITERAL = 0x00  # section 6.2.2: a literal without indexing, with a name of its own
_NEVER_INDEXED = 0x10  # section 6.2.3: the same, for every hop on the way
_SIZE_UPDATE = 0x20  # section 6.3
_WHOLE_FIELDS = {  # those of the static table (appendix A) that requests begin with
    (b":method", b"GET"): b"\x82",
    (b":method", b"POST"): b"\x83",
    (b":scheme", b"http"): b"\x86",
    (b":scheme", b"https"): b"\x87",
}


class StatelessEncoder:
    """What an `h2` connection asks of its encoder, and no more."""

    def __init__(self) -> None:
        self._table_size = DEFAULT_TABLE_SIZE
        self._update = b""

    @property
    def header_table_size(self) -> int:
        """Bytes the server's decoder keeps for us. We use none of them."""
        return self._table_size

    @header_table_size.setter
    def header_table_size(self, size: int) -> None:
        if size < self._table_size:  # to be confirmed at the start of the next block (section 4.2)
            self._update = _integer(0, prefix=5, first=_SIZE_UPDATE)
        self._table_size = size

    def encode(self, headers: Iterable[tuple[bytes, bytes]], huffman: bool = False) -> bytes:
        """Return the block of these headers. `huffman` is ignored: it saves bytes, not time."""
        block = [
            _encode(_NEVER_INDEXED, *field)
            if isinstance(field, NeverIndexedHeaderTuple)
            else _encode_and_keep(*field)
            for field in headers
        ]
        if self._update:
            block.insert(0, self._update)
            self._update = b""
        return b"".join(block)


@lru_cache(maxsize=1024)
def _encode_and_keep(name: bytes, value: bytes) -> bytes:
    return _WHOLE_FIELDS.get((name, value)) or _encode(_LITERAL, name, value)


def _encode(kind: int, name: bytes, value: bytes) -> bytes:
    return b"%c%b%b%b%b" % (kind, _integer(len(name)), name, _integer(len(value)), value)


def _integer(value: int, *, prefix: int = 7, first: int = 0) -> bytes:
    """Encode an integer (section 5.1); the bits above the prefix are `first`'s."""
    most = (1 << prefix) - 1
    if value < most:
        return bytes([first | value])
    encoded = [first | most]
    value -= most
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])
