"""The life of a server: bind, load, serve, drain, stop.

Owns the order of these and what signals do. What is answered is :mod:`.app`'s concern.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar
from urllib.parse import urlsplit

from ..async_engine import AsyncEngine
from ..config import EngineConfig
from ..engine import Engine
from ..errors import EngineStoppedError
from .app import create_app
from .config import ServerConfig
from .embedded import BACKLOG, EmbeddedServer
from .listener import bind, url_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT = 5.0
"""Seconds that connections get to end after the last response."""

WATCH_INTERVAL = 1.0
"""Seconds between looks at whether the engine lives."""


async def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    ready: Callable[[str], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Bind, load the model, and serve until a signal.

    SIGTERM and SIGINT drain; a second one ends at once.

    :param ready: called with the server's URL once ``/health`` has answered 200.
    :param progress: told, in a few words, what is being done while the model loads.
    :raises ConfigError: for settings that cannot work, such as a port in use.
    :raises ModelError: when the model cannot be found, read or run.
    :raises EngineStoppedError: the engine died while serving.
    """
    engine_config.validate()
    server_config.validate()
    held = engine_config.max_waiting + engine_config.max_num_seqs
    server_config = replace(
        server_config, max_connections=max(server_config.max_connections, 2 * held)
    )
    with bind(server_config.host, server_config.port) as listener:
        engine = await _on_daemon_thread(lambda: Engine(engine_config, progress=progress))
        if progress is not None:
            progress("warming up")
        stop = asyncio.Event()
        await serve_engine(
            AsyncEngine(engine),
            server_config,
            listener,
            stop=stop,
            ready=ready,
            handle_signals=True,
        )


async def serve_engine(
    engine: AsyncEngine,
    config: ServerConfig,
    listener: socket.socket,
    *,
    stop: asyncio.Event,
    ready: Callable[[str], None] | None = None,
    handle_signals: bool = False,
) -> None:
    """Start an engine and serve it until ``stop`` is set; then drain, and stop the engine.

    Draining: ``/health`` answers 503 and new requests are refused; running ones get
    ``config.shutdown_timeout`` seconds, then they are cancelled: their streams end with an error.

    :param listener: bound, not listening; closed when the server stops.
    :raises EngineStoppedError: the engine died.
    """
    server = EmbeddedServer(create_app(engine, config), config, listener)
    serving: asyncio.Task[None] | None = None
    try:
        await engine.start()
        listener.listen(BACKLOG)
        url = url_of(listener, tls=config.tls_cert is not None)
        serving = asyncio.create_task(server.serve())
        await _until_healthy(url, serving)
        with _signals(stop) if handle_signals else _no_signals():
            if ready is not None:
                ready(url)
            await _until_stopped(engine, stop, serving)
            if not await engine.drain(config.shutdown_timeout):
                logger.warning(
                    "requests were still running after %g s and were cancelled",
                    config.shutdown_timeout,
                )
    finally:
        await _close(server, serving)
        await engine.stop()


async def _until_stopped(
    engine: AsyncEngine, stop: asyncio.Event, serving: asyncio.Task[None]
) -> None:
    while not stop.is_set():
        if serving.done():
            serving.result()
            raise EngineStoppedError("the HTTP server ended by itself.")
        if engine.death is not None:
            # Of no more use: let whoever watches the process start another.
            raise EngineStoppedError(f"the engine died: {engine.death!r}")
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), WATCH_INTERVAL)


async def _close(server: EmbeddedServer, serving: asyncio.Task[None] | None) -> None:
    if serving is None:
        return
    server.close()
    done, _ = await asyncio.wait((serving,), timeout=CLOSE_TIMEOUT)
    if not done:
        logger.warning("connections were still open after %g s and were cut", CLOSE_TIMEOUT)
        serving.cancel()
        await asyncio.wait((serving,))


async def _until_healthy(url: str, serving: asyncio.Task[None]) -> None:
    """Ask the server itself, over the wire, until it answers that it is well."""
    while True:
        if serving.done():
            serving.result()
            raise EngineStoppedError("the HTTP server ended by itself.")
        with suppress(OSError):
            status = await _get_status(url, "/health")
            if status == 200:
                return
        await asyncio.sleep(0.01)


async def _get_status(url: str, path: str) -> int:
    parts = urlsplit(url)
    context = None
    if parts.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname = False  # it is ourselves we talk to, whatever the certificate says
        context.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=context)
    try:
        writer.write(
            f"GET {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n\r\n".encode()
        )
        words = (await reader.readline()).split()
        return int(words[1]) if len(words) > 1 else 0
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGTERM or SIGINT sets ``stop``; the second does what it does by default."""
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)

    def on_signal(number: int) -> None:
        if not stop.is_set():
            logger.info("stopping: running requests may finish; a second signal ends at once")
            stop.set()
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in handled:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


@contextmanager
def _no_signals() -> Iterator[None]:
    yield


async def _on_daemon_thread(function: Callable[[], T]) -> T:
    """Run a blocking function on a thread that does not keep an interrupted process alive."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.cancelled():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result, error = function(), None
        except BaseException as raised:
            result, error = None, raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="fullbore-load", daemon=True).start()
    return await outcome
