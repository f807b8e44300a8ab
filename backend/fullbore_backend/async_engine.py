"""An engine on a thread of its own, spoken to from an asyncio event loop.

The loop and the engine's thread share a mailbox and nothing else: calls become messages that the
thread reads between steps, and a step's deltas come back to the loop in one call. Deltas that
arrive while a stream's reader is away reach it as one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from .engine import Engine, EngineStats
from .errors import (
    BackendError,
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
    StepFailedError,
)
from .request import Delta, SamplingParams
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Add:
    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    cache_salt: str | None
    priority: int


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class RequestStream(AsyncIterator[Delta]):
    """The deltas of one request; ends after the one that carries a finish reason.

    Read by one task at a time. Leaving before the end without :meth:`cancel` keeps the request
    running: put the cancel into a ``finally``.
    """

    __slots__ = ("_engine", "_error", "_finished", "_pending", "_wakeup", "request_id")

    def __init__(self, engine: AsyncEngine, request_id: str) -> None:
        self.request_id = request_id
        self._engine = engine
        self._pending: list[Delta] = []
        self._error: BackendError | None = None
        self._finished = False
        self._wakeup: asyncio.Future[None] | None = None

    async def __anext__(self) -> Delta:
        """The next delta.

        :raises StepFailedError: the step that carried the request raised.
        :raises EngineStoppedError: the engine died or was stopped.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._finished:
                raise StopAsyncIteration
            self._wakeup = asyncio.get_running_loop().create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None
        deltas, self._pending = self._pending, []
        return deltas[0] if len(deltas) == 1 else _merge(deltas)

    def cancel(self) -> None:
        """End the request; its blocks are free within one step. Safe at any time, any number of
        times.
        """
        if not self._finished:
            self._finished = True
            self._engine._forget(self.request_id, abort=True)
            self._wake()

    def _push(self, delta: Delta) -> None:
        if delta.finish_reason == "error":
            self._fail(StepFailedError(f"the engine failed at this request: {delta.error}"))
            return
        self._pending.append(delta)
        if delta.finish_reason is not None:
            self._finished = True
            self._engine._forget(self.request_id, abort=False)
        self._wake()

    def _fail(self, error: BackendError) -> None:
        self._finished = True
        self._error = error
        self._engine._forget(self.request_id, abort=False)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


class AsyncEngine:
    """Runs an :class:`Engine` on its own thread. Every method is called on one event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._streams: dict[str, RequestStream] = {}
        self._ids = itertools.count()
        self._mail: list[_Add | _Abort] = []
        self._num_arriving = 0
        self._condition = threading.Condition()
        self._stopping = False
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: BaseException | None = None
        self._stats = engine.stats()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def model_name(self) -> str:
        """The name the model is served under."""
        return self.engine.model_name

    @property
    def max_model_len(self) -> int:
        """The most tokens a request may have, prompt and output together."""
        return self.engine.max_model_len

    @property
    def healthy(self) -> bool:
        """True while the thread runs and takes requests."""
        return self._thread is not None and self._thread.is_alive() and not self._draining

    @property
    def death(self) -> BaseException | None:
        """What ended the engine's thread, if it died."""
        return self._death

    async def start(self) -> None:
        """Start the thread, after one step that makes the first request as fast as the next."""
        if self._thread is not None:
            raise EngineStoppedError("this engine was started before; make a new one.")
        self._loop = asyncio.get_running_loop()
        await self._loop.run_in_executor(None, self.engine.warm_up)
        self._thread = threading.Thread(target=self._run, name="fullbore-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> RequestStream:
        """Queue a request and return its stream at once.

        :raises InvalidRequestError: a field is out of range, or the id is in use.
        :raises ContextLengthError: the request can never fit.
        :raises QueueFullError: too many wait already.
        :raises EngineStoppedError: the engine is not running.
        """
        if not self.healthy:
            raise EngineStoppedError("the engine is not running or is shutting down.")
        self.engine.check(prompt_token_ids, params)
        self._check_queue()
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self._streams:
            raise InvalidRequestError(f"request id {request_id!r} is in use.", param="request_id")
        stream = self._streams[request_id] = RequestStream(self, request_id)
        self._idle.clear()
        self._post(
            _Add(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                params=params,
                cache_salt=cache_salt,
                priority=priority,
            )
        )
        return stream

    def stats(self) -> EngineStats:
        """The engine's counts after its latest step. Cheap."""
        return self._stats

    async def drain(self, timeout: float) -> bool:
        """Take no more requests, wait for those that run, and cancel what is left.

        :param timeout: seconds to wait.
        :returns: whether all finished in time.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            for stream in list(self._streams.values()):
                stream._fail(EngineStoppedError("the server shut down before the request ended."))
                self._post(_Abort(stream.request_id))
            return False
        return True

    async def stop(self) -> None:
        """End the thread after the step in progress; live requests fail. Safe to call again."""
        self._draining = True
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread is not None and self._thread.is_alive():
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._fail_all(EngineStoppedError("the engine was stopped."))

    # On the loop

    def _check_queue(self) -> None:
        limit = self.engine.config.max_waiting
        waiting = self.engine.scheduler.num_waiting + self._num_arriving
        if waiting >= limit:
            raise QueueFullError(
                f"{waiting} requests wait already, and the limit is {limit}. Retry later.",
                retry_after=1.0,
            )

    def _post(self, message: _Add | _Abort) -> None:
        with self._condition:
            self._mail.append(message)
            self._num_arriving += isinstance(message, _Add)
            self._condition.notify()

    def _forget(self, request_id: str, *, abort: bool) -> None:
        self._streams.pop(request_id, None)
        if abort:
            self._post(_Abort(request_id))
        if not self._streams:
            self._idle.set()

    def _deliver(self, deltas: Sequence[tuple[str, Delta]], stats: EngineStats) -> None:
        self._stats = stats
        for request_id, delta in deltas:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream._push(delta)

    def _reject(self, request_id: str, error: BackendError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream._fail(error)

    def _fail_all(self, error: BackendError) -> None:
        for stream in list(self._streams.values()):
            stream._fail(error)

    # On the engine's thread

    def _run(self) -> None:
        assert self._loop is not None
        try:
            while self._read_mail():
                deltas = self.engine.step()
                self._call(self._deliver, deltas, self.engine.stats())
        except BaseException as error:
            logger.exception("the engine died")
            self._death = error
            message = f"the engine died: {type(error).__name__}: {error}"
            self._call(self._fail_all, EngineStoppedError(message))
        finally:
            self.engine.abort_all()

    def _read_mail(self) -> bool:
        """Wait for something to do, and take in the messages; ``False`` when told to stop."""
        with self._condition:
            while not (self._mail or self._stopping or self.engine.has_work()):
                self._condition.wait()
            if self._stopping:
                return False
            mail, self._mail = self._mail, []
            self._num_arriving = 0
        for message in mail:
            if isinstance(message, _Abort):
                self.engine.abort(message.request_id)
                continue
            try:
                self.engine.add(
                    message.request_id,
                    message.prompt_token_ids,
                    message.params,
                    cache_salt=message.cache_salt,
                    priority=message.priority,
                )
            except BackendError as error:
                self._call(self._reject, message.request_id, error)
        return True

    def _call(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop was closed under a running engine: nobody is left to be told.
            logger.warning("the event loop closed before its engine was stopped")
            self._stopping = True


def _merge(deltas: Sequence[Delta]) -> Delta:
    last = deltas[-1]
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_generated=last.num_generated,
        num_cached=last.num_cached,
    )
