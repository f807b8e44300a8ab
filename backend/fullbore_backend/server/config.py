"""What the HTTP server needs to know: frozen values, no I/O."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server.

    :param host: the address to bind; the loopback unless told otherwise.
    :param port: the port to bind; 0 takes a free one.
    :param api_key: a key that requests must carry as ``Authorization: Bearer``; ``None`` asks none.
    :param tls_cert: a PEM file with the certificate chain; with ``tls_key``, turns on TLS.
    :param tls_key: a PEM file with the certificate's key.
    :param shutdown_timeout: seconds that running requests get to finish once told to stop.
    :param max_body_bytes: the largest request body; a larger one gets 413.
    :param max_choices: the most choices of one request, prompts times ``n``.
    :param max_connections: connections served at once, and streams on one HTTP/2 connection; those
        beyond it wait. Keep it above the requests the engine may hold, so that a full queue is
        answered (429) and ``/health`` and ``/metrics`` still get through.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    shutdown_timeout: float = 30.0
    max_body_bytes: int = 16 * 2**20
    max_choices: int = 1024
    max_connections: int = 4096

    def validate(self) -> None:
        """Check what can be checked without binding.

        :raises ConfigError: naming the setting, its value and what is allowed.
        """
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together; give both, or neither.")
        for path in (self.tls_cert, self.tls_key):
            if path is not None and not path.is_file():
                raise ConfigError(f"{path} is not a file; TLS needs a PEM file there.")
        if not (math.isfinite(self.shutdown_timeout) and self.shutdown_timeout >= 0):
            raise ConfigError(
                f"shutdown_timeout is {self.shutdown_timeout}; it must be 0 or more seconds."
            )
        if self.api_key is not None and not self.api_key:
            raise ConfigError("api_key is empty; give a key, or leave it out to ask none.")
        for name in ("max_body_bytes", "max_choices", "max_connections"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")

    @property
    def open_to_others(self) -> bool:
        """True when other machines can reach the server and it asks for no key."""
        return self.api_key is None and not _is_loopback(self.host)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
