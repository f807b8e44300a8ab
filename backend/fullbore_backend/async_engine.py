"""An engine on a thread of its own, spoken to from an asyncio event loop.

The loop and the engine's thread share a mailbox and nothing else: calls become messages that the
thread reads between steps, and a step's deltas come back to the loop in one call.

A stream is a window: once ``buffer_tokens`` tokens have been generated that its reader has not
taken, the request is paused, and it goes on when the reader has taken some. The window is kept on
the engine's thread, which pauses before the next step. So the bound holds however late the loop is:
no more than ``buffer_tokens`` unread tokens a stream, in the stream and on the way to it together.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .credit import Credits
from .engine import Engine, EngineStats
from .errors import (
    BackendError,
    ConfigError,
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
)
from .request import Delta, SamplingParams
from .request_stream import RequestStream
from .retry_after import RetryAfter
from .tokenizer import Tokenizer

__all__ = ["BUFFER_TOKENS", "AsyncEngine", "RequestStream"]

logger = logging.getLogger(__name__)

BUFFER_TOKENS = 64
"""Tokens that a stream may hold unread, unless its request says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Add:
    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    cache_salt: str | None
    priority: int
    buffer_tokens: int | None


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Grant:
    """The reader has taken this many tokens since it last said so."""

    request_id: str
    num_tokens: int


class AsyncEngine:
    """Runs an :class:`Engine` on its own thread. Every method is called on one event loop.

    :param clock: seconds, monotonic; refused requests are told by it when to come back.
    """

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self._streams: dict[str, RequestStream] = {}
        self._retry_after = RetryAfter(clock)
        self._credits = Credits()  # the thread's
        self._ids = itertools.count()
        self._mail: list[_Add | _Abort | _Grant] = []
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
        if self._thread is None or self._death is not None or self._draining:
            return False
        return self._thread.is_alive()

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
        buffer_tokens: int | None = BUFFER_TOKENS,
    ) -> RequestStream:
        """Queue a request and return its stream at once.

        :param buffer_tokens: the most tokens that are generated ahead of the stream's reader; the
            request is paused there, and keeps its memory only while nobody else needs it. ``None``
            is no limit, for a reader that comes late but surely.
        :raises ConfigError: ``buffer_tokens`` is below 1.
        :raises InvalidRequestError: a field is out of range, or the id is in use.
        :raises ContextLengthError: the request can never fit.
        :raises QueueFullError: too many wait already.
        :raises EngineStoppedError: the engine is not running.
        """
        if buffer_tokens is not None and buffer_tokens < 1:
            raise ConfigError(
                f"buffer_tokens is {buffer_tokens}; it must be at least 1, or None for no limit."
            )
        if not self.healthy:
            raise EngineStoppedError("the engine is not running or is shutting down.")
        self.engine.check(prompt_token_ids, params)
        self._check_queue()
        request_id = request_id or f"request-{next(self._ids)}"
        if request_id in self._streams:
            raise InvalidRequestError(f"request id {request_id!r} is in use.", param="request_id")
        if not self._streams:
            self._retry_after.begin()
        stream = self._streams[request_id] = RequestStream(
            request_id, buffer_tokens, grant=self._grant, forget=self._forget
        )
        self._idle.clear()
        self._post(
            _Add(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                params=params,
                cache_salt=cache_salt,
                priority=priority,
                buffer_tokens=buffer_tokens,
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
                stream.fail(EngineStoppedError("the server shut down before the request ended."))
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
            seconds = self._retry_after.refuse()
            raise QueueFullError(
                f"{waiting} requests wait already, and the limit is {limit}. "
                f"Retry in about {seconds:.0f} s.",
                retry_after=seconds,
            )

    def _post(self, message: _Add | _Abort | _Grant) -> None:
        with self._condition:
            self._mail.append(message)
            self._num_arriving += isinstance(message, _Add)
            self._condition.notify()

    def _grant(self, request_id: str, num_tokens: int) -> None:
        self._post(_Grant(request_id, num_tokens))

    def _forget(self, request_id: str, abort: bool) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._retry_after.end()
        if abort:
            self._post(_Abort(request_id))
        if not self._streams:
            self._idle.set()

    def _deliver(self, deltas: Sequence[tuple[str, Delta]], stats: EngineStats) -> None:
        self._stats = stats
        for request_id, delta in deltas:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.push(delta)

    def _reject(self, request_id: str, error: BackendError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.fail(error)

    def _fail_all(self, error: BackendError) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)

    # On the engine's thread

    def _run(self) -> None:
        assert self._loop is not None
        try:
            while self._read_mail():
                deltas = self.engine.step()
                self._spend(deltas)
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
            match message:
                case _Add():
                    self._add(message)
                case _Abort(request_id):
                    self._credits.close(request_id)
                    self.engine.abort(request_id)
                case _Grant(request_id, num_tokens):
                    if self._credits.grant(request_id, num_tokens):
                        self.engine.resume(request_id)
        return True

    def _add(self, message: _Add) -> None:
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
            return
        if message.buffer_tokens is not None:
            self._credits.open(message.request_id, message.buffer_tokens)

    def _spend(self, deltas: Sequence[tuple[str, Delta]]) -> None:
        """Pause the requests that are as far ahead of their readers as they may be."""
        for request_id, delta in deltas:
            if delta.finish_reason is not None:
                self._credits.close(request_id)
            elif self._credits.spend(request_id, len(delta.token_ids)):
                self.engine.pause(request_id)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop was closed under a running engine: nobody is left to be told.
            logger.warning("the event loop closed before its engine was stopped")
            self._stopping = True
