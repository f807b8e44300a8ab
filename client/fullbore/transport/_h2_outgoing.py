"""The outgoing half of an HTTP/2 connection without I/O: requests, resets, credit (RFC 9113).

Owns the stream table, the queue of bytes to send, and what the server allows us. `h2` encodes
headers and keeps the send windows. Knows nothing of sockets or retries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import h2.config
import h2.connection
import h2.exceptions
import h2.settings
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from ._h2_config import HTTP2Config
from ._h2_encoder import StatelessEncoder
from ._h2_frames import LAST_STREAM_ID, MAX_FRAME_SIZE, goaway, window_update
from ._h2_pings import Pings
from ._h2_stream import H2Stream, Headers, Link


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
        self._last_id = 0
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=True,
                header_encoding=None,
                # Requests arrive here normalised and checked; see _h2_request.
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )

    # What the pool asks

    @property
    def limit(self) -> int:
        """Most streams at once: the server's limit or ours, whichever is smaller."""
        if not self.settled:
            return 0
        server: int = self._h2.remote_settings.max_concurrent_streams
        return min(server, self._config.max_streams_per_lane)

    @property
    def load(self) -> int:
        """Streams the server may count as open: ours, and those whose reset is unconfirmed."""
        return len(self.streams) + self.pings.unconfirmed

    # Out

    def start(self) -> None:
        """Queue the preface, our SETTINGS and the connection's receive window."""
        self._h2.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: self._config.stream_window,
                SettingCodes.MAX_FRAME_SIZE: MAX_FRAME_SIZE,
                SettingCodes.MAX_HEADER_LIST_SIZE: self._config.max_header_list_size,
            },
        )
        self._h2.encoder = StatelessEncoder()  # type: ignore[assignment]
        self._h2.decoder.max_header_list_size = self._config.max_header_list_size
        self._h2.initiate_connection()
        self._collect()
        if (wider := self._config.connection_window - 65_535) > 0:
            self.output += window_update(0, wider)

    def open(self, headers: Headers, method: bytes, *, end_stream: bool) -> H2Stream:
        """Start a request. The caller has made sure that `load` is below `limit`."""
        stream_id = self._h2.get_next_available_stream_id()
        stream = H2Stream(
            self._link,
            stream_id,
            method,
            self._config.stream_window,
            self.handed_out + len(self.output),
        )
        self._h2.send_headers(stream_id, headers, end_stream=end_stream)
        self._collect()
        stream.sent = end_stream
        self.streams[stream_id] = stream
        self._last_id = stream_id
        if stream_id >= LAST_STREAM_ID:
            self.draining = True
        return stream

    def send_room(self, stream: H2Stream) -> int:
        """Bytes of body the server lets us send now, in one frame."""
        window: int = self._h2.local_flow_control_window(stream.id)
        return min(window, self._h2.max_outbound_frame_size)

    def send_data(self, stream: H2Stream, data: bytes | memoryview, *, end_stream: bool) -> None:
        """Queue one DATA frame of at most `send_room` bytes."""
        self._h2.send_data(stream.id, data, end_stream=end_stream)
        self._collect()
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
        self._reset_in_h2(stream.id, code)
        self._collect()
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
                self._reset_in_h2(stream_id, ErrorCodes.CANCEL)
            self._collect()
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
        # h2 has not seen the stream's DATA and so not its end. A reset that is thrown away makes
        # it drop the stream. Only a request that we are still sending needs a real one.
        self._reset_in_h2(stream.id, ErrorCodes.CANCEL)
        if stream.sent:
            self._h2.clear_outbound_data_buffer()
        else:
            self._collect()

    def _reset_in_h2(self, stream_id: int, code: ErrorCodes) -> None:
        # h2 has closed the stream itself if headers, a trailer or a bad window update ended it.
        with contextlib.suppress(h2.exceptions.StreamClosedError):
            self._h2.reset_stream(stream_id, code)

    def _collect(self) -> None:
        self.output += self._h2.data_to_send()

    def _say_goaway(self, code: ErrorCodes) -> None:
        self.dead = self.draining = True
        self.output += goaway(code)
