"""The event-stream grammar (WHATWG HTML, section 9.2), incremental over any split of the bytes.

Owns lines, fields and events. Does not know what the data of an event means, and does not decode
it: JSON decoders take bytes.
"""

from __future__ import annotations

import msgspec

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""The most bytes one unfinished event may hold before :class:`EventTooLargeError`."""

_BOM = b"\xef\xbb\xbf"


class EventTooLargeError(ValueError):
    """An event grew past the limit without ending."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """One dispatched event: ``data`` as bytes, ``event`` its type, ``id`` the last event id."""

    data: bytes
    event: str = "message"
    id: str = ""

    @property
    def text(self) -> str:
        """``data`` as text; bytes that are not UTF-8 become U+FFFD, as the grammar says."""
        return self.data.decode("utf-8", "replace")


class EventStreamParser:
    """Turns pieces of an event stream into events.

    The work per piece does not grow with what came before, whatever the split. An event that is
    not closed by a blank line when the stream ends is not dispatched, as the grammar says.
    """

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.last_event_id = ""
        self.retry: int | None = None
        """Milliseconds the server asks to wait before reconnecting, if it does."""
        self._limit = max_event_bytes
        self._line: list[bytes] = []  # the pieces of an unfinished line
        self._data: list[bytes] = []  # the data lines of an unfinished event
        self._held = 0  # bytes in both
        self._event = ""
        self._skip_lf = False  # the last piece ended in CR: an LF at the start of the next is its
        self._head: bytes | None = b""  # what may become a byte order mark; None once decided

    def feed(self, piece: bytes) -> list[Event]:
        """Return the events that ``piece`` completes.

        :raises EventTooLargeError: an unfinished event outgrew the limit.
        """
        if self._head is not None:
            piece = self._after_bom(piece)
        if (
            not self._held
            and not self._event
            and not self._skip_lf
            and piece.startswith(b"data: ")
            and piece.endswith(b"\n\n")
            and b"\r" not in piece
        ):
            return self._feed_plain(piece)
        return self._feed_any(piece)

    def _after_bom(self, piece: bytes) -> bytes:
        head = (self._head or b"") + piece
        if len(head) < len(_BOM) and _BOM.startswith(head):
            self._head = head
            return b""
        self._head = None
        return head.removeprefix(_BOM)

    def _feed_plain(self, piece: bytes) -> list[Event]:
        """Whole events, almost always of one data line each: what endpoints really send."""
        events = []
        for block in piece[:-2].split(b"\n\n"):
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append(Event(block[6:], "message", self.last_event_id))
            else:
                events += self._feed_any(block + b"\n\n")
        return events

    def _feed_any(self, piece: bytes) -> list[Event]:
        if self._skip_lf and piece:
            self._skip_lf = False
            piece = piece.removeprefix(b"\n")
        if not piece:
            return []
        lines = piece.splitlines(keepends=True)  # for bytes: at CR, LF and CRLF, nothing else
        rest = lines.pop() if lines[-1][-1] not in b"\r\n" else b""
        self._skip_lf = piece.endswith(b"\r")
        events: list[Event] = []
        for line in lines:
            if self._line:
                self._held -= sum(map(len, self._line))
                line = b"".join([*self._line, line])
                self._line.clear()
            self._take_line(line.rstrip(b"\r\n"), events)
        if rest:
            self._line.append(rest)
            self._hold(len(rest))
        return events

    def _take_line(self, line: bytes, events: list[Event]) -> None:
        if not line:
            self._dispatch(events)
            return
        name, colon, value = line.partition(b":")
        if colon and not name:
            return  # a comment: keep-alive
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._hold(len(value) + 1)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        elif name == b"id":
            if b"\0" not in value:
                self.last_event_id = value.decode("utf-8", "replace")
        elif name == b"retry" and value.isdigit():
            self.retry = int(value[:18])

    def _dispatch(self, events: list[Event]) -> None:
        if self._data:
            event = Event(b"\n".join(self._data), self._event or "message", self.last_event_id)
            events.append(event)
            self._data.clear()
            self._held = 0
        self._event = ""

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > self._limit:
            raise EventTooLargeError(
                f"An event of the stream is larger than {self._limit} bytes and has not ended."
            )
