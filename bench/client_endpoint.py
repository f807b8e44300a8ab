"""The endpoint that `client.py` measures clients against: answers without a model, at a pace.

An ASGI application for granian. A streamed answer is 64 chunks, each sent on its own, with a pause
between them as a model would make; the pause is the prompt's: `"pause=0.01"`. Runs in a process of
its own, so that its CPU time is not the client's.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

CHUNKS = 64
WORD = " token"

_HEAD = {"id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": 0, "model": "bench"}


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _chunk(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return _event({**_HEAD, "choices": [choice]})


_USAGE = {"prompt_tokens": 8, "completion_tokens": CHUNKS, "total_tokens": 8 + CHUNKS}
_PIECE = _chunk({"content": WORD})
_END = (
    _chunk({}, "length") + _event({**_HEAD, "choices": [], "usage": _USAGE}) + b"data: [DONE]\n\n"
)
_WHOLE = json.dumps(
    {
        **_HEAD,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": WORD * CHUNKS},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": _USAGE,
    }
).encode()


running = 0


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer chat completions; a GET tells how many are being answered."""
    global running
    if scope["type"] != "http":
        return
    if scope["method"] != "POST":
        await _start(send, b"text/plain")
        await send({"type": "http.response.body", "body": str(running).encode()})
        return
    running += 1
    try:
        await _answer(receive, send)
    finally:
        running -= 1


async def _answer(receive: Any, send: Any) -> None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    asked = json.loads(body)
    if not asked.get("stream"):
        await _start(send, b"application/json", (b"content-length", str(len(_WHOLE)).encode()))
        await send({"type": "http.response.body", "body": _WHOLE})
        return
    pause = float(asked["messages"][-1]["content"].rpartition("pause=")[2] or 0)
    await _start(send, b"text/event-stream")
    due = asyncio.get_running_loop().time()
    for _ in range(CHUNKS):
        due += pause
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
        await send({"type": "http.response.body", "body": _PIECE, "more_body": True})
    await send({"type": "http.response.body", "body": _END})


async def _start(send: Any, content_type: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", content_type), *more]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
