"""The event loop a transport lives on: its clock, its one-shot signals, its background tasks.

Owns the few things anyio has no cheap or no detached form of. A signal is awaited once per
streamed chunk, where `anyio.Event` costs 7 µs more than the loop's own future. A connection's task
must outlive the request that opened it and has no task group to live in, because users such as
`openai.AsyncOpenAI` never enter their `http_client` as a context manager. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

Signal = Any
"""A one-shot flag: `await signal` returns once `Runtime.wake(signal)` has been called."""

Run = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One event loop, as the transport needs it.

    Attributes:
        clock: Returns seconds on the loop's own clock, the one anyio's deadlines are on.
        signal: Returns a fresh signal, to be awaited by one task at most.
        wake: Sets a signal; harmless if it is set already or its waiter was cancelled.
        spawn: Starts a task that belongs to the loop, not to the caller; it inherits none of the
            caller's context variables and must not let an exception out.
        post: Runs a function on the loop soon; callable from any thread and from a finaliser.
            Does nothing once the loop is closed.
        is_current: Whether the caller runs on this loop.
    """

    clock: Callable[[], float]
    signal: Callable[[], Signal]
    wake: Callable[[Signal], None]
    spawn: Callable[[Run], None]
    post: Callable[[Callable[[], object]], None]
    is_current: Callable[[], bool]


def current_runtime() -> Runtime:
    """Return the `Runtime` of the loop the caller runs on, asyncio or trio."""
    trio = sys.modules.get("trio")  # a running trio is an imported one
    if trio is not None and trio.lowlevel.in_trio_task():
        return _trio_runtime()
    return _asyncio_runtime()


def _asyncio_runtime() -> Runtime:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps weak references only

    def wake(signal: asyncio.Future[None]) -> None:
        if not signal.done():
            signal.set_result(None)

    def spawn(run: Run) -> None:
        task = loop.create_task(run(), context=contextvars.Context())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def post(call: Callable[[], object]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call)

    def is_current() -> bool:
        try:
            return asyncio.get_running_loop() is loop
        except RuntimeError:
            return False

    return Runtime(
        clock=loop.time,
        signal=loop.create_future,
        wake=wake,
        spawn=spawn,
        post=post,
        is_current=is_current,
    )


class _TrioSignal:
    """A `trio.Event` that is awaited itself, as a future is."""

    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def __await__(self) -> Generator[Any, Any, None]:
        yield from self.event.wait().__await__()


def _trio_runtime() -> Runtime:
    import trio

    token = trio.lowlevel.current_trio_token()

    def post(call: Callable[[], object]) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(call)

    def spawn(run: Run) -> None:
        trio.lowlevel.spawn_system_task(run)

    def is_current() -> bool:
        return trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is token

    return Runtime(
        clock=trio.current_time,
        signal=lambda: _TrioSignal(trio.Event()),
        wake=lambda signal: signal.event.set(),
        spawn=spawn,
        post=post,
        is_current=is_current,
    )


def enter_loop(runtime: Runtime | None, *, closed: bool) -> Runtime:
    """Return the runtime a transport belongs to: that of its first use.

    :param runtime: what this returned before; ``None`` at the first use.
    :raises RuntimeError: the transport is closed, or belongs to another event loop.
    """
    if closed:
        raise RuntimeError("The transport is closed. Open a new one.")
    if runtime is None:
        return current_runtime()
    if not runtime.is_current():
        raise RuntimeError(
            "The transport belongs to another event loop or thread: its connections live on "
            "the loop it was first used on. Open one client per event loop."
        )
    return runtime
