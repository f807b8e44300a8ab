"""A real server on a free port that misbehaves to order: for our tests and for yours.

::

    async with FaultServer(status(429, retry_after=1), answer("hello")) as server:
        async with Client(server.url, model="any", concurrency=4) as client:
            print((await client.complete("hi")).text)      # "hello", at the second attempt

The server takes one reply a request, in order of arrival; the last one is repeated. A reply is
any coroutine function that takes a :class:`Visit`; the functions here make the usual ones:

=====================  =========================================================================
``answer``             a good answer, streamed or whole as the request asks
``status``             an error status, with ``retry_after`` and any headers (``rate_limits``)
``pieces``             a body sent piece by piece, then ended, cut, reset or held open
``hold``, ``delayed``  silence until an event, for a time (of a ``ManualClock``, say), or for ever
``trickle``            an answer a few bytes at a time
``truncated``          a body that ends in the middle of a chunk
``reset``, ``hang_up`` no answer at all
``goaway``             the end of an HTTP/2 connection, before or after this request
=====================  =========================================================================

``MALFORMED_STREAMS`` has event streams that are none. With ``http2=True`` the server speaks HTTP/2
over cleartext. A reply whose client goes away is cancelled. What has arrived is in
``server.requests``. Waits are for events, so tests built on it do not depend on how fast a machine
is. Knows nothing of the client.
"""

from __future__ import annotations

from .clock import ManualClock
from .payload import EVENT_STREAM, MALFORMED_STREAMS, chunk, rate_limits, sse, whole
from .replies import (
    Sleep,
    answer,
    delayed,
    goaway,
    hang_up,
    hold,
    pieces,
    reset,
    respond_json,
    status,
    trickle,
    truncated,
)
from .server import FaultServer
from .visit import H1Visit, H2Visit, Received, Reply, Visit

__all__ = [
    "EVENT_STREAM",
    "MALFORMED_STREAMS",
    "FaultServer",
    "H1Visit",
    "H2Visit",
    "ManualClock",
    "Received",
    "Reply",
    "Sleep",
    "Visit",
    "answer",
    "chunk",
    "delayed",
    "goaway",
    "hang_up",
    "hold",
    "pieces",
    "rate_limits",
    "reset",
    "respond_json",
    "sse",
    "status",
    "trickle",
    "truncated",
    "whole",
]
