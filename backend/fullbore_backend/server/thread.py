"""A server beside the caller's own work, on a thread, for an engine the caller can look into."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import TracebackType
from typing import Self

from ..async_engine import AsyncEngine
from .config import ServerConfig
from .listener import bind
from .serving import serve_engine


class ThreadServer:
    """A server on a thread with an event loop of its own, for an engine of the caller's.

    Inside the ``with``, :attr:`engine` may be asked for its ``stats()`` from any thread.

    :param engine: not started; it is started on entry and stopped on exit.
    :param config: its port is taken as it is; the default takes a free one.
    """

    def __init__(self, engine: AsyncEngine, config: ServerConfig | None = None) -> None:
        self.engine = engine
        self._config = config or ServerConfig(port=0)
        self._settled = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._url: str | None = None

    @property
    def url(self) -> str:
        """``http://HOST:PORT``, without a path."""
        assert self._url is not None, "the server is not running"
        return self._url

    def __enter__(self) -> Self:
        """Start it, and wait until it is ready.

        :raises BackendError: whatever kept it from starting.
        """
        self._config.validate()
        listener = bind(self._config.host, self._config.port)
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="fullbore-server", daemon=True
        )
        self._thread.start()
        self._settled.wait()
        if self._url is None:
            self._thread.join()
            assert self._error is not None
            raise self._error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Drain and stop it.

        :raises BackendError: it had failed meanwhile.
        """
        self.begin_shutdown()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def begin_shutdown(self) -> None:
        """Do what SIGTERM does to a server with a process of its own, and return at once."""
        assert self._loop is not None
        assert self._stop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    def _run(self, listener: socket.socket) -> None:
        try:
            with listener:
                asyncio.run(self._serve(listener))
        except BaseException as error:
            self._error = error
        finally:
            self._settled.set()

    async def _serve(self, listener: socket.socket) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await serve_engine(
            self.engine, self._config, listener, stop=self._stop, ready=self._on_ready
        )

    def _on_ready(self, url: str) -> None:
        self._url = url
        self._settled.set()
