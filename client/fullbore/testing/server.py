"""A real server on a free port that misbehaves to order.

Owns the listening, the order of the replies and the counting. How a reply does what it does is in
``visit``. Knows nothing of the client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import TracebackType
from typing import Self

import anyio
import anyio.abc
import h11

from .._h2_server import H2Exchange, H2Peer, ScriptedH2Server
from .visit import H1Visit, H2Visit, HangUpError, Received, Reply, Visit


class FaultServer:
    """Serves scripted replies on 127.0.0.1 and a free port, in the event loop it is opened in.

    :param replies: one for each request in order of arrival; the last is repeated.
    :param http2: speak HTTP/2 over cleartext (prior knowledge) instead of HTTP/1.1.
    :ivar url: the base URL, ``/v1`` included, once it is open.
    :ivar requests: what has arrived, oldest first.
    :ivar connections: how many connections have been made; ``open_connections``, how many are
        open now, ``in_progress``, how many requests are being answered, and ``peak``, the most
        that were at once.
    """

    def __init__(self, *replies: Reply, http2: bool = False) -> None:
        if not replies:
            raise ValueError("A fault server needs at least one reply, such as answer('hello').")
        self._replies = replies
        self._http2 = http2
        self.url = ""
        self.requests: list[Received] = []
        self.connections = 0
        self.open_connections = 0
        self.in_progress = 0
        self.peak = 0
        self._group: anyio.abc.TaskGroup | None = None
        self._stack = AsyncExitStack()
        self._changed = anyio.Event()

    async def __aenter__(self) -> Self:
        self._group = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(self._group.cancel_scope.cancel)
        if self._http2:
            server = ScriptedH2Server(self._h2_request, on_connect=self._h2_connected)
            await self._stack.enter_async_context(server)
            self.url = f"{server.url}/v1"
            return self
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        self.url = f"http://127.0.0.1:{port}/v1"
        self._group.start_soon(self._serve, listener)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._stack.__aexit__(exc_type, exc, traceback)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on this server's counters holds."""
        while not condition():
            await self._changed.wait()

    def _touch(self) -> None:
        event, self._changed = self._changed, anyio.Event()
        event.set()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        self.connections += 1
        self.open_connections += 1
        self._touch()
        try:
            yield
        finally:
            self.open_connections -= 1
            self._touch()

    @asynccontextmanager
    async def _arrived(self, request: Received) -> AsyncIterator[tuple[int, Reply]]:
        """Count a request; yields how many came before it, and its reply."""
        number = len(self.requests)
        self.requests.append(request)
        self.in_progress += 1
        self.peak = max(self.peak, self.in_progress)
        self._touch()
        try:
            yield number, self._replies[min(number, len(self._replies) - 1)]
        finally:
            self.in_progress -= 1
            self._touch()

    # HTTP/2

    async def _h2_connected(self, peer: H2Peer) -> None:
        async def watch() -> None:
            async with self._connected():
                await peer.ended.wait()

        assert self._group is not None
        self._group.start_soon(watch)

    async def _h2_request(self, exchange: H2Exchange) -> None:
        await exchange.complete.wait()
        fields = {name.decode(): value.decode() for name, value in exchange.headers.items()}
        request = Received(
            method=fields.pop(":method"),
            path=fields.pop(":path"),
            headers=fields,
            body=bytes(exchange.body),
        )
        async with self._arrived(request) as (number, reply):
            with suppress(HangUpError):
                await reply(H2Visit(request, number, exchange))

    # HTTP/1.1

    async def _serve(self, listener: anyio.abc.Listener[anyio.abc.SocketStream]) -> None:
        async with listener:
            await listener.serve(self._connection)

    async def _connection(self, stream: anyio.abc.SocketStream) -> None:
        connection = h11.Connection(h11.SERVER)
        async with self._connected():
            try:
                async with stream:
                    while await self._one_request(connection, stream):
                        connection.start_next_cycle()
            except (HangUpError, anyio.BrokenResourceError, h11.RemoteProtocolError):
                pass  # as scripted, or the client went away

    async def _one_request(
        self, connection: h11.Connection, stream: anyio.abc.SocketStream
    ) -> bool:
        request = await _receive(connection, stream)
        if request is None:
            return False
        keep = True
        async with self._arrived(request) as (number, reply), anyio.create_task_group() as group:

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
                visit: Visit = H1Visit(request, number, connection, stream)
                await reply(visit)
            except (HangUpError, anyio.BrokenResourceError):
                keep = False
            group.cancel_scope.cancel()
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
