"""A request body on its way out, no faster than the server and the socket take it (RFC 9113, 5.2).

Owns the pace and the check against the content-length. Knows nothing of sockets, of connections'
lives or of responses, except that one which ends early makes the rest unwanted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

import httpx2

from ._h2_outgoing import Outgoing
from ._h2_request import RequestBody
from ._h2_stream import H2Stream

SEND_HIGH_WATER = 262_144
"""Bytes queued for the socket above which request bodies wait."""


def send_at_once(connection: Outgoing, stream: H2Stream, body: RequestBody) -> None:
    """Queue the body, if it is in memory and may leave whole in one frame; else do nothing.

    Most requests are sent like this, and their headers leave with them in one piece.
    """
    whole = body.whole
    if (
        whole is not None
        and len(whole) == body.length
        and len(whole) <= connection.send_room(stream)
        and len(connection.output) <= SEND_HIGH_WATER
    ):
        connection.send_data(stream, whole, end_stream=True)


class Upload:
    """Sends the body of one request on its stream.

    `flush` is called whenever the connection has something for the socket. A wait for the server
    or the socket fails the stream after `timeout` seconds.
    """

    __slots__ = ("_connection", "_flush", "_stream", "_timeout")

    def __init__(
        self,
        connection: Outgoing,
        stream: H2Stream,
        flush: Callable[[], None],
        timeout: float | None,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._flush = flush
        self._timeout = timeout

    async def run(self, body: RequestBody) -> None:
        """Send all of it; return early if the server answers in full without wanting the rest.

        Raises:
            httpx2.LocalProtocolError: The body is not as long as its content-length.
            httpx2.TransportError: The stream failed.
        """
        sent, length = 0, body.length
        if body.whole is not None and len(body.whole) == length:
            await self._send(body.whole, last=True)
            return
        async with aclosing(body.chunks()) as chunks:
            async for chunk in chunks:
                sent += len(chunk)
                if length is not None and sent > length:
                    break
                if chunk and not await self._send(chunk, last=sent == length):
                    return
        if length is not None and sent != length:
            raise httpx2.LocalProtocolError(
                f"The request's content-length is {length}, its body has "
                f"{'more' if sent > length else f'only {sent}'} bytes."
            )
        if not self._stream.sent:
            await self._send(b"", last=True)

    async def _send(self, data: bytes, *, last: bool) -> bool:
        view = memoryview(data)
        connection, stream = self._connection, self._stream
        while True:
            if stream.error is not None:
                raise stream.error
            if stream.ended:
                return False
            room = connection.send_room(stream) if len(view) else 1
            if room <= 0 or len(connection.output) > SEND_HIGH_WATER:
                connection.blocked.add(stream)
                try:
                    await stream.wait(self._timeout, httpx2.WriteTimeout)
                finally:
                    connection.blocked.discard(stream)
                continue
            piece, view = view[:room], view[room:]
            connection.send_data(stream, piece, end_stream=last and not len(view))
            self._flush()
            if not len(view):
                return True
