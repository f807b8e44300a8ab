"""Header blocks: a HEADERS frame and the CONTINUATIONs that belong to it (RFC 9113, 4.3 and 6.10).

Owns a block while it arrives and the rules for that: nothing comes between its frames, and it is no
longer than a decoded header list may be. Knows nothing of what headers mean.
"""

from __future__ import annotations

import hpack
from h2.errors import ErrorCodes

from ._h2_decoder import Decoder
from ._h2_frames import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    HEADER_SIZE,
    PADDED,
    ConnectionFaultError,
)
from ._h2_stream import Headers

MAX_CONTINUATIONS = 64
"""Frames of one block; empty ones would cost the server nothing and never end."""


class HeaderBlock:
    """A header block that has begun.

    Attributes:
        stream_id: The stream it is for.
        frames: Its frames so far, as they came.
        complete: Whether the last one has come.
    """

    __slots__ = ("_count", "_flags", "_limit", "complete", "frames", "stream_id")

    def __init__(self, stream_id: int, frame: bytes, flags: int, limit: int) -> None:
        self.stream_id = stream_id
        self.frames = frame
        self.complete = bool(flags & END_HEADERS)
        self._count = 0
        self._flags = flags
        self._limit = limit

    def add(self, kind: int, stream_id: int, frame: bytes, flags: int) -> None:
        """Take in the frame that follows."""
        if kind != CONTINUATION or stream_id != self.stream_id:
            raise ConnectionFaultError(
                ErrorCodes.PROTOCOL_ERROR, "it put another frame inside a header block"
            )
        self.frames += frame
        self.complete = bool(flags & END_HEADERS)
        self._count += 1
        if len(self.frames) > self._limit or self._count > MAX_CONTINUATIONS:
            raise ConnectionFaultError(
                ErrorCodes.ENHANCE_YOUR_CALM,
                f"it sent a header block above {self._limit} bytes or {MAX_CONTINUATIONS} frames",
            )

    @property
    def end_stream(self) -> bool:
        """Whether nothing follows the block on its stream."""
        return bool(self._flags & END_STREAM)

    def decode(self, decoder: Decoder) -> Headers:
        """The header list of a complete block.

        Every block has to be decoded, even for a stream that is gone: the compression state is
        the connection's, and what the block changes there counts.
        """
        try:
            return decoder.decode(self._fragments())
        except hpack.OversizedHeaderListError as error:
            raise ConnectionFaultError(
                ErrorCodes.ENHANCE_YOUR_CALM, f"it sent too many headers: {error}"
            ) from error
        except hpack.HPACKError as error:
            raise ConnectionFaultError(
                ErrorCodes.COMPRESSION_ERROR, f"it sent headers that cannot be decoded: {error}"
            ) from error

    def _fragments(self) -> bytes:
        if not self._count:
            return self._unpad(self.frames[HEADER_SIZE:])
        fragments: list[bytes] = []
        rest = self.frames
        while rest:
            size = int.from_bytes(rest[:3])
            payload, rest = rest[HEADER_SIZE : HEADER_SIZE + size], rest[HEADER_SIZE + size :]
            # Only the first frame has padding and priority, also if nothing else is in it.
            fragments.append(payload if fragments else self._unpad(payload))
        return b"".join(fragments)

    def _unpad(self, payload: bytes) -> bytes:
        if self._flags & PADDED:
            padding = payload[0] if payload else 0
            if padding >= len(payload):
                raise ConnectionFaultError(
                    ErrorCodes.PROTOCOL_ERROR, "it sent padding longer than its frame"
                )
            payload = payload[1 : len(payload) - padding]
        return payload[5:] if self._flags & HAS_PRIORITY else payload
