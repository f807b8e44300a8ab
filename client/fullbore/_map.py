"""Lazy input → bounded in flight → results, in input order or as they finish.

Owns the pulling of inputs, the buffer of results and the end of a run. Does not know how a
request is carried out: see ``_attempt``.

A run works in the client's background and hands over through :class:`Job`, which the background
tasks hold. What the user holds, :class:`MapRun`, is held by nobody else: when a loop over it is
left by ``break`` the object goes away, and with it the work still in flight.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.lowlevel

from ._attempt import Call
from ._background import Background
from ._governor import Governor
from ._stats import Observer, RunStats
from ._types import OnError, Request, Result
from .errors import ClientClosedError, ClientStateError, PromptError
from .limits import Permit

_END: Any = object()

Renderer = Callable[[Any, int], Request]
"""Makes a request of a prompt and its index; raises :class:`PromptError`."""


class Job:
    """One run: what its background tasks and its reader share."""

    def __init__(
        self,
        governor: Governor,
        source: Iterable[Any] | AsyncIterable[Any],
        render: Renderer,
        stats: RunStats,
        *,
        ordered: bool,
        on_error: OnError,
        buffer: int | None,
        observers: Sequence[Observer],
    ) -> None:
        self._governor = governor
        self._source = source
        self._render = render
        self._ordered = ordered
        self._raise_errors = on_error == "raise"
        self._buffer = buffer
        self._observers = observers
        self._scope = anyio.CancelScope()
        self._ready: deque[Result] = deque()
        self._early: dict[int, Result] = {}  # finished before one that comes first
        self._next_index = 0
        self._wake_reader = anyio.Event()
        self._wake_feeder = anyio.Event()
        self._feeder_waits = False
        self._failure: BaseException | None = None
        self.stats = stats
        self.ended = anyio.Event()
        self.stopped = False
        """Whether its reader ended it; otherwise an early end is the client's doing."""

    def cancel(self) -> None:
        """Stop pulling and cut off what is in flight; results not yet read are dropped."""
        self.stopped = True
        self._scope.cancel()

    async def run(self) -> None:
        """Do the work. Raises nothing: a failure is handed to the reader."""
        completed = False
        try:
            for observer in self._observers:
                observer.start(self.stats)
            with self._scope:
                async with anyio.create_task_group() as group:
                    await self._feed(group)
                completed = True
        except Exception as exc:  # from outside our own code: the source, or a plan of the user's
            self._failure = self._failure or _only(exc)
        finally:
            if not completed and self._failure is None and not self.stopped:
                self._failure = ClientClosedError("The client was closed while map was running.")
            self.stats.ended()
            self.ended.set()
            self._wake_reader.set()
            for observer in self._observers:
                with contextlib.suppress(Exception):  # a bar that cannot be drawn is not our end
                    observer.stop()

    async def _feed(self, group: anyio.abc.TaskGroup) -> None:
        """Pull a prompt only when there is room, and the next only when this one was let in."""
        pull = _Puller(self._source)
        limiter, stats = self._governor.limiter, self.stats
        try:
            while True:
                await self._wait_for_room()
                try:
                    prompt = await pull.next()
                except Exception as exc:
                    self._failure = exc  # what is in flight finishes first
                    return
                if prompt is _END:
                    return
                index = stats.pulled
                stats.pulled += 1
                try:
                    request = self._render(prompt, index)
                except PromptError as exc:
                    self._deliver(Result(index=index, input=prompt, error=exc))
                    continue
                tokens = request.estimated_input_tokens
                stats.paced_by = limiter.pace(tokens=tokens).quota
                permit = await limiter.acquire(flow=self, tokens=tokens)
                stats.paced_by = ""
                stats.in_flight += 1
                group.start_soon(self._work, request, permit)
        finally:
            await pull.aclose()

    async def _work(self, request: Request, permit: Permit) -> None:
        call = Call(self._governor, request, flow=self, permit=permit)
        try:
            result = await call.run()
        finally:
            self.stats.in_flight -= 1
        self._deliver(result)

    async def _wait_for_room(self) -> None:
        while len(self._ready) + len(self._early) >= self._room():
            self._feeder_waits = True
            self._wake_feeder = anyio.Event()
            await self._wake_feeder.wait()

    def _room(self) -> int:
        return max(64, 2 * self._governor.limiter.limit) if self._buffer is None else self._buffer

    def _deliver(self, result: Result) -> None:
        self.stats.finished(result)
        if result.error is not None and self._raise_errors:
            if self._failure is None:
                self._failure = result.error
            self._scope.cancel()
            return
        if not self._ordered:
            self._ready.append(result)
        else:
            self._early[result.index] = result
            while (following := self._early.pop(self._next_index, None)) is not None:
                self._ready.append(following)
                self._next_index += 1
        if self._ready:
            self._wake_reader.set()

    async def next(self) -> Result:
        """Return the next result.

        :raises StopAsyncIteration: there is none left.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._ready and not (self._raise_errors and self._failure):
                result = self._ready.popleft()
                if self._feeder_waits and len(self._ready) + len(self._early) < self._room():
                    self._feeder_waits = False
                    self._wake_feeder.set()
                return result
            if self.ended.is_set():
                if self._failure is not None and not self.stopped:
                    raise self._failure
                raise StopAsyncIteration
            if self._wake_reader.is_set():
                self._wake_reader = anyio.Event()
            await self._wake_reader.wait()


def _only(exc: Exception) -> BaseException:
    """Take a lone exception out of the groups that task groups wrap it in."""
    found: BaseException = exc
    while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
        found = found.exceptions[0]
    return found


class _Puller:
    """Takes prompts from an iterable or an async iterable, one at a time."""

    def __init__(self, source: Iterable[Any] | AsyncIterable[Any]) -> None:
        self._async: AsyncIterator[Any] | None = None
        if isinstance(source, AsyncIterable):
            self._async = source.__aiter__()
        else:
            self._sync = iter(source)

    async def next(self) -> Any:
        """Return the next prompt, or ``_END``."""
        if self._async is None:
            return next(self._sync, _END)
        try:
            return await self._async.__anext__()
        except StopAsyncIteration:
            return _END

    async def aclose(self) -> None:
        """Let a generator run its ``finally`` blocks."""
        if self._async is None:
            close = getattr(self._sync, "close", None)
            if isinstance(self._sync, Generator) and close is not None:
                close()
            return
        aclose = getattr(self._async, "aclose", None)
        if aclose is not None:
            with anyio.move_on_after(5, shield=True):
                await aclose()


class MapRun:
    """The answers to many prompts: await it for a list, or iterate over it.

    ::

        results = await client.map(prompts)          # list of Result, in input order
        async for result in client.map(prompts):     # each as it finishes
            ...
        async with client.map(prompts) as run:       # leaving the block stops what is in flight
            async for result in run:
                ...

    Prompts are pulled only as fast as they can be sent: what has been pulled and not yet read is
    at most what is in flight, plus ``buffer`` finished results, plus one. A reader that stops
    reading therefore stops the run.

    Leaving a loop by ``break`` stops the run as soon as the object is gone, which in CPython is at
    once when nothing else names it; ``async with``, or ``aclose()``, says so explicitly and also
    waits until everything has ended. A run that is cancelled with its caller ends the same way.
    """

    def __init__(self, background: Background, job: Job) -> None:
        self._background = background
        self._job = job
        self._started = False
        self._results: list[Result] | None = None

    @property
    def stats(self) -> RunStats:
        """Counters, rates and percentiles; live while the run goes on."""
        return self._job.stats

    def __await__(self) -> Generator[Any, Any, list[Result]]:
        return self._collect().__await__()

    async def _collect(self) -> list[Result]:
        if self._results is None:
            if self._started:
                raise ClientStateError("This map is being iterated already; await another one.")
            try:
                results = [result async for result in self]
            finally:
                await self.aclose()
            results.sort(key=lambda result: result.index)
            self._results = results
        return self._results

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Result:
        """Return the next result.

        :raises FullboreError: with ``on_error="raise"``, the first failure.
        :raises Exception: whatever the input raised, after what was in flight has been handed out.
        """
        self._start()
        return await self._job.next()

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop the run, if it still goes on, and wait until nothing of it is left."""
        if not self._started:
            self._started = True
            self._job.ended.set()
        if not self._job.ended.is_set():
            self._job.cancel()
            with anyio.CancelScope(shield=True):
                await self._job.ended.wait()

    def _start(self) -> None:
        if not self._started:
            self._background.start(self._job.run)
            self._started = True

    def __del__(self) -> None:
        if not self._started:
            warnings.warn(
                "client.map(…) was neither awaited nor iterated; nothing was sent.",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )
        elif not self._job.ended.is_set():
            self._background.call_soon(self._job.cancel)
