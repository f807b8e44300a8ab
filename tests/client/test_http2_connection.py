"""The protocol state without I/O: whatever way bytes are cut, the streams end up the same."""

from __future__ import annotations

from itertools import pairwise

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import hpack
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbore._h2_server import frame
from fullbore.transport._h2_config import HTTP2Config
from fullbore.transport._h2_connection import H2Connection
from fullbore.transport._h2_stream import H2Stream
from fullbore.transport._runtime import Runtime

REQUEST = [(b":method", b"GET"), (b":authority", b"a"), (b":scheme", b"http"), (b":path", b"/")]


class ManualLink:
    """A lane's part, with the wakes and the alarms written down."""

    def __init__(self, config: HTTP2Config) -> None:
        self.woken: list[object] = []
        self.runtime = Runtime(
            clock=lambda: 0.0,
            signal=object,
            wake=self.woken.append,
            spawn=lambda run: None,
            post=lambda call: None,
            is_current=lambda: True,
        )
        self.connection = H2Connection(config, self, lambda: None)

    def credit(self, stream: H2Stream, size: int) -> None:
        self.connection.credit(stream, size)

    def abandon(self, stream: H2Stream) -> None:
        raise AssertionError

    def arm(self, deadline: float) -> None:
        pass


class Pair:
    """A client connection and h2's server, joined by function calls."""

    def __init__(self, **config: int) -> None:
        self.link = ManualLink(HTTP2Config(**config))
        self.client = self.link.connection
        self.server = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding=None)
        )
        self.server.initiate_connection()
        self.client.start()
        for _ in range(2):
            self.to_server()
            self.client.receive(self.server.data_to_send())

    def to_server(self) -> list[h2.events.Event]:
        return self.server.receive_data(self.client.take_output())

    def open(self) -> H2Stream:
        stream = self.client.open(REQUEST, b"GET", end_stream=True)
        self.to_server()
        return stream


def answers(server: h2.connection.H2Connection) -> bytes:
    """Interleaved responses to streams 1, 3 and 5, with all that may occur in between."""
    server.send_headers(1, [(b":status", b"103"), (b"link", b"x")])
    server.send_headers(1, [(b":status", b"200"), (b"big", b"h" * 17_000)])  # needs CONTINUATION
    server.send_headers(3, [(b":status", b"404"), (b"content-length", b"6")])
    server.send_data(1, b"one", pad_length=7)
    server.ping(b"12345678")
    server.send_data(3, b"not")
    server.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 7})
    server.send_data(3, b"hin", end_stream=True)
    server.send_data(1, b"two")
    server.reset_stream(5, 2)
    server.send_headers(1, [(b"trailer", b"t")], end_stream=True)
    return server.data_to_send()


@settings(deadline=None, max_examples=40)
@given(cuts=st.lists(st.integers(1, 21_000), max_size=40))
def test_any_split_of_the_bytes_means_the_same(cuts: list[int]) -> None:
    """Streams, limit and answers do not depend on how the socket cuts the bytes."""
    pair = Pair()
    one, two, three = (pair.open() for _ in range(3))
    data = answers(pair.server)
    edges = [0, *sorted(cut for cut in set(cuts) if cut < len(data)), len(data)]
    for start, stop in pairwise(edges):
        pair.client.receive(data[start:stop])
    assert one.head is not None
    assert one.head[0] == 200
    assert (one.take(), one.ended, one.error) == (b"onetwo", True, None)
    assert one.trailers == [(b"trailer", b"t")]
    assert (two.take(), two.ended, two.error) == (b"nothin", True, None)
    assert isinstance(three.error, httpx2.RemoteProtocolError)
    assert pair.client.streams == {}
    assert pair.client.limit == 7
    events = pair.to_server()
    assert [type(event) for event in events] == [
        h2.events.PingAckReceived,
        h2.events.SettingsAcknowledged,
    ]


@settings(deadline=None, max_examples=40)
@given(reads=st.lists(st.integers(1, 5_000), min_size=1, max_size=60))
def test_windows_are_kept_exactly(reads: list[int]) -> None:
    """The server's view of a stream's window and ours agree, and it is never overrun."""
    pair = Pair(stream_window=1_000)
    stream = pair.open()
    pair.server.send_headers(1, [(b":status", b"200")])
    for size in reads:
        room = pair.server.local_flow_control_window(1)
        size = min(size, room)
        pair.server.send_data(1, b"x" * size)
        pair.client.receive(pair.server.data_to_send())
        assert len(stream.buffer) <= 1_000
        assert stream.window == room - size
        stream.take()
        pair.to_server()
        assert pair.server.local_flow_control_window(1) == stream.window
        assert stream.window + stream.uncredited == 1_000
        assert stream.window > 0, "the server would be stuck although everything has been read"


