"""The numbers that shape an HTTP/2 connection pool, in one frozen value.

Owns their names, units, defaults and validity. Knows nothing of sockets, streams or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGEST_WINDOW = 2**31 - 1
"""The largest flow-control window RFC 9113 section 6.9.1 allows, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTP2Config:
    """Sizes and clocks of an HTTP/2 transport.

    A response body holds at most `stream_window` bytes in this process; when a consumer stops
    reading, the server may send that much and no more (what the kernels' socket buffers hold is
    not extra: it is drained at once and counted here). A connection holds at most
    `max_streams_per_lane * stream_window`.

    Attributes:
        max_lanes: Most connections to one origin, those being opened included. Connections that
            a server is draining (GOAWAY) do not count.
        max_streams_per_lane: Most requests at once on one connection; the server's own
            MAX_CONCURRENT_STREAMS applies if it is smaller.
        stream_window: Bytes a server may send on one stream beyond what its consumer has read.
        idle_expiry: Seconds after which a connection without requests is closed. The default is
            below the idle limits common in front of model servers (60 s on cloud load balancers,
            75 s in nginx), so that this side closes first.
        ping_interval: Seconds of silence on a connection with open requests before a PING.
        ping_timeout: Seconds to wait for any byte after a PING before the connection is lost.
        max_header_list_size: Bytes of a decoded response header block (RFC 9113, 6.5.2).
        max_replays: How often one request may be sent again because a server certainly did not
            process it (REFUSED_STREAM, GOAWAY) or because a connection was lost before the
            response to an idempotent request.
        reopen_delay: Seconds to wait with opening further connections after one failed to open
            while others are alive.
    """

    max_lanes: int = 64
    max_streams_per_lane: int = 100
    stream_window: int = 65_536
    idle_expiry: float = 30.0
    ping_interval: float = 20.0
    ping_timeout: float = 20.0
    max_header_list_size: int = 65_536
    max_replays: int = 3
    reopen_delay: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_lanes", "max_streams_per_lane", "stream_window", "max_header_list_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}.")
        for name in ("idle_expiry", "ping_interval", "ping_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0 seconds, got {getattr(self, name)!r}.")
        for name in ("max_replays", "reopen_delay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}.")
        if self.connection_window > LARGEST_WINDOW:
            raise ValueError(
                f"max_streams_per_lane * stream_window is {self.connection_window} bytes, above "
                f"the {LARGEST_WINDOW} HTTP/2 allows a connection; lower either of them."
            )

    @property
    def credit_batch(self) -> int:
        """Received bytes after which a connection's credit is given back, in one frame."""
        return max(1, self.stream_window // 2)

    @property
    def connection_window(self) -> int:
        """Receive window of a connection, in bytes: room for every stream to be stalled at its
        own limit while credit for a batch is still unsent, so that none can block another."""
        return max(65_535, self.max_streams_per_lane * self.stream_window + self.credit_batch)
