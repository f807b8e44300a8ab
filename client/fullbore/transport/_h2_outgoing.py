"""The outgoing half of an HTTP/2 connection without I/O: requests, resets, credit (RFC 9113).

Owns the stream table, the queue of bytes to send, and what the server allows us: the number of
streams, and the windows for request bodies. Knows nothing of sockets or retries.
"""

from __future__ import annotations

from collections.abc import Callable

from h2.errors import ErrorCodes

from . import _h2_settings as settings
from ._h2_config import HTTP2Config
from ._h2_encoder import StatelessEncoder
from ._h2_frames import (
    DATA,
    END_STREAM,
    HEADER,
    LAST_STREAM_ID,
    MAX_FRAME_SIZE,
    goaway,
    header_frames,
    rst_stream,
    window_update,
)
from ._h2_pings import Pings
from ._h2_stream import H2Stream, Headers, Link

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW = 65_535


class Outgoing:
    """What this side says on a connection.

    Every method is synchronous and leaves the connection consistent, so that no cancellation can
    fall into the middle of one.

    Attributes:
        streams: Streams the server may still send on, by id.
        blocked: Streams whose request body waits for the server's window or for the socket.
        output: Bytes to be sent.
        settled: The server's SETTINGS have arrived.
        draining: No new streams: GOAWAY received, or stream ids used up.
        dead: Nothing may be said any more.
    """

    def __init__(self, config: HTTP2Config, link: Link, on_slot: Callable[[], None]) -> None:
        self._config = config
        self._link = link  # what streams hold on to: the lane that owns this connection
        self._on_slot = on_slot  # called whenever a stream has ended or the limit has changed
        self.streams: dict[int, H2Stream] = {}
        self.blocked: set[H2Stream] = set()  # senders that wait for the server's window
        self.output = bytearray()
        self.handed_out = 0  # bytes of output given to the socket so far
        self.settled = False  # the server's SETTINGS have arrived
        self.draining = False  # GOAWAY received, or stream ids used up: no new streams
        self.dead = False
        self.pings = Pings(self.output.extend, link.runtime.clock)
        self._last_id = -1  # ids of a client's streams are odd
        self._peer = settings.PeerSettings()
        self._encoder = StatelessEncoder()
        self._send_window = DEFAULT_WINDOW  # of the connection

    # What the pool asks

    @property
    def limit(self) -> int:
        """Most streams at once: the server's limit or ours, whichever is smaller."""
        if not self.settled:
            return 0
        return min(self._peer.max_concurrent_streams, self._config.max_streams_per_lane)

    @property
    def load(self) -> int:
        """Streams the server may count as open: ours, and those whose reset is unconfirmed."""
        return len(self.streams) + self.pings.unconfirmed

    # Out

    def start(self) -> None:
        """Queue the preface, our SETTINGS and the connection's receive window."""
        self.output += PREFACE
        self.output += settings.settings_frame(
            {
                settings.ENABLE_PUSH: 0,
                settings.INITIAL_WINDOW_SIZE: self._config.stream_window,
                settings.MAX_FRAME_SIZE: MAX_FRAME_SIZE,
                settings.MAX_HEADER_LIST_SIZE: self._config.max_header_list_size,
            }
        )
        if (wider := self._config.connection_window - DEFAULT_WINDOW) > 0:
            self.output += window_update(0, wider)

    def open(self, headers: Headers, method: bytes, *, end_stream: bool) -> H2Stream:
        """Start a request. The caller has made sure that `load` is below `limit`."""
        stream_id = self._last_id + 2
        stream = H2Stream(
            self._link,
            stream_id,
            method,
            self._config.stream_window,
            self.handed_out + len(self.output),
        )
        stream.send_window = self._peer.initial_window_size
        block = self._encoder.encode(headers)
        self.output += header_frames(
            stream_id, block, self._peer.max_frame_size, end_stream=end_stream
        )
        stream.sent = end_stream
        self.streams[stream_id] = stream
        self._last_id = stream_id
        if stream_id >= LAST_STREAM_ID:
            self.draining = True
        return stream

    def send_room(self, stream: H2Stream) -> int:
        """Bytes of body the server lets us send now, in one frame."""
        return min(stream.send_window, self._send_window, self._peer.max_frame_size)

    def send_data(self, stream: H2Stream, data: bytes | memoryview, *, end_stream: bool) -> None:
        """Queue one DATA frame of at most `send_room` bytes."""
        size = len(data)
        stream.send_window -= size
        self._send_window -= size
        self.output += HEADER.pack(size << 8 | DATA, END_STREAM if end_stream else 0, stream.id)
        self.output += data
        stream.sent = end_stream

    def credit(self, stream: H2Stream, size: int) -> None:
        """Let the server send `size` more bytes; a frame goes out once half a window is due."""
        stream.uncredited += size
        if stream.uncredited * 2 >= self._config.stream_window and stream.id in self.streams:
            stream.window += stream.uncredited
            self.output += window_update(stream.id, stream.uncredited)
            stream.uncredited = 0

    def reset(self, stream: H2Stream, code: ErrorCodes) -> bool:
        """Abort an open stream; False if it is over already."""
        if self.dead or self.streams.pop(stream.id, None) is None:
            return False
        self.output += rst_stream(stream.id, code)
        self.pings.count_reset()
        return True

    def end_ping(self) -> None:
        """The PING that is out was answered, or need not be."""
        self.pings.end()
        self._on_slot()

    def goodbye(self) -> None:
        """Reset what is open and queue a GOAWAY."""
        if not self.dead:
            for stream_id in self.streams:
                self.output += rst_stream(stream_id, ErrorCodes.CANCEL)
            self._say_goaway(ErrorCodes.NO_ERROR)

    def take_output(self) -> bytes:
        """Hand out the queued bytes."""
        data = bytes(self.output)
        self.output.clear()
        self.handed_out += len(data)
        return data

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """The connection is gone: end every stream, each with an error of its own."""
        self.dead = self.draining = True
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            # Bytes that never left this process cannot have been acted upon.
            unsent = stream.offset >= self.handed_out
            stream.fail(make_error(), unprocessed=unsent, lost=True)

    def _forget(self, stream: H2Stream) -> None:
        """The server has ended the stream; if we are still sending, it is told that we stop."""
        if not stream.sent:
            self.output += rst_stream(stream.id, ErrorCodes.CANCEL)

    def _say_goaway(self, code: ErrorCodes) -> None:
        self.dead = self.draining = True
        self.output += goaway(code)