_NAMES = st.from_regex(r"[a-z0-9!#$%&'*+.^_`|~-]{1,12}", fullmatch=True).map(str.encode)
_VALUES = st.one_of(
    st.sampled_from([b"", b"text/event-stream", b"a; b=c"]),
    st.from_regex(r"([!-~\x80-\xff]([ -~]*[!-~])?)?", fullmatch=True).map(
        lambda text: text.encode("latin-1")
    ),
)
_FIELDS = st.lists(
    st.tuples(_NAMES.filter(lambda name: name not in (b"te", b"connection", b"upgrade")), _VALUES),
    max_size=8,
)


@settings(deadline=None, max_examples=60)
@given(responses=st.lists(st.tuples(_FIELDS, _FIELDS), min_size=1, max_size=5))
def test_headers_arrive_as_h2_sent_them(
    responses: list[tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]],
) -> None:
    """Whatever its encoder does with its table from one response to the next."""
    pair = Pair()
    for fields, trailers in responses:
        stream = pair.open()
        pair.server.send_headers(stream.id, [(b":status", b"200"), *fields])
        if trailers:
            pair.server.send_headers(stream.id, trailers, end_stream=True)
        else:
            pair.server.end_stream(stream.id)
        pair.client.receive(pair.server.data_to_send())
        assert stream.head == (200, fields)
        assert (stream.trailers, stream.ended, stream.error) == (trailers, True, None)


_WRONG_NAMES = [b"", b"X-Upper", b"a b", b"a:b", b":path", b":status", b"\x7f", b"\xe9", b"a\0"]
_WRONG_NAMES += [b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding"]
_ANY_FIELD = st.one_of(
    st.tuples(_NAMES.filter(lambda name: name != b"te"), _VALUES),
    st.tuples(_NAMES.filter(lambda name: name != b"te"), st.binary(max_size=5)),
    st.tuples(st.sampled_from(_WRONG_NAMES), st.sampled_from([b"", b"200", b"x"])),
    st.tuples(st.just(b"content-length"), st.sampled_from([b"0", b"00", b"7", b"x", b""])),
)


def read_by_h2(block: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]] | None:
    """What an h2 client of its own makes of a response's header block; None if it refuses it."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
    client.initiate_connection()
    client.send_headers(1, REQUEST, end_stream=True)
    client.receive_data(frame(0x4, 0, 0))
    try:
        events = client.receive_data(frame(0x1, 0x4, 1, hpack.Encoder().encode(block)))
    except h2.exceptions.ProtocolError:
        return None
    received = [event for event in events if isinstance(event, h2.events.ResponseReceived)]
    return [(bytes(name), bytes(value)) for name, value in received[0].headers]


@settings(deadline=None, max_examples=150)
@given(
    responses=st.lists(
        st.tuples(
            st.lists(_ANY_FIELD, max_size=5),
            st.sampled_from([0, 64, 500, 4_096]),  # the table of the server's encoder
            st.booleans(),  # Huffman
            st.booleans(),  # we have reset the stream by then
        ),
        min_size=1,
        max_size=6,
    )
)
def test_header_blocks_mean_what_they_mean_to_h2(
    responses: list[tuple[list[tuple[bytes, bytes]], int, bool, bool]],
) -> None:
    """Refused alike and read alike; one refused, or on a stream that we have reset, leaves the
    connection's table in step for those that follow."""
    pair, encoder = Pair(), hpack.Encoder()
    for fields, table_size, huffman, given_up in responses:
        stream = pair.client.open(REQUEST, b"GET", end_stream=True)
        if given_up:
            pair.client.reset(stream, h2.errors.ErrorCodes.CANCEL)
        block = [(b":status", b"200"), *fields]
        encoder.header_table_size = table_size
        pair.client.receive(frame(0x1, 0x4, stream.id, encoder.encode(block, huffman)))
        wanted = read_by_h2(block)
        if given_up:
            assert (stream.head, stream.error) == (None, None)
        elif wanted is None:
            assert isinstance(stream.error, httpx2.RemoteProtocolError)
        else:
            assert (stream.head, stream.error) == ((200, wanted[1:]), None)


