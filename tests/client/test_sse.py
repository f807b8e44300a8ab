"""The event-stream parser, against a naive reading of the grammar, over any split of the bytes."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fullbore.transport.sse import Event, EventStreamParser, EventTooLargeError


def reference(stream: bytes) -> list[tuple[str, str, str]]:
    """WHATWG HTML 9.2.6, step by step over the whole stream: (type, data, last event id)."""
    text = stream.decode("utf-8", "replace").removeprefix("\ufeff")
    lines = re.split("\r\n|\r|\n", text)
    lines.pop()  # not ended by a line end: discarded
    events, data, kind, last_id = [], "", "", ""
    for line in lines:
        if line == "":
            if data:
                events.append((kind or "message", data.removesuffix("\n"), last_id))
            data, kind = "", ""
            continue
        if line.startswith(":"):
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data += value + "\n"
        elif name == "event":
            kind = value
        elif name == "id" and "\0" not in value:
            last_id = value
    return events


def parse(pieces: list[bytes]) -> list[tuple[str, str, str]]:
    """Feed the pieces to one parser."""
    parser = EventStreamParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [(event.event, event.text, event.id) for event in events]


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    """Cut a stream at these places, taken modulo its length."""
    marks = sorted({place % (len(stream) + 1) for place in places} | {0, len(stream)})
    return [stream[a:b] for a, b in itertools.pairwise(marks)]


tokens = st.sampled_from(
    [
        "data",
        "event",
        "id",
        "retry",
        ":",
        " ",
        "\n",
        "\r",
        "\r\n",
        "\n\n",
        "x",
        "é",
        "😀",
        "\x00",
        "data: {}\n\n",
        "data:",
        "data: ",
        "\ufeff",
        ": keep-alive\n",
        "event: error\n",
        "id: 7\n",
    ]
)


@given(st.lists(tokens, max_size=40), st.lists(st.integers(0, 10_000), max_size=20))
@example(["data: a", "\r", "\n", "\r", "\n"], [8, 9])
@example(["\ufeff", "data: a\n\n"], [1, 2])
@example(["data: {}\n\n", "data: {}\n\n", "event: error\n", "data: {}\n\n"], [])
def test_any_split_gives_the_events_of_the_grammar(parts: list[str], places: list[int]) -> None:
    """Whatever the bytes and however they arrive, the events are those of the reference."""
    stream = "".join(parts).encode()
    assert parse(cut(stream, places)) == reference(stream)


@given(st.lists(tokens, max_size=20))
def test_byte_by_byte(parts: list[str]) -> None:
    """The hardest split of all."""
    stream = "".join(parts).encode()
    assert parse([stream[i : i + 1] for i in range(len(stream))]) == reference(stream)


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        pytest.param(b"data: a\ndata: b\n\n", b"a\nb", id="two data lines"),
        pytest.param(b"data\n\n", b"", id="a field without a colon"),
        pytest.param(b"data:  a\n\n", b" a", id="only one space goes"),
        pytest.param(b": ping\n\ndata: a\n\n", b"a", id="a comment"),
        pytest.param(b"data: a\r\rdata: ignored", b"a", id="carriage returns"),
    ],
)
def test_the_grammar_by_example(stream: bytes, data: bytes) -> None:
    """Cases of the grammar that endpoints do send."""
    assert [event.data for event in EventStreamParser().feed(stream)] == [data]


def test_event_type_and_id_go_with_their_event() -> None:
    """The type holds for one event, the id until another one comes."""
    parser = EventStreamParser()
    events = parser.feed(b"event: error\nid: 7\ndata: a\n\ndata: b\n\n")
    assert events == [Event(b"a", "error", "7"), Event(b"b", "message", "7")]


def test_retry_is_kept_and_nonsense_is_not() -> None:
    """``retry`` takes digits alone."""
    parser = EventStreamParser()
    parser.feed(b"retry: 1500\nretry: soon\n\n")
    assert parser.retry == 1500


@pytest.mark.parametrize("ending", [b"", b"\n"], ids=["one endless line", "endless lines"])
def test_an_event_that_does_not_end_is_refused(ending: bytes) -> None:
    """A hostile server cannot fill the memory."""
    parser = EventStreamParser(max_event_bytes=1000)
    with pytest.raises(EventTooLargeError, match="1000 bytes"):
        for _ in range(20):
            parser.feed(b"data: " + b"x" * 94 + ending)


def test_many_events_may_be_larger_than_one_may_be() -> None:
    """The limit is on an unfinished event, not on the stream."""
    parser = EventStreamParser(max_event_bytes=1000)
    for _ in range(50):
        assert len(parser.feed(b": hi\ndata: " + b"x" * 90 + b"\n\n")) == 1
