"""An HTTP/2 connection without I/O: bytes in, stream states and bytes out (RFC 9113).

Owns the frame splitter, receive flow control, and what each frame means for a stream. A DATA frame,
the most frequent by far, costs a header parse, two subtractions and an append. Knows nothing of
compression, sockets, clocks or retries.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import httpx2
from h2.errors import ErrorCodes

from ._h2_blocks import HeaderBlock
from ._h2_config import HTTP2Config
from ._h2_decoder import Decoder
from ._h2_fields import MalformedError, content_length, read_head, read_trailers
from ._h2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADER,
    HEADER_SIZE,
    HEADERS,
    MAX_FRAME_SIZE,
    PADDED,
    PING,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ConnectionFaultError,
    code_name,
    window_update,
)
from ._h2_outgoing import Outgoing
from ._h2_settings import LARGEST_WINDOW
from ._h2_stream import H2Stream, Link

MAX_INFORMATIONAL = 64
_NUMBER = struct.Struct(">I")
_BODILESS_STATUS = frozenset({204, 304})


class H2Connection(Outgoing):
    """A client connection: what the server says, and through `Outgoing` what is said to it.

    Attributes:
        farewell: What a GOAWAY said, for error messages.
        got_response: Whether the connection ever carried one.
    """

    def __init__(self, config: HTTP2Config, link: Link, on_slot: Callable[[], None]) -> None:
        super().__init__(config, link, on_slot)
        self.farewell = ""
        self.got_response = False
        self._partial = b""
        self._block: HeaderBlock | None = None
        self._decoder = Decoder(config.max_header_list_size)
        self._credit_batch = config.credit_batch
        self._uncredited = 0

    def receive(self, data: bytes) -> None:
        """Take in what the socket gave.

        Raises:
            ConnectionFaultError: The server broke the protocol; a GOAWAY is queued in `output`.
        """
        try:
            self._receive(self._partial + data if self._partial else data)
        except ConnectionFaultError as fault:
            if fault.code is not None:
                self._say_goaway(fault.code)
            raise

    def _receive(self, data: bytes) -> None:
        position, end = 0, len(data)
        unpack = HEADER.unpack_from
        while end - position >= HEADER_SIZE:
            word, flags, stream_id = unpack(data, position)
            length, kind = word >> 8, word & 0xFF
            if length > MAX_FRAME_SIZE or not self.settled:
                self._check_frame(data[position : position + 16], length, kind, flags)
            start = position + HEADER_SIZE
            stop = start + length
            if stop > end:
                break
            stream_id &= 0x7FFF_FFFF
            if kind == DATA and self._block is None:
                self._receive_data(data, start, length, flags, stream_id)
            else:
                self._receive_other(data[position:stop], kind, flags, stream_id)
            position = stop
        self._partial = data[position:]

    def _check_frame(self, beginning: bytes, length: int, kind: int, flags: int) -> None:
        if not self.settled and (kind != SETTINGS or flags):
            raise ConnectionFaultError(
                ErrorCodes.PROTOCOL_ERROR, f"it does not speak HTTP/2 and began with {beginning!r}"
            )
        if length > MAX_FRAME_SIZE:
            raise ConnectionFaultError(
                ErrorCodes.FRAME_SIZE_ERROR,
                f"it sent a frame of {length} bytes, above the limit of {MAX_FRAME_SIZE}",
            )

    def _check_stream(self, stream_id: int) -> None:
        if stream_id > self._last_id or stream_id & 1 == 0:
            raise ConnectionFaultError(
                ErrorCodes.PROTOCOL_ERROR, f"it used stream {stream_id}, which nobody has opened"
            )

    def _receive_data(
        self, data: bytes, start: int, length: int, flags: int, stream_id: int
    ) -> None:
        self.pings.allowed = True
        # Credit for the connection comes back on receipt: only a stream's own window holds the
        # server back, so a consumer that is away never blocks the others.
        self._uncredited += length
        if self._uncredited >= self._credit_batch:
            self.output += window_update(0, self._uncredited)
            self._uncredited = 0
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_stream(stream_id)  # ours once, else: the frame crossed our reset
            return
        if length:
            stream.window -= length
            stop = start + length
            if flags & PADDED:
                padding = data[start] + 1  # with the byte that says so
                if padding > length:
                    raise ConnectionFaultError(
                        ErrorCodes.PROTOCOL_ERROR, "it sent padding longer than its frame"
                    )
                self.credit(stream, padding)  # nobody will read it
                start, stop = start + 1, stop - padding + 1
            stream.buffer += data[start:stop]
            stream.received += stop - start
            if (
                stream.window < 0 or stream.head is None or stream.expected_length is not None
            ) and (wrong := self._find_fault(stream)) is not None:
                self._fail(stream, *wrong)
                return
            if stream.signal is not None and stream.due:
                stream.notify()
        if flags & END_STREAM:
            self._complete(stream)

    def _find_fault(self, stream: H2Stream) -> tuple[ErrorCodes, str] | None:
        if stream.window < 0:
            return ErrorCodes.FLOW_CONTROL_ERROR, "more data than the stream's window allows"
        if stream.head is None:
            return ErrorCodes.PROTOCOL_ERROR, "data before the response's headers"
        if stream.expected_length is not None and stream.received > stream.expected_length:
            return ErrorCodes.PROTOCOL_ERROR, "more data than its content-length said"
        return None

    def _receive_other(self, frame: bytes, kind: int, flags: int, stream_id: int) -> None:
        if self._block is not None:
            self._block.add(kind, stream_id, frame, flags)
            self._end_block(self._block)
        elif kind == HEADERS:
            self._check_stream(stream_id)
            self.pings.allowed = True
            limit = self._config.max_header_list_size + MAX_FRAME_SIZE
            self._block = HeaderBlock(stream_id, frame, flags, limit)
            self._end_block(self._block)
        elif kind == PING:
            self._receive_ping(frame, flags, stream_id)
        elif kind == GOAWAY:
            self._receive_goaway(frame, stream_id)
        elif kind == RST_STREAM:
            self._check_stream(stream_id)
            self._receive_reset(stream_id, _number(frame))
        elif kind == WINDOW_UPDATE:
            self._receive_window_update(stream_id, _number(frame) & LARGEST_WINDOW)
        elif kind == SETTINGS:
            self._receive_settings(frame, flags, stream_id)
        elif kind in (CONTINUATION, PUSH_PROMISE):
            what = "continued a header block that never began"
            raise ConnectionFaultError(
                ErrorCodes.PROTOCOL_ERROR,
                f"it {what if kind == CONTINUATION else 'pushed, which it was told not to do'}",
            )
        # What is left is advisory (PRIORITY), or an extension nobody asked for.

    def _end_block(self, block: HeaderBlock) -> None:
        if not block.complete:
            return
        self._block = None
        headers = block.decode(self._decoder)
        stream = self.streams.get(block.stream_id)
        if stream is None:
            return  # the block crossed our reset
        try:
            if stream.head is None:
                self._receive_head(stream, headers, block.end_stream)
            elif block.end_stream:
                stream.trailers.extend(read_trailers(headers))
            else:
                raise MalformedError("headers in the middle of a body")
        except MalformedError as fault:
            self._fail(stream, ErrorCodes.PROTOCOL_ERROR, str(fault))
            return
        if block.end_stream:
            self._complete(stream)

    def _receive_head(
        self, stream: H2Stream, headers: Iterable[tuple[bytes, bytes]], last: bool
    ) -> None:
        status, fields = read_head(headers)
        if status < 200:
            if last or status == 101:
                raise MalformedError(f"the status {status}" + " at the end of a stream" * last)
            stream.informational += 1
            if stream.informational > MAX_INFORMATIONAL:
                self._fail(stream, ErrorCodes.ENHANCE_YOUR_CALM, "endless 1xx responses")
            return
        length = content_length(fields)
        if stream.method != b"HEAD" and status not in _BODILESS_STATUS:
            stream.expected_length = length
        self.got_response = True
        stream.head = (status, fields)
        stream.notify()

    def _receive_settings(self, frame: bytes, flags: int, stream_id: int) -> None:
        if stream_id or (flags & ACK and len(frame) > HEADER_SIZE):
            raise ConnectionFaultError(ErrorCodes.PROTOCOL_ERROR, "it sent malformed SETTINGS")
        if flags & ACK:
            return
        peer, before = self._peer, self._peer.initial_window_size
        peer.update(frame[HEADER_SIZE:])
        self._encoder.header_table_size = peer.header_table_size
        if (change := peer.initial_window_size - before) != 0:
            for stream in self.streams.values():
                self._widen(stream, change)
        self.output += HEADER.pack(SETTINGS, ACK, 0)
        self.settled = True
        self._wake_senders(0)
        self._on_slot()

    def _widen(self, stream: H2Stream, change: int) -> None:
        stream.send_window += change
        if stream.send_window > LARGEST_WINDOW:
            raise ConnectionFaultError(
                ErrorCodes.FLOW_CONTROL_ERROR, "it made a stream's window larger than one may be"
            )

    def _receive_window_update(self, stream_id: int, size: int) -> None:
        if not stream_id:
            self._send_window += size
            if not size or self._send_window > LARGEST_WINDOW:
                raise ConnectionFaultError(
                    ErrorCodes.FLOW_CONTROL_ERROR if size else ErrorCodes.PROTOCOL_ERROR,
                    f"it widened the connection's window by {size}, to {self._send_window}",
                )
            self._wake_senders(0)
            return
        self._check_stream(stream_id)
        stream = self.streams.get(stream_id)
        if stream is None:
            return  # it crossed the end of the stream
        stream.send_window += size
        if not size:
            self._fail(stream, ErrorCodes.PROTOCOL_ERROR, "a WINDOW_UPDATE of nothing")
        elif stream.send_window > LARGEST_WINDOW:
            self._fail(stream, ErrorCodes.FLOW_CONTROL_ERROR, "a window larger than one may be")
        else:
            self._wake_senders(stream_id)

    def _receive_reset(self, stream_id: int, code: int) -> None:
        stream = self.streams.pop(stream_id, None)
        if stream is None:
            return  # it crossed ours, or the end of the stream
        stream.fail(
            httpx2.RemoteProtocolError(f"The server reset the stream ({code_name(code)})."),
            unprocessed=code == ErrorCodes.REFUSED_STREAM,
        )
        self._on_slot()

    def _receive_ping(self, frame: bytes, flags: int, stream_id: int) -> None:
        if len(frame) != HEADER_SIZE + 8 or stream_id:
            raise ConnectionFaultError(ErrorCodes.FRAME_SIZE_ERROR, "it sent a malformed PING")
        if self.pings.receive(frame[HEADER_SIZE:], flags):
            self.end_ping()

    def _receive_goaway(self, frame: bytes, stream_id: int) -> None:
        if len(frame) < HEADER_SIZE + 8 or stream_id:
            raise ConnectionFaultError(ErrorCodes.FRAME_SIZE_ERROR, "it sent a malformed GOAWAY")
        last_id, code = struct.unpack_from(">II", frame, HEADER_SIZE)
        last_id &= 0x7FFF_FFFF
        self.draining = True
        name = code_name(code)
        detail = f": {frame[17:117].decode('utf-8', 'replace')}" if len(frame) > 17 else ""
        self.farewell = f" (GOAWAY {name}{detail})"
        for stream in [stream for stream in self.streams.values() if stream.id > last_id]:
            del self.streams[stream.id]
            self._forget(stream)
            stream.fail(
                httpx2.RemoteProtocolError(
                    f"The server is closing the connection{self.farewell} and did not process "
                    "the request."
                ),
                unprocessed=True,
            )
        self._on_slot()

    def _complete(self, stream: H2Stream) -> None:
        """The server has sent all it will."""
        expected = stream.expected_length
        if expected is not None and stream.received != expected:
            self._fail(
                stream,
                ErrorCodes.PROTOCOL_ERROR,
                f"{stream.received} bytes of body; its content-length said {expected}",
            )
            return
        if stream.head is None:
            self._fail(stream, ErrorCodes.PROTOCOL_ERROR, "an end without response headers")
            return
        stream.ended = True
        stream.notify()
        del self.streams[stream.id]
        self._forget(stream)
        self._on_slot()

    def _fail(self, stream: H2Stream, code: ErrorCodes, what: str) -> None:
        """End a stream whose rules the server broke; the connection goes on."""
        self.reset(stream, code)
        stream.fail(httpx2.RemoteProtocolError(f"The server sent {what}."))
        self._on_slot()

    def _wake_senders(self, stream_id: int) -> None:
        for stream in list(self.blocked):
            if stream_id in (0, stream.id):
                stream.notify()


def _number(frame: bytes) -> int:
    """The payload of a frame that is one number."""
    if len(frame) != HEADER_SIZE + _NUMBER.size:
        raise ConnectionFaultError(
            ErrorCodes.FRAME_SIZE_ERROR, f"it sent a frame of {len(frame)} bytes for a number"
        )
    number: int = _NUMBER.unpack_from(frame, HEADER_SIZE)[0]
    return number
