"""Header blocks of one connection to field lists (RFC 7541).

Owns the dynamic table that the server's encoder and we keep in step. hpack's decoder does the same
at four times the cost: it slices, wraps and logs every field. Its table of static fields, its
Huffman decoding and its exceptions are used here. Knows nothing of frames or of what fields mean.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from hpack import (
    HPACKDecodingError,
    InvalidTableIndexError,
    InvalidTableSizeError,
    OversizedHeaderListError,
)
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from ._h2_stream import Headers

TABLE_SIZE: Final = 4_096
"""Bytes of the dynamic table: the protocol's default, which our SETTINGS leave as it is."""

_STATIC: Final = ((b"", b""), *HeaderTable.STATIC_TABLE)  # appendix A counts from one
_FIRST_DYNAMIC: Final = len(_STATIC)
_OVERHEAD: Final = 32  # what each field counts for beside its letters (section 4.1)
_LONGEST_INTEGER: Final = 5  # bytes after the prefix: 32 bits and more


class Decoder:
    """Decodes the header blocks of one connection, each of them and in their order.

    After an error the table is out of step: the connection is of no further use.
    """

    __slots__ = ("_entries", "_limit", "_most", "_size")

    def __init__(self, max_header_list_size: int) -> None:
        self._most = max_header_list_size
        self._entries: deque[tuple[bytes, bytes]] = deque()  # the newest first
        self._size = 0
        self._limit = TABLE_SIZE  # the server's encoder may have lowered it

    def decode(self, block: bytes) -> Headers:
        """Return the fields of a complete header block.

        Raises:
            OversizedHeaderListError: They are larger than `max_header_list_size`.
            HPACKDecodingError: The block breaks RFC 7541.
        """
        try:
            return self._decode(block)
        except IndexError:
            raise HPACKDecodingError("a header block that ends too early") from None

    def _decode(self, block: bytes) -> Headers:
        fields: Headers = []
        position, end, room = 0, len(block), self._most
        while position < end:
            first = block[position]
            if first & 0x80:  # section 6.1: a field of a table
                index, position = _integer(block, position, 0x7F)
                field = self._entry(index)
            elif first & 0x40:  # section 6.2.1: a literal that goes into the table
                field, position = self._literal(block, position, 0x3F)
                self._add(field)
            elif first & 0x20:  # section 6.3
                if fields:
                    raise HPACKDecodingError("a change of the table's size after a field")
                limit, position = _integer(block, position, 0x1F)
                self._resize(limit)
                continue
            else:  # sections 6.2.2 and 6.2.3: a literal that does not
                field, position = self._literal(block, position, 0x0F)
            fields.append(field)
            room -= len(field[0]) + len(field[1]) + _OVERHEAD
            if room < 0:
                raise OversizedHeaderListError(f"a header list above {self._most} bytes")
        return fields

    def _literal(self, block: bytes, position: int, mask: int) -> tuple[tuple[bytes, bytes], int]:
        index, position = _integer(block, position, mask)
        if index:
            name = self._entry(index)[0]
        else:
            name, position = _string(block, position)
        value, position = _string(block, position)
        return (name, value), position

    def _entry(self, index: int) -> tuple[bytes, bytes]:
        if 0 < index < _FIRST_DYNAMIC:
            return _STATIC[index]
        if not 0 <= index - _FIRST_DYNAMIC < len(self._entries):
            raise InvalidTableIndexError(f"the index {index}, which is not in the table")
        return self._entries[index - _FIRST_DYNAMIC]

    def _add(self, field: tuple[bytes, bytes]) -> None:
        self._entries.appendleft(field)
        self._size += len(field[0]) + len(field[1]) + _OVERHEAD
        self._evict()  # the new one too, if it is larger than the table

    def _resize(self, limit: int) -> None:
        if limit > TABLE_SIZE:
            raise InvalidTableSizeError(f"a table of {limit} bytes; {TABLE_SIZE} are allowed")
        self._limit = limit
        self._evict()

    def _evict(self) -> None:
        while self._size > self._limit:
            name, value = self._entries.pop()
            self._size -= len(name) + len(value) + _OVERHEAD


def _integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """Read an integer whose prefix is the bits of `mask` (section 5.1); return where it ends."""
    number = block[position] & mask
    position += 1
    if number < mask:
        return number, position
    for shift in range(0, 7 * _LONGEST_INTEGER, 7):
        byte = block[position]
        position += 1
        number += (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise HPACKDecodingError("an integer that is too long")


def _string(block: bytes, position: int) -> tuple[bytes, int]:
    """Read a string literal (section 5.2); return where it ends."""
    packed = block[position] & 0x80
    length, position = _integer(block, position, 0x7F)
    end = position + length
    if end > len(block):
        raise HPACKDecodingError("a string that is longer than its header block")
    string = block[position:end]
    return (decode_huffman(string) if packed else string), end
