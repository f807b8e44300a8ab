"""The OpenAI-compatible HTTP server: it translates between the wire and an engine's requests.

:func:`create_app` is the application for any ASGI server; :func:`serve` runs it on Granian with an
engine until a signal; :class:`BackgroundServer` and :class:`ThreadServer` run it beside other work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .background import BackgroundServer
from .config import ServerConfig

if TYPE_CHECKING:
    from .app import create_app
    from .serving import serve, serve_engine
    from .thread import ThreadServer

__all__ = [
    "BackgroundServer",
    "ServerConfig",
    "ThreadServer",
    "create_app",
    "serve",
    "serve_engine",
]

# These bring in torch, which a command line that only asks for help should not wait for.
_LAZY = {
    "ThreadServer": "thread",
    "create_app": "app",
    "serve": "serving",
    "serve_engine": "serving",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