@settings(deadline=None, max_examples=60)
@given(
    fields=_FIELDS,
    cuts=st.lists(st.integers(0, 80), max_size=6),
    padding=st.none() | st.integers(0, 30),
    priority=st.booleans(),
)
def test_any_framing_of_a_header_block_means_the_same(
    fields: list[tuple[bytes, bytes]], cuts: list[int], padding: int | None, priority: bool
) -> None:
    """Frames may be empty, the first one too; padding and priority are the first one's alone."""
    block = hpack.Encoder().encode([(b":status", b"200"), *fields])
    edges = [0, *sorted(min(cut, len(block)) for cut in cuts), len(block)]
    first, *others = [block[start:stop] for start, stop in pairwise(edges)]
    flags = 0x1 | (0x20 if priority else 0) | (0 if padding is None else 0x8)
    first = b"\0\0\0\0\x10" * priority + first
    if padding is not None:
        first = bytes([padding]) + first + b"\0" * padding
    frames = [frame(0x1, flags | (0 if others else 0x4), 1, first)]
    for number, piece in enumerate(others, 1):
        frames.append(frame(0x9, 0x4 if number == len(others) else 0, 1, piece))
    pair = Pair()
    stream = pair.open()
    pair.client.receive(b"".join(frames))
    assert (stream.head, stream.ended, stream.error) == ((200, fields), True, None)


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 40_000), max_size=8),
    windows=st.lists(st.integers(0, 90_000), min_size=1, max_size=5),
)
def test_bodies_keep_within_the_servers_windows(sizes: list[int], windows: list[int]) -> None:
    """h2 raises when a byte too many arrives; the windows change under way, and may be negative."""
    pair = Pair()
    stream = pair.client.open(REQUEST, b"POST", end_stream=False)
    sent = received = 0

    def deliver() -> int:
        return sum(
            len(event.data)
            for event in pair.to_server()
            if isinstance(event, h2.events.DataReceived)
        )

    for turn, size in enumerate(sizes):
        while size and (room := pair.client.send_room(stream)) > 0:
            piece = min(size, room)
            pair.client.send_data(stream, b"x" * piece, end_stream=False)
            sent, size = sent + piece, size - piece
        received += deliver()
        setting = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE
        pair.server.update_settings({setting: windows[turn % len(windows)]})
        pair.server.increment_flow_control_window(1 + turn * 10_000)
        pair.client.receive(pair.server.data_to_send())
        received += deliver()
    assert sent == received


def test_streams_that_have_ended_are_forgotten() -> None:
    """A thousand requests on one connection leave nothing behind."""
    pair = Pair()
    for number in range(1_000):
        pair.open()
        stream_id = 2 * number + 1
        pair.server.send_headers(stream_id, [(b":status", b"200")])
        pair.server.send_data(stream_id, b"x", end_stream=True)
        pair.client.receive(pair.server.data_to_send())
        assert pair.client.load == 0
        assert pair.client.take_output() == b""
    assert not pair.client.streams


def test_the_request_is_unprocessed_if_it_never_left() -> None:
    """A connection that dies with a request still queued lets it be sent again, another's not."""
    pair = Pair()
    sent = pair.open()
    queued = pair.client.open(REQUEST, b"GET", end_stream=True)
    pair.client.fail_all(lambda: httpx2.ReadError("gone"))
    assert (sent.unprocessed, sent.lost) == (False, True)
    assert (queued.unprocessed, queued.lost) == (True, True)
    assert sent.error is not queued.error


def test_pings_confirm_resets_one_round_trip_at_a_time() -> None:
    """Slots of reset streams come back with the answer to a PING sent after them."""
    pair = Pair()
    first, second, third = (pair.open() for _ in range(3))
    pair.client.reset(first, h2.errors.ErrorCodes.CANCEL)
    pair.client.reset(second, h2.errors.ErrorCodes.CANCEL)
    assert pair.client.load == 3
    pair.to_server()
    answer = pair.server.data_to_send()
    pair.server.send_headers(5, [(b":status", b"200")])  # the server is heard of: PINGs are fine
    pair.client.receive(pair.server.data_to_send() + answer)
    assert pair.client.load == 2, "the second reset came after the first PING"
    pair.to_server()
    pair.client.receive(pair.server.data_to_send())
    assert pair.client.load == 1
    assert third.head is not None


def test_no_second_ping_before_the_server_was_heard() -> None:
    """Cancelling again and again must not look like a PING flood to strict servers."""
    pair = Pair()
    for _ in range(10):
        stream = pair.open()
        pair.client.reset(stream, h2.errors.ErrorCodes.CANCEL)
        events = pair.to_server()
        pair.client.receive(pair.server.data_to_send())
        pings = sum(isinstance(event, h2.events.PingReceived) for event in events)
        assert pings == (stream.id == 1)
    assert pair.client.load == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_lanes": 0},
        {"stream_window": 0},
        {"idle_expiry": 0},
        {"max_replays": -1},
        {"max_streams_per_lane": 1_000_000},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_config_is_checked(wrong: dict[str, int]) -> None:
    """A number that cannot work is refused by name."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HTTP2Config(**wrong)
