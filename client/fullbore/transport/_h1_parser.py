"""An HTTP/1.1 response from bytes, without I/O (RFC 9112): strict, so that nobody can smuggle.

Owns the grammar and its limits. What two readers could understand differently is refused: bare
line feeds, folded headers, a length given twice or in two ways, any transfer coding but `chunked`.
Knows nothing of sockets, requests or reuse beyond "may the connection be used again".
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

Headers = list[tuple[bytes, bytes]]

MAX_HEAD: Final = 65_536
"""Bytes of a response's head, and of its trailers."""
MAX_FIELDS: Final = 256
MAX_CHUNK_LINE: Final = 4_096
"""Bytes of a chunk's size line; extensions are ignored and there is no use for long ones."""
MAX_INFORMATIONAL: Final = 64

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\x00-\x08\x0a-\x1f\x7f]*)?")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_BAD_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?\r\n")
_LENGTH = re.compile(rb"[0-9]{1,18}")


class ResponseFaultError(Exception):
    """What the server sent is no HTTP/1.1 response, or one that is not safe to read."""


class ResponseParser:
    """Takes one response in, piece by piece.

    Attributes:
        head: Status and headers of the final response, once they are there.
        body: What has arrived of the body and has not been taken.
        trailers: Header fields after a chunked body.
        complete: Whether the response has ended.
        reusable: Whether the connection may carry another request, once it is complete.
        began: Whether a single byte of any response has arrived.
    """

    __slots__ = (
        "_informational",
        "_left",
        "_method",
        "_partial",
        "_read",
        "began",
        "body",
        "complete",
        "head",
        "reusable",
        "trailers",
    )

    def __init__(self, method: bytes) -> None:
        self.head: tuple[int, Headers] | None = None
        self.body = bytearray()
        self.trailers: Headers = []
        self.complete = False
        self.reusable = False
        self.began = False
        self._method = method
        self._partial = b""
        self._left = 0  # bytes of the body, or of the chunk and its CRLF, still to come
        self._informational = 0
        self._read = self._read_head

    def feed(self, data: bytes) -> None:
        """Take in what the socket gave.

        Raises:
            ResponseFaultError: It is no response.
        """
        self.began = self.began or bool(data)
        if self._partial:
            data = self._partial + data
            self._partial = b""
        position, end = 0, len(data)
        while position < end and not self.complete:
            position = self._read(data, position)
            if position < 0:  # what is left makes no sense yet
                return
        if position < end:
            self.reusable = False  # nobody can tell whose those bytes are

    def feed_end(self) -> None:
        """The server has closed the connection.

        Raises:
            ResponseFaultError: The response is not complete.
        """
        if self.complete:
            return
        if self._read == self._read_until_close:
            self.complete = True
            return
        if not self.began:
            raise ResponseFaultError("nothing: it closed the connection without a response")
        what = "head" if self.head is None else "body"
        raise ResponseFaultError(f"only a part of the response's {what} and closed the connection")

    def _wait_for_more(self, data: bytes, position: int) -> int:
        self._partial = data[position:]
        return -1

    def _read_head(self, data: bytes, position: int) -> int:
        end = data.find(b"\r\n\r\n", position)
        if end < 0 or end - position > MAX_HEAD:
            if len(data) - position > MAX_HEAD:
                raise ResponseFaultError(f"headers of more than {MAX_HEAD} bytes")
            self._check_beginning(data[position : position + 9])
            return self._wait_for_more(data, position)
        line, *fields = data[position:end].split(b"\r\n")
        match = _STATUS_LINE.fullmatch(line)
        if match is None:
            raise ResponseFaultError(f"something that is no HTTP/1.1 response: {line[:60]!r}")
        status = int(match[2])
        if status < 200:
            self._informational += 1
            if status == 101:
                raise ResponseFaultError("a switch of protocols that nobody asked for")
            if self._informational > MAX_INFORMATIONAL:
                raise ResponseFaultError("endless 1xx responses")
        else:
            self._begin_body(status, read_fields(fields), is_http10=match[1] == b"0")
        return end + 4

    @staticmethod
    def _check_beginning(beginning: bytes) -> None:
        if not b"HTTP/1.1 ".startswith(beginning) and not b"HTTP/1.0 ".startswith(beginning):
            raise ResponseFaultError(f"something that is no HTTP/1.1 response: {beginning!r}")

    def _begin_body(self, status: int, headers: Headers, *, is_http10: bool) -> None:
        length, chunked, closes = None, False, is_http10
        for name, value in headers:
            name = name.lower()
            if name == b"content-length":
                length = _read_length(value, length)
            elif name == b"transfer-encoding":
                if chunked or is_http10 or value.lower() != b"chunked":
                    raise ResponseFaultError(f"an unknown transfer coding: {value[:60]!r}")
                chunked = True
            elif name == b"connection":
                options = [option.strip() for option in value.lower().split(b",")]
                closes = closes or b"close" in options
        self.reusable = not closes
        if self._method == b"HEAD" or status in (204, 304):
            self.complete = True
        elif chunked:
            if length is not None:
                raise ResponseFaultError("both a content-length and a transfer coding")
            self._read = self._read_chunks
        elif length is not None:
            self._left = length
            self.complete = length == 0
            self._read = self._read_counted
        else:
            self.reusable = False
            self._read = self._read_until_close
        self.head = status, headers

    def _read_until_close(self, data: bytes, position: int) -> int:
        self.body += data[position:]
        return len(data)

    def _read_counted(self, data: bytes, position: int) -> int:
        piece = data[position : position + self._left]
        self.body += piece
        self._left -= len(piece)
        self.complete = self._left == 0
        return position + len(piece)

    def _read_chunks(self, data: bytes, position: int) -> int:
        end = len(data)
        while position < end:
            left = self._left
            if not left:
                match = _CHUNK_LINE.match(data, position)
                if match is None:
                    self._check_partial_line(data[position : position + MAX_CHUNK_LINE + 1])
                    return self._wait_for_more(data, position)
                position = match.end()
                size = int(match[1], 16)
                if not size:
                    self._read = self._read_trailers
                    return position
                self._left = left = size + 2
            if end - position < left:
                self._take_part_of_chunk(data, position)
                return end
            position += left
            if left > 2:
                self.body += data[position - left : position - 2]
            if data[position - min(left, 2) : position] != b"\r\n"[-left:]:
                raise ResponseFaultError("a chunk that does not end where it should")
            self._left = 0
        return position

    def _take_part_of_chunk(self, data: bytes, position: int) -> None:
        """Take what has come of a chunk; of its last two bytes, CR and LF, one may be there."""
        available = len(data) - position
        content = min(available, max(self._left - 2, 0))
        self.body += data[position : position + content]
        if available > content and data[-1:] != b"\r":
            raise ResponseFaultError("a chunk that does not end where it should")
        self._left -= available

    @staticmethod
    def _check_partial_line(line: bytes) -> None:
        if b"\n" in line or len(line) > MAX_CHUNK_LINE or not re.match(rb"[0-9A-Fa-f]", line):
            raise ResponseFaultError(f"a chunk without a size: {line[:40]!r}")

    def _read_trailers(self, data: bytes, position: int) -> int:
        if data.startswith(b"\r\n", position):
            self.complete = True
            return position + 2
        end = data.find(b"\r\n\r\n", position)
        if end < 0 or end - position > MAX_HEAD:
            if len(data) - position > MAX_HEAD:
                raise ResponseFaultError(f"trailers of more than {MAX_HEAD} bytes")
            return self._wait_for_more(data, position)
        self.trailers = read_fields(data[position:end].split(b"\r\n"))
        self.complete = True
        return end + 4


def read_fields(lines: list[bytes]) -> Headers:
    """Read header lines.

    Raises:
        ResponseFaultError: One is not a header line, or there are too many.
    """
    if len(lines) > MAX_FIELDS:
        raise ResponseFaultError(f"more than {MAX_FIELDS} headers")
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not _is_name(name) or _BAD_IN_VALUE.search(value):
            raise ResponseFaultError(f"a line that is no header: {line[:60]!r}")
        headers.append((name, value))
    return headers


@lru_cache(maxsize=1024)
def _is_name(name: bytes) -> bool:
    """Whether it is a field name; a server sends the same few again and again."""
    return _NAME.fullmatch(name) is not None


def _read_length(value: bytes, before: int | None) -> int:
    if _LENGTH.fullmatch(value) is None:
        raise ResponseFaultError(f"the content-length {value[:40]!r}")
    length = int(value)
    if before is not None and before != length:
        raise ResponseFaultError(f"two lengths, {before} and {length}")
    return length
