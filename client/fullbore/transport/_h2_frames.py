"""HTTP/2's frame layout: types, flags, sizes, and the few frames built by hand (RFC 9113, 4 and 6).

Owns numbers and their packing. Knows nothing of streams, connections or what a frame leads to.
"""

from __future__ import annotations

import struct
from typing import Final

from h2.errors import ErrorCodes

DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

HEADER = struct.Struct(">IBI")
"""A frame's header; the payload's length and the type share the first 32 bits."""
HEADER_SIZE: Final = 9
MAX_FRAME_SIZE: Final = 16_384
"""The payload we accept, in bytes: the protocol's default and minimum."""
LAST_STREAM_ID: Final = 2**31 - 1

_WITH_ONE_NUMBER = struct.Struct(">IBII")
_WITH_TWO_NUMBERS = struct.Struct(">IBIII")


class ConnectionFaultError(Exception):
    """The server broke the protocol in a way that ends the connection.

    `code` is what our GOAWAY will say, or None if it has been queued already.
    """

    def __init__(self, code: ErrorCodes | None, message: str) -> None:
        super().__init__(message)
        self.code = code


def window_update(stream_id: int, size: int) -> bytes:
    """Grant `size` more bytes on a stream, or on the connection (0)."""
    return _WITH_ONE_NUMBER.pack(4 << 8 | WINDOW_UPDATE, 0, stream_id, size)


def rst_stream(stream_id: int, code: ErrorCodes) -> bytes:
    """End a stream before its time."""
    return _WITH_ONE_NUMBER.pack(4 << 8 | RST_STREAM, 0, stream_id, code)


def header_frames(stream_id: int, block: bytes, largest: int, *, end_stream: bool) -> bytes:
    """A header block as one HEADERS frame and as many CONTINUATIONs as `largest` demands."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= largest:
        return HEADER.pack(len(block) << 8 | HEADERS, flags | END_HEADERS, stream_id) + block
    frames = [HEADER.pack(largest << 8 | HEADERS, flags, stream_id), block[:largest]]
    for start in range(largest, len(block), largest):
        piece = block[start : start + largest]
        last = END_HEADERS if start + largest >= len(block) else 0
        frames += [HEADER.pack(len(piece) << 8 | CONTINUATION, last, stream_id), piece]
    return b"".join(frames)


def goaway(code: ErrorCodes) -> bytes:
    """Say that this side ends the connection; a client has processed no streams."""
    return _WITH_TWO_NUMBERS.pack(8 << 8 | GOAWAY, 0, 0, 0, code)


def ping(payload: bytes, flags: int = 0) -> bytes:
    """Ask, or with `ACK` answer, eight bytes."""
    return HEADER.pack(8 << 8 | PING, flags, 0) + payload


def code_name(code: int) -> str:
    """Name an error code for a message."""
    try:
        return ErrorCodes(code).name
    except ValueError:
        return f"error {code}"
