"""Replies for a fault server: what an endpoint does on a good day and on bad ones.

Each function here makes a reply, a coroutine function that takes a :class:`Visit`. A reply of your
own is one you write. Those that wait take the event to wait for, or the clock to sleep by.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import anyio

from .payload import EVENT_STREAM, chunk, sse, whole
from .visit import Reply, Visit

Sleep = Callable[[float], Awaitable[object]]
"""Sleeps for seconds, of whichever clock."""


def answer(
    text: str = "ok",
    *,
    usage: Mapping[str, Any] | None = None,
    finish_reason: str | None = "stop",
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Answer a chat or completion request as asked: streamed, a word a chunk, or whole.

    :param usage: the usage to report; by default 5 tokens in and a token a word out.
    """
    words = [word if i == 0 else f" {word}" for i, word in enumerate(text.split(" "))]
    reported = usage or {
        "prompt_tokens": 5,
        "completion_tokens": len(words),
        "total_tokens": 5 + len(words),
    }

    async def reply(visit: Visit) -> None:
        asked = visit.request.json
        if not asked.get("stream"):
            await respond_json(visit, whole(asked, text, reported, finish_reason), headers)
            return
        await visit.start(200, {**EVENT_STREAM, **(headers or {})})
        for word in words:
            await visit.send(sse(chunk(word, request=asked)))
        last = chunk(None, finish_reason=finish_reason, request=asked)
        if (asked.get("stream_options") or {}).get("include_usage"):
            await visit.send(sse(last, chunk(None, usage=reported, request=asked), "[DONE]"))
        else:
            await visit.send(sse(last, "[DONE]"))
        await visit.end()

    return reply


def status(
    code: int,
    body: Mapping[str, Any] | bytes | None = None,
    *,
    retry_after: float | str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Answer with a status; by default with an error object in OpenAI's shape."""
    if body is None:
        body = {"error": {"message": f"scripted {code}", "type": "scripted", "code": None}}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"content-type": "application/json", "content-length": str(len(content))}
    if retry_after is not None:
        fields["retry-after"] = str(retry_after)

    async def reply(visit: Visit) -> None:
        await visit.start(code, {**fields, **(headers or {})})
        await visit.send(content)
        await visit.end()

    return reply


def pieces(
    *data: bytes | str,
    then: Literal["end", "hang_up", "reset", "hold"] = "end",
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Answer 200 with these pieces of a body, each sent on its own.

    :param then: ``"end"`` ends the body properly, ``"hang_up"`` cuts it short, ``"reset"`` resets
        the connection, ``"hold"`` sends nothing more until the client leaves.
    """

    async def reply(visit: Visit) -> None:
        await visit.start(200, EVENT_STREAM if headers is None else headers)
        for piece in data:
            await visit.send(piece)
        if then == "hold":
            await visit.until_left()
        await getattr(visit, then)()

    return reply


def reset() -> Reply:
    """Reset the connection instead of answering."""

    async def reply(visit: Visit) -> None:
        await visit.reset()

    return reply


def hang_up() -> Reply:
    """Close the connection instead of answering."""

    async def reply(visit: Visit) -> None:
        await visit.hang_up()

    return reply


def hold(until: anyio.Event | None = None, then: Reply | None = None) -> Reply:
    """Say nothing until an event, then reply; without an event until the client leaves."""

    async def reply(visit: Visit) -> None:
        if until is None:
            await visit.until_left()
            return
        await until.wait()
        await (then or answer())(visit)

    return reply


async def respond_json(
    visit: Visit, value: object, headers: Mapping[str, str] | None = None
) -> None:
    """Answer 200 with JSON."""
    content = json.dumps(value).encode()
    fields = {"content-type": "application/json", "content-length": str(len(content))}
    await visit.start(200, {**fields, **(headers or {})})
    await visit.send(content)
    await visit.end()


def delayed(seconds: float, then: Reply | None = None, *, sleep: Sleep = anyio.sleep) -> Reply:
    """Say nothing for that long, then reply.

    :param sleep: of the clock to go by: ``ManualClock().sleep`` makes the test say when.
    """

    async def reply(visit: Visit) -> None:
        await sleep(seconds)
        await (then or answer())(visit)

    return reply


def trickle(
    data: bytes | str, *, every: float = 0.01, size: int = 1, sleep: Sleep = anyio.sleep
) -> Reply:
    """Answer 200 with an event stream that comes ``size`` bytes at a time, then end it.

    :param every: seconds between two pieces.
    """
    content = data if isinstance(data, bytes) else data.encode()

    async def reply(visit: Visit) -> None:
        await visit.start(200, EVENT_STREAM)
        for at in range(0, len(content), size):
            await visit.send(content[at : at + size])
            await sleep(every)
        await visit.end()

    return reply


def truncated(data: bytes | str, *, missing: int = 16) -> Reply:
    """Answer 200, announce a piece of the body, and close ``missing`` bytes before its end."""
    content = data if isinstance(data, bytes) else data.encode()

    async def reply(visit: Visit) -> None:
        await visit.start(200, EVENT_STREAM)
        await visit.send_part(content, missing)
        await visit.hang_up()

    return reply


def goaway(then: Reply | None = None) -> Reply:
    """Announce the connection's end (HTTP/2 GOAWAY).

    :param then: what this request is answered with all the same; without it, the server says that
        it has not processed the request, which is then safe to send again.
    """

    async def reply(visit: Visit) -> None:
        await visit.goaway(processed=then is not None)
        if then is None:
            await visit.until_left()
        else:
            await then(visit)

    return reply
