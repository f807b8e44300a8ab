"""Server-sent events, built from bytes that one response repeats and the few that change.

Only the text, and log-probabilities when asked for, go through a JSON encoder: this runs once for
each streamed token. It does not know what a chat or a completion looks like.
"""

from __future__ import annotations

import msgspec

from .wire import Head, Usage

DONE = b"data: [DONE]\n\n"

_LINE_BREAKS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)

_REASONS = {None: b"null", "stop": b'"stop"', "length": b'"length"'}


class Frame:
    """The constant parts of one response's events.

    :param kind: the ``object`` field.
    :param usage_asked: with it, each event but the last says ``"usage":null``, as OpenAI's do.
    """

    __slots__ = ("_close", "_head", "_open")

    def __init__(self, head: Head, kind: str, *, usage_asked: bool) -> None:
        fields = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._head = b"data: " + msgspec.json.encode(fields)[:-1] + b',"choices":['
        self._open = self._head + b'{"index":'
        self._close = b'}],"usage":null}\n\n' if usage_asked else b"}]}\n\n"

    def choice(
        self,
        index: int,
        gained: bytes,
        *,
        logprobs: bytes = b"null",
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> bytes:
        """An event of one choice.

        :param gained: the field that carries text, with its name: ``"text":"..."``.
        """
        tail = self._close
        if stop_reason is not None:
            tail = b',"stop_reason":' + json_text(stop_reason) + tail
        return (
            b"%b%d,%b" % (self._open, index, gained)
            + b',"logprobs":'
            + logprobs
            + b',"finish_reason":'
            + _REASONS[finish_reason]
            + tail
        )

    def usage(self, usage: Usage) -> bytes:
        """The event with no choices that ends a stream whose usage was asked for."""
        return self._head + b'],"usage":' + msgspec.json.encode(usage.to_json()) + b"}\n\n"


def failure(error_object: bytes) -> bytes:
    """The event that ends a stream which failed on the way."""
    return b"data: " + error_object + b"\n\n"


def json_text(value: object) -> bytes:
    """JSON on one line, whatever a client takes for a line break.

    The standard knows CR and LF, which JSON escapes anyway; clients that split as Python's
    ``str.splitlines`` does would also cut at the Unicode separators.
    """
    data = msgspec.json.encode(value)
    if data.isascii():
        return data
    for separator, escaped in _LINE_BREAKS:
        data = data.replace(separator, escaped)
    return data
