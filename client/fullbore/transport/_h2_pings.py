"""PINGs of one connection, and the resets they confirm.

Owns which PING is out and since when, and how many of our resets the server may not have seen. Such
a stream still counts against the limit: the server may be at work on it, and a client that opens
and resets streams faster than its server can follow looks like an attack (CVE-2023-44487). Knows
nothing of sockets; the caller looks at `sent` when a deadline falls due.
"""

from __future__ import annotations

from collections.abc import Callable

from ._h2_frames import ACK, ping

PAYLOAD = b"fullbore"


class Pings:
    """At most one PING is out at a time.

    Attributes:
        sent: When the PING that is out was sent, or None.
        allowed: Whether a reset may cause a PING: not twice before the server has sent a header
            block or data of its own, because some servers (gRPC's) close a connection that is
            pinged more than it is used.
    """

    __slots__ = ("_clock", "_covered", "_later", "_send", "allowed", "sent")

    def __init__(self, send: Callable[[bytes], None], clock: Callable[[], float]) -> None:
        self._send = send
        self._clock = clock
        self._covered = 0  # resets that the PING now out will confirm
        self._later = 0  # resets sent after it
        self.allowed = True
        self.sent: float | None = None

    @property
    def unconfirmed(self) -> int:
        """Resets that the server may not have seen yet."""
        return self._covered + self._later

    def start(self) -> None:
        """Send a PING unless one is out."""
        if self.sent is None:
            self.sent = self._clock()
            self.allowed = False
            self._covered, self._later = self._later, 0
            self._send(ping(PAYLOAD))

    def count_reset(self) -> None:
        """A reset was sent just now: have it confirmed."""
        if self.allowed or self.sent is not None:
            self._later += 1
            self.start()

    def end(self) -> None:
        """The PING was answered, or other bytes have shown that the server lives."""
        self.sent = None
        self._covered = 0
        if self._later and self.allowed:
            self.start()
        else:
            self._later = 0

    def receive(self, payload: bytes, flags: int) -> bool:
        """Take in a PING: answer a question; True if it answers ours."""
        if not flags & ACK:
            self._send(ping(payload, ACK))
            return False
        return self.sent is not None and payload == PAYLOAD
