"""The HTTP/1.1 response parser: any split gives the same, and nothing ambiguous gets through."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fullbore.transport._h1_parser import (
    MAX_FIELDS,
    MAX_HEAD,
    MAX_INFORMATIONAL,
    ResponseFaultError,
    ResponseParser,
)

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def parse(data: bytes, *, method: bytes = b"POST", closed: bool = False) -> ResponseParser:
    """Feed a whole response."""
    parser = ResponseParser(method)
    parser.feed(data)
    if closed:
        parser.feed_end()
    return parser


def encode(chunks: list[bytes], extension: bytes, trailers: bytes) -> bytes:
    """Encode a chunked body (RFC 9112, section 7.1)."""
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(c), extension, c) for c in chunks if c)
    return body + b"0" + extension + b"\r\n" + trailers + b"\r\n"


@given(
    chunks=st.lists(st.binary(max_size=40), max_size=6),
    extension=st.sampled_from([b"", b";a=b", b' ; name="x y"']),
    trailers=st.sampled_from([b"", b"X-Sum: 1\r\n", b"A: 1\r\nB: 2\r\n"]),
    places=st.lists(st.integers(0, 400), max_size=12),
    informational=st.integers(0, 2),
)
def test_any_split_of_a_chunked_response_gives_the_same(
    chunks: list[bytes], extension: bytes, trailers: bytes, places: list[int], informational: int
) -> None:
    """Body, trailers, end; the connection can be used again."""
    data = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * informational
    data += CHUNKED + encode(chunks, extension, trailers)
    cuts = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    parser = ResponseParser(b"POST")
    for start, end in itertools.pairwise(cuts):
        assert not parser.complete
        parser.feed(data[start:end])
    assert parser.head == (200, [(b"Transfer-Encoding", b"chunked")])
    assert bytes(parser.body) == b"".join(chunks)
    assert len(parser.trailers) == trailers.count(b"\r\n")
    assert parser.complete
    assert parser.reusable


@given(body=st.binary(max_size=60), places=st.lists(st.integers(0, 120), max_size=8))
def test_any_split_of_a_counted_response_gives_the_same(body: bytes, places: list[int]) -> None:
    """Not a byte too many or too few."""
    data = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    cuts = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    parser = ResponseParser(b"POST")
    for start, end in itertools.pairwise(cuts):
        parser.feed(data[start:end])
    assert bytes(parser.body) == body
    assert parser.complete


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"HTTP/2 200 OK\r\n\r\n", "no HTTP/1.1"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "no HTTP/1.1"),
        (b"HTTP/1.1 200 O\x00K\r\n\r\n", "no HTTP/1.1"),
        (b"<html>", "no HTTP/1.1"),
        (HEAD.replace(b"\r\n", b"\n") + b"\n\r\n\r\n", "no HTTP/1.1"),
        (HEAD + b"A: 1\r\n folded\r\n\r\n", "no header"),
        (HEAD + b"A : 1\r\n\r\n", "no header"),
        (HEAD + b"A\r\n\r\n", "no header"),
        (HEAD + b": x\r\n\r\n", "no header"),
        (HEAD + b"A: 1\nB: 2\r\n\r\n", "no header"),
        (HEAD + b"A: 1\rB: 2\r\n\r\n", "no header"),
        (HEAD + b"A: \x00\r\n\r\n", "no header"),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", "two lengths"),
        (HEAD + b"Content-Length: 5, 5\r\n\r\n", "content-length"),
        (HEAD + b"Content-Length: +5\r\n\r\n", "content-length"),
        (HEAD + b"Content-Length: 0x5\r\n\r\n", "content-length"),
        (HEAD + b"Content-Length: 5_0\r\n\r\n", "content-length"),
        (HEAD + b"Content-Length: -1\r\n\r\n", "content-length"),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "both"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "transfer coding"),
        (HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", "coding"),
        (b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "transfer coding"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "switch of protocols"),
        (CHUNKED + b"\r\n", "without a size"),
        (CHUNKED + b"x\r\n", "without a size"),
        (CHUNKED + b"0x5\r\nhello\r\n", "without a size"),
        (CHUNKED + b"1_0\r\n", "without a size"),
        (CHUNKED + b"+5\r\n", "without a size"),
        (CHUNKED + b"5\nhello\r\n", "without a size"),
        (CHUNKED + b"5;\x00\r\nhello\r\n", "without a size"),
        (CHUNKED + b"11111111111111111\r\n", "without a size"),
        (CHUNKED + b"5\r\nhello!!", "does not end"),
        (CHUNKED + b"5\r\nhello\n\r", "does not end"),
        (CHUNKED + b"0\r\nbad\r\n\r\n", "no header"),
        (CHUNKED + b"5" * 5000, "without a size"),
    ],
    ids=repr,
)
def test_what_two_readers_could_read_differently_is_refused(data: bytes, why: str) -> None:
    """However it is cut."""
    with pytest.raises(ResponseFaultError, match=why):
        parse(data)
    parser = ResponseParser(b"POST")
    with pytest.raises(ResponseFaultError, match=why):
        for i in range(len(data)):
            parser.feed(data[i : i + 1])


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_INFORMATIONAL + 1),
        HEAD + b"".join(b"A%d: x\r\n" % i for i in range(MAX_FIELDS + 1)) + b"\r\n",
        HEAD + b"A: " + b"x" * MAX_HEAD + b"\r\n\r\n",
        HEAD + b"A: " + b"x" * MAX_HEAD,
        CHUNKED + b"0\r\nA: " + b"x" * MAX_HEAD,
    ],
    ids=["1xx", "fields", "head", "a head without end", "trailers"],
)
def test_everything_has_a_limit(data: bytes) -> None:
    """Against a server that never stops."""
    with pytest.raises(ResponseFaultError):
        parse(data)


@pytest.mark.parametrize(
    ("data", "method"),
    [
        (HEAD + b"Content-Length: 5\r\n\r\n", b"HEAD"),
        (CHUNKED, b"HEAD"),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", b"POST"),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"GET"),
        (HEAD + b"Content-Length: 0\r\n\r\n", b"POST"),
    ],
    ids=["HEAD", "HEAD, chunked", "204", "304", "length 0"],
)
def test_responses_without_a_body_end_with_their_head(data: bytes, method: bytes) -> None:
    """Whatever they say of a length."""
    parser = parse(data, method=method)
    assert parser.complete
    assert not parser.body


def test_a_body_may_last_until_the_connection_closes() -> None:
    """Which then cannot be used again."""
    parser = parse(HEAD + b"\r\nhello", closed=True)
    assert bytes(parser.body) == b"hello"
    assert parser.complete
    assert not parser.reusable


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "nothing"),
        (HEAD, "head"),
        (HEAD + b"Content-Length: 9\r\n\r\nhello", "body"),
        (CHUNKED + b"5\r\nhello\r\n", "body"),
        (CHUNKED + b"0\r\n", "body"),
    ],
    ids=["nothing", "half a head", "half a body", "no last chunk", "no end of trailers"],
)
def test_a_response_cut_short_is_not_complete(data: bytes, why: str) -> None:
    """It says how far it got."""
    with pytest.raises(ResponseFaultError, match=why):
        parse(data, closed=True)


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Content-Length: 1\r\nConnection: keep-alive, Close\r\n\r\nx",
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\nConnection: keep-alive\r\n\r\nx",
        HEAD + b"Content-Length: 1\r\n\r\nxHTTP/1.1 200 OK\r\n\r\n",
    ],
    ids=["close", "HTTP/1.0", "more than the response"],
)
def test_some_connections_are_used_once(data: bytes) -> None:
    """The response itself is good."""
    parser = parse(data)
    assert parser.complete
    assert bytes(parser.body) == b"x"
    assert not parser.reusable


def test_equal_lengths_given_twice_are_one() -> None:
    """RFC 9110, section 8.6, allows it."""
    assert parse(HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nok").complete
