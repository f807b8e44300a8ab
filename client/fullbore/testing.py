"""A real server on a free port that misbehaves to order: for our tests and for yours.

::

    async with FaultServer(status(429, retry_after=1), answer("hello")) as server:
        async with Client(server.url, model="any", concurrency=4) as client:
            print((await client.complete("hi")).text)      # "hello", at the second attempt

The server takes one reply a request, in order of arrival; the last one is repeated. A reply is
any coroutine function that takes a :class:`Visit`; the functions below make the usual ones. A
reply whose client goes away is cancelled. What has arrived is in ``server.requests``. Waits are
for events, never for time, so tests built on it do not depend on how fast a machine is.

Speaks HTTP/1.1. Knows nothing of the client.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc
import h11

EVENT_STREAM = {"content-type": "text/event-stream"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One request as it arrived; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


class Visit:
    """One request being answered: what a reply function works with.

    :ivar request: what arrived.
    :ivar number: how many requests had arrived before it, in all.
    """

    def __init__(
        self,
        request: Received,
        number: int,
        connection: h11.Connection,
        stream: anyio.abc.SocketStream,
    ) -> None:
        self.request = request
        self.number = number
        self._connection = connection
        self._stream = stream

    async def start(self, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send the status line and headers; without a ``content-length`` the body is chunked."""
        fields = list((headers or {}).items())
        await self._send(h11.Response(status_code=status, headers=fields))

    async def send(self, data: bytes | str) -> None:
        """Send a piece of the body at once."""
        await self._send(h11.Data(data=data.encode() if isinstance(data, str) else data))

    async def end(self) -> None:
        """End the body properly."""
        await self._send(h11.EndOfMessage())

    async def send_raw(self, data: bytes) -> None:
        """Write bytes to the socket, past all of HTTP."""
        await self._stream.send(data)

    async def reset(self) -> None:
        """Reset the connection (RST), as a crashed server or a broken middlebox does."""
        raw = self._stream.extra(anyio.abc.SocketAttribute.raw_socket)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise _HangUpError

    async def hang_up(self) -> None:
        """Close the connection where it stands: the body stays cut short."""
        raise _HangUpError

    async def until_left(self) -> None:
        """Wait until the client closes the connection; as in any reply, that cancels it."""
        await anyio.sleep_forever()

    async def _send(self, event: h11.Event) -> None:
        data = self._connection.send(event)
        if data:
            await self._stream.send(data)


Reply = Callable[[Visit], Awaitable[None]]
"""Answers one request."""


class _HangUpError(Exception):
    """The connection is to be closed now."""


class FaultServer:
    """Serves scripted replies on 127.0.0.1 and a free port, in the event loop it is opened in.

    :param replies: one for each request in order of arrival; the last is repeated.
    :ivar url: the base URL, ``/v1`` included, once it is open.
    :ivar requests: what has arrived, oldest first.
    :ivar connections: how many connections have been made; ``open_connections``, how many are
        open now, and ``peak`` the most requests that were being answered at once.
    """

    def __init__(self, *replies: Reply) -> None:
        if not replies:
            raise ValueError("A fault server needs at least one reply, such as answer('hello').")
        self._replies = replies
        self.url = ""
        self.requests: list[Received] = []
        self.connections = 0
        self.open_connections = 0
        self.in_progress = 0
        self.peak = 0
        self._group: anyio.abc.TaskGroup | None = None
        self._changed = anyio.Event()

    async def __aenter__(self) -> Self:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        self.url = f"http://127.0.0.1:{port}/v1"
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._serve, listener)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        assert self._group is not None
        self._group.cancel_scope.cancel()
        return await self._group.__aexit__(exc_type, exc, traceback)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on this server's counters holds."""
        while not condition():
            await self._changed.wait()

    async def _serve(self, listener: anyio.abc.Listener[anyio.abc.SocketStream]) -> None:
        async with listener:
            await listener.serve(self._connection)

    def _touch(self) -> None:
        event, self._changed = self._changed, anyio.Event()
        event.set()

    async def _connection(self, stream: anyio.abc.SocketStream) -> None:
        self.connections += 1
        self.open_connections += 1
        self._touch()
        connection = h11.Connection(h11.SERVER)
        try:
            async with stream:
                while await self._one_request(connection, stream):
                    connection.start_next_cycle()
        except (_HangUpError, anyio.BrokenResourceError, h11.RemoteProtocolError):
            pass  # as scripted, or the client went away
        finally:
            self.open_connections -= 1
            self._touch()

    async def _one_request(
        self, connection: h11.Connection, stream: anyio.abc.SocketStream
    ) -> bool:
        request = await _receive(connection, stream)
        if request is None:
            return False
        number = len(self.requests)
        self.requests.append(request)
        self.in_progress += 1
        self.peak = max(self.peak, self.in_progress)
        self._touch()
        reply = self._replies[min(number, len(self._replies) - 1)]
        keep = True
        try:
            async with anyio.create_task_group() as group:

                async def watch() -> None:
                    nonlocal keep
                    try:
                        while True:
                            connection.receive_data(await stream.receive())
                    except (anyio.EndOfStream, anyio.BrokenResourceError):
                        keep = False
                        group.cancel_scope.cancel()

                group.start_soon(watch)
                try:
                    await reply(Visit(request, number, connection, stream))
                except (_HangUpError, anyio.BrokenResourceError):
                    keep = False
                group.cancel_scope.cancel()
        finally:
            self.in_progress -= 1
            self._touch()
        return keep and connection.our_state is connection.their_state is h11.DONE


async def _receive(connection: h11.Connection, stream: anyio.abc.SocketStream) -> Received | None:
    head: h11.Request | None = None
    body = b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            try:
                connection.receive_data(await stream.receive())
            except anyio.EndOfStream:
                return None
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            return Received(
                method=head.method.decode(),
                path=head.target.decode(),
                headers={name.decode(): value.decode() for name, value in head.headers},
                body=body,
            )
        else:
            return None


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
            await respond_json(visit, _whole(asked, text, reported, finish_reason), headers)
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
    then: str = "end",
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


def _whole(
    request: Mapping[str, Any], text: str, usage: Mapping[str, Any], finish_reason: str | None
) -> dict[str, Any]:
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
