"""Granian, run inside our own event loop on a socket of our own.

HTTP/1.1 and cleartext HTTP/2 on one port; with TLS, HTTP/2 by ALPN. Facts relied on, each held by a
test: ``send`` waits while the peer does not read; a disconnect, or RST_STREAM, makes ``receive``
yield ``http.disconnect`` and cancels nothing by itself; stopping closes the listening socket and
waits for responses in progress.
"""

from __future__ import annotations

import socket
from typing import Any

from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings, HTTP2Settings
from granian.log import LogLevels
from granian.server.embed import Server
from starlette.types import ASGIApp

from .config import ServerConfig

BACKLOG = 4096
"""Connections the kernel completes before we accept them; it caps this by ``somaxconn``."""

_HTTP1 = HTTP1Settings(header_read_timeout=30_000)

# Granian would set up handlers on standard output; its messages go to ours instead. Its warnings
# are left out: the only one of an embedded server is that embedding is new.
_LOGGING = {
    "version": 1,
    "incremental": True,
    "handlers": {},
    "loggers": {"_granian": {"level": "ERROR", "propagate": True}},
}


def _http2(config: ServerConfig) -> HTTP2Settings:
    return HTTP2Settings(
        # One client may multiplex all it has on one connection. The queue's limit is the engine's.
        max_concurrent_streams=config.max_connections,
        # Requests are small and responses are text: what a stream may buffer bounds memory.
        max_send_buffer_size=64 * 2**10,
        max_headers_size=64 * 2**10,
        # A peer that vanished without a word is noticed, and its requests are aborted.
        keep_alive_interval=30_000,
        keep_alive_timeout=20,
    )


class EmbeddedServer(Server):
    """A Granian server of one ASGI application.

    :param listener: bound and listening; the server closes it once it has begun to serve.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, listener: socket.socket) -> None:
        self._listener = listener
        tls: dict[str, Any] = {}
        if config.tls_cert is not None:
            tls = {
                "ssl_cert": config.tls_cert,
                "ssl_key": config.tls_key,
                "ssl_protocol_min": SSLProtocols.tls12,
            }
        super().__init__(
            app,
            address=config.host,
            port=listener.getsockname()[1],
            interface=Interfaces.ASGINL,
            http=HTTPModes.auto,
            websockets=False,
            backlog=BACKLOG,
            backpressure=config.max_connections,
            http1_settings=_HTTP1,
            http2_settings=_http2(config),
            log_level=LogLevels.error,
            log_dictconfig=_LOGGING,
            **tls,
        )

    def close(self) -> None:
        """Begin to stop: accept no more, and end connections as their responses do."""
        self.main_loop_interrupt.set()
        self.interrupt_signal = True

    def _init_shared_socket(self) -> None:
        """Serve on the socket we were given.

        Granian binds by itself, on Linux once for each worker with SO_REUSEPORT: port 0 would be a
        port nobody knows, and a port in use would be shared. It accepts a socket that exists
        already on the path it takes for systems without SO_REUSEPORT.
        """
        holder: Any = SocketHolder  # its stub leaves the arguments out
        self._shd: Any = holder(self._listener.detach(), False, BACKLOG)
