"""A task group that lives from ``open`` to ``close``, whichever tasks call them.

A client may be opened in one task and closed in another (test fixtures, web frameworks), which
no task group entered in the caller's task would survive. So the group is held by a task of its
own. Everything started in it is cancelled, and has ended, when ``close`` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.abc

from .errors import ClientClosedError


class Background:
    """Where work runs that outlives the call that started it, but not its owner."""

    def __init__(self) -> None:
        self._opened = anyio.Event()
        self._closed = anyio.Event()
        self._scope = anyio.CancelScope()
        self._group: anyio.abc.TaskGroup | None = None
        self._task: asyncio.Task[None] | None = None
        self._call_soon: Callable[[Callable[[], object]], object] = lambda function: None

    async def open(self) -> None:
        """Start the task that holds the group."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            import trio

            token = trio.lowlevel.current_trio_token()
            self._call_soon = token.run_sync_soon
            trio.lowlevel.spawn_system_task(self._hold)
        else:
            self._call_soon = loop.call_soon_threadsafe
            self._task = loop.create_task(self._hold(), name="fullbore-background")
        await self._opened.wait()

    def start(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: object) -> None:
        """Run a coroutine function, which must not raise, in the background.

        :raises ClientClosedError: the owner is closed.
        """
        if self._group is None or self._closed.is_set() or self._scope.cancel_called:
            raise ClientClosedError("The client is closed; open it with `async with Client(…)`.")
        self._group.start_soon(function, *args)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run a plain function in the event loop; from any thread, also from a finaliser.

        Nothing happens if the loop is gone: then there is nothing left to do either.
        """
        if self._closed.is_set():
            return
        with contextlib.suppress(RuntimeError):
            self._call_soon(function)

    async def close(self) -> None:
        """Cancel all there is and wait until it has ended."""
        self._scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._closed.wait()

    async def _hold(self) -> None:
        try:
            with self._scope:
                async with anyio.create_task_group() as self._group:
                    self._opened.set()
                    await anyio.sleep_forever()
        finally:
            self._opened.set()
            self._closed.set()
