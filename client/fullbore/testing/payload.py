"""The JSON and the events that endpoints answer with, built for tests.

Owns shapes alone. Knows nothing of servers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

EVENT_STREAM = {"content-type": "text/event-stream"}


def sse(*events: Mapping[str, Any] | str) -> bytes:
    """Return the bytes of these events, JSON objects or plain data."""
    return b"".join(
        b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n"
        for event in events
    )


def chunk(
    text: str | None,
    *,
    finish_reason: str | None = None,
    usage: Mapping[str, Any] | None = None,
    request: Mapping[str, Any] | None = None,
    delta: Mapping[str, Any] | None = None,
    index: int = 0,
) -> dict[str, Any]:
    """Return one chunk of a streamed answer, of the kind the request is for."""
    chat = request is None or "messages" in request
    value: dict[str, Any] = {
        "id": "scripted-0",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 0,
        "model": (request or {}).get("model", "scripted"),
        "choices": [],
    }
    if usage is not None:
        return {**value, "usage": usage}
    choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason}
    if chat:
        choice["delta"] = delta or ({} if text is None else {"content": text})
    else:
        choice["text"] = text or ""
    return {**value, "choices": [choice]}


def whole(
    request: Mapping[str, Any], text: str, usage: Mapping[str, Any], finish_reason: str | None
) -> dict[str, Any]:
    """Return an unstreamed answer, of the kind the request is for."""
    chat = "messages" in request
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    if chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    return {
        "id": "scripted-0",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": request.get("model", "scripted"),
        "choices": [choice],
        "usage": usage,
    }


def rate_limits(
    *,
    requests_left: int | None = None,
    requests_limit: int | None = None,
    requests_reset: str | None = None,
    tokens_left: int | None = None,
    tokens_limit: int | None = None,
    tokens_reset: str | None = None,
) -> dict[str, str]:
    """Return ``x-ratelimit-*`` headers as OpenAI sends them; a reset is such as ``"6m0s"``."""
    fields = {
        "remaining-requests": requests_left,
        "limit-requests": requests_limit,
        "reset-requests": requests_reset,
        "remaining-tokens": tokens_left,
        "limit-tokens": tokens_limit,
        "reset-tokens": tokens_reset,
    }
    return {
        f"x-ratelimit-{name}": str(value) for name, value in fields.items() if value is not None
    }


MALFORMED_STREAMS: Mapping[str, bytes] = {
    "broken JSON": b'data: {"choices": [{"delta": {"content": "a"\n\n',
    "no JSON": b"data: hello\n\n",
    "JSON of another shape": b'data: {"choices": "none"}\n\n',
    "a list": b"data: []\n\n",
    "bytes that are not UTF-8": b'data: {"choices": [{"delta": {"content": "\xff\xfe"}}]}\n\n',
    "an error event": b'event: error\ndata: {"message": "no", "type": "invalid_request"}\n\n',
    "an error object": b'data: {"error": {"message": "no", "code": 400}}\n\n',
}
"""Event streams that no client can take for an answer, by name."""
