"""The few things an ASGI application needs, without the cost of request and response objects.

Owns reading a body under a limit, writing a response, the request's id, and noticing that the peer
left. It does not know what is served.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from .errors import Headers, HttpError

T = TypeVar("T")

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"

DRAINED = 64 * 2**20
"""Bytes of a too large body that are read and dropped: HTTP/1.1 clients read no response while they
send, so one that comes early is lost. A peer that goes on beyond this is cut off."""

_REQUEST_ID = "fullbore.request_id"
_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class ClientDisconnectedError(Exception):
    """The peer left; nobody reads a response."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """A request header's value (the first, if it is repeated); ``name`` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def identify(scope: Scope) -> None:
    """Give the request its id: the caller's ``x-request-id`` if it is printable, or a fresh one."""
    given = header(scope, b"x-request-id")
    sane = given is not None and _SANE_ID.fullmatch(given)
    scope[_REQUEST_ID] = given if sane else b"req_" + secrets.token_hex(12).encode()


async def read_json_body(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """The whole body of a request that claims to be JSON.

    :param limit: bytes; a larger body is refused.
    :raises HttpError: 413 or 415.
    :raises ClientDisconnectedError: the peer left before the end of the body.
    """
    content_type = header(scope, b"content-type")
    # Browsers send other types across sites without asking first; JSON they ask about.
    if content_type is not None and content_type.split(b";")[0].strip().lower() != JSON:
        raise HttpError(
            415,
            f"The content type is {content_type.decode('latin-1')!r}; send "
            "'Content-Type: application/json'.",
        )
    encoding = header(scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise HttpError(
            415, f"The content encoding is {encoding.decode('latin-1')!r}; send the body as it is."
        )
    parts: list[bytes] = []
    size = 0
    more = True
    while more and size <= limit + DRAINED:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        part = message.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        more = message.get("more_body", False)
    if size > limit:
        raise HttpError(
            413,
            f"The request body is larger than {limit} bytes; send less at once.",
            code="request_too_large",
        )
    return b"".join(parts)


async def start(
    scope: Scope, send: Send, status: int, content_type: bytes, *, headers: Headers = ()
) -> None:
    """Send a response's status and headers."""
    common = [(b"content-type", content_type)]
    if _REQUEST_ID in scope:
        common.append((b"x-request-id", scope[_REQUEST_ID]))
    await send(
        {"type": "http.response.start", "status": status, "headers": [*common, *headers]},
    )


async def respond(
    scope: Scope,
    send: Send,
    status: int,
    body: bytes,
    *,
    content_type: bytes = JSON,
    headers: Headers = (),
) -> None:
    """Send a whole response."""
    length = (b"content-length", b"%d" % len(body))
    await start(scope, send, status, content_type, headers=[*headers, length])
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` and return its result, or cancel it as soon as the peer leaves.

    ``receive`` must have yielded the whole body. ASGI servers tell of a disconnect only to those
    who listen: a handler that computes, or waits for tokens, would go on for nobody.

    :raises ClientDisconnectedError: the peer left first; ``work`` has ended by then.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watcher.result()  # a receive that failed is an error, not a disconnect
        raise ClientDisconnectedError
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
