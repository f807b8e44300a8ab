"""Binding the port before anything slow happens.

The socket is bound here, so that the port is known (0 takes a free one) and a port in use is an
error at once, not after a model was loaded; it listens only when the server is ready to accept.
"""

from __future__ import annotations

import errno
import os
import socket

from ..errors import ConfigError

SEND_BUFFER = 64 * 2**10
"""Bytes the kernel is asked to keep unsent for a connection; Linux takes twice as many.

Left alone it takes megabytes, thousands of tokens, before a peer that stopped reading is noticed
and its sequence paused.
"""


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address, not yet listening.

    Without ``SO_REUSEPORT``: a second server on the same port must fail, not share its connections.

    :raises ConfigError: the host has no address, or the port is taken or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"The host {host!r} has no address here: {error.strerror}.") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.bind(address)
    except OSError as error:
        listener.close()
        hint = "Choose another with --port; 0 takes a free one."
        if error.errno == errno.EADDRINUSE:
            reason = "another process uses it"
        elif error.errno == errno.EACCES:
            reason = "this user may not bind it"
        else:
            reason, hint = os.strerror(error.errno or 0), "Choose another address with --host."
        raise ConfigError(f"Cannot bind port {port} on {host}: {reason}. {hint}") from error
    return listener


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """The address clients on this machine reach the socket under; a wildcard becomes loopback."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{host}:{port}"
