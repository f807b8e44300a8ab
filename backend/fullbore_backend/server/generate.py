"""The endpoints that generate: a request in, its choices from the engine out, whole or streamed.

Owns the life of the engine's streams: each one submitted is cancelled when its request ends,
however it ends. It does not know chat from completions.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from ..async_engine import BUFFER_TOKENS, AsyncEngine, RequestStream
from ..errors import BackendError, EngineStoppedError, InvalidRequestError
from ..request import Delta
from . import sse
from .config import ServerConfig
from .errors import HttpError, describe
from .fields import Fields, parse_object
from .http import (
    EVENT_STREAM,
    ClientDisconnectedError,
    read_json_body,
    respond,
    start,
    until_disconnect,
)
from .metrics import Latencies
from .wire import Choice, GenerationRequest, Head, Settings, Usage

logger = logging.getLogger(__name__)

LARGE_BODY = 32 * 2**10
"""Bytes of a body beyond which it is understood on a thread, so that the event loop goes on."""


@dataclass(slots=True)
class _Tally:
    """What usage is counted from, for one choice."""

    generated: int = 0
    cached: int = 0


class Generate:
    """An ASGI application for one generating endpoint.

    :param read: understands a request body.
    :param id_prefix: of response ids, such as ``chatcmpl``.
    :param clock: seconds; latencies are measured with it.
    :param wall_clock: seconds since the epoch, for ``created``.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        latencies: Latencies,
        read: Callable[[Fields], GenerationRequest],
        *,
        id_prefix: str,
        fingerprint: str,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._config = config
        self._latencies = latencies
        self._read = read
        self._id_prefix = id_prefix
        self._fingerprint = fingerprint
        self._clock = clock
        self._wall_clock = wall_clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; failures before the first token are raised, later ones streamed."""
        arrived = self._clock()
        try:
            body = await read_json_body(scope, receive, limit=self._config.max_body_bytes)
            await until_disconnect(receive, self._answer(scope, send, body, arrived))
        except ClientDisconnectedError:
            return

    async def _answer(self, scope: Scope, send: Send, body: bytes, arrived: float) -> None:
        if len(body) > LARGE_BODY:
            request, prompts = await asyncio.to_thread(self._understand, body)
        else:
            request, prompts = self._understand(body)
        settings = request.settings
        head = Head(
            id=f"{self._id_prefix}-{secrets.token_hex(12)}",
            created=int(self._wall_clock()),
            model=settings.model,
            fingerprint=self._fingerprint,
        )
        with _submitted(self._engine, prompts, settings, head.id) as streams:
            answer = _Answer(self._engine, self._latencies, self._clock, arrived, prompts, settings)
            if settings.stream:
                await answer.stream(scope, send, request, head, streams)
            else:
                await answer.collect(scope, send, request, head, streams)

    def _understand(self, body: bytes) -> tuple[GenerationRequest, list[list[int]]]:
        request = self._read(parse_object(body))
        model = request.settings.model
        if model != self._engine.model_name:
            raise HttpError(
                404,
                f"The model {model!r} does not exist here; this server serves "
                f"{self._engine.model_name!r}.",
                param="model",
                code="model_not_found",
            )
        prompts = request.encode(self._engine.tokenizer)
        limit = self._config.max_choices
        if len(prompts) * request.settings.n > limit:
            raise InvalidRequestError(
                f"{len(prompts)} prompts with n = {request.settings.n} make "
                f"{len(prompts) * request.settings.n} choices; at most {limit} are allowed.",
                param="n" if len(prompts) == 1 else "prompt",
            )
        return request, prompts


@contextmanager
def _submitted(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], settings: Settings, response_id: str
) -> Iterator[list[RequestStream]]:
    """Submit every choice, those of the first prompt first; cancel what is left on the way out."""
    streams: list[RequestStream] = []
    try:
        for prompt in prompts:
            for choice in range(settings.n):
                stream = engine.submit(
                    prompt,
                    settings.params_of(choice),
                    request_id=f"{response_id}-{len(streams)}",
                    cache_salt=settings.cache_salt,
                    priority=settings.priority,
                    # A whole answer is read to the end, one choice after the other: the later
                    # ones must not be paused for it. A streamed one goes at its peer's pace.
                    buffer_tokens=BUFFER_TOKENS if settings.stream else None,
                )
                streams.append(stream)
        yield streams
    finally:
        for stream in streams:
            stream.cancel()


class _Answer:
    """One response in the making."""

    def __init__(
        self,
        engine: AsyncEngine,
        latencies: Latencies,
        clock: Callable[[], float],
        arrived: float,
        prompts: Sequence[Sequence[int]],
        settings: Settings,
    ) -> None:
        self._engine = engine
        self._latencies = latencies
        self._clock = clock
        self._arrived = arrived
        self._prompts = prompts
        self._n = settings.n
        self._tallies = [_Tally() for _ in range(len(prompts) * settings.n)]

    async def collect(
        self,
        scope: Scope,
        send: Send,
        request: GenerationRequest,
        head: Head,
        streams: Sequence[RequestStream],
    ) -> None:
        """Wait for every choice and send one object."""
        # One after the other: what arrives for the later ones waits in their streams, merged.
        choices = [await self._choice(index, stream) for index, stream in enumerate(streams)]
        body = request.reply(head, choices, self._usage(), self._engine.tokenizer)
        self._observe_end()
        await respond(scope, send, 200, body)

    async def _choice(self, index: int, stream: RequestStream) -> Choice:
        deltas: list[Delta] = []
        async for delta in stream:
            self._count(index, delta)
            deltas.append(delta)
        last = deltas[-1] if deltas else None
        if last is None or last.finish_reason not in ("stop", "length"):
            raise EngineStoppedError("the request was ended before it was finished.")
        return Choice(
            text="".join(delta.text for delta in deltas),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=[entry for delta in deltas for entry in delta.logprobs],
        )

    async def stream(
        self,
        scope: Scope,
        send: Send,
        request: GenerationRequest,
        head: Head,
        streams: Sequence[RequestStream],
    ) -> None:
        """Send each delta as it comes. The response starts with the first one, so that a failure
        before it still has a status of its own."""
        events = request.events(head, self._engine.tokenizer)
        turn = asyncio.Lock()  # one choice writes at a time; the others' deltas merge meanwhile
        started = False

        async def write(data: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                await start(
                    scope, send, 200, EVENT_STREAM, headers=((b"cache-control", b"no-store"),)
                )
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def relay(index: int, stream: RequestStream) -> None:
            opening = events.first(index)
            async for delta in stream:
                self._count(index, delta)
                if delta.finish_reason not in (None, "stop", "length"):
                    raise EngineStoppedError("the request was ended before it was finished.")
                if data := events.delta(index, delta):
                    async with turn:
                        await write(opening + data)
                    opening = b""

        try:
            await _all(relay(index, stream) for index, stream in enumerate(streams))
            usage = events.usage(self._usage()) if request.settings.include_usage else b""
            final = usage + sse.DONE
            self._observe_end()
        except BackendError as error:
            if not started:
                raise
            logger.warning("%s failed while it was streamed: %s", head.id, error)
            final = sse.failure(describe(error)[1])
        await send({"type": "http.response.body", "body": final, "more_body": False})

    def _count(self, index: int, delta: Delta) -> None:
        tally = self._tallies[index]
        if tally.generated == 0 and delta.num_generated:
            self._latencies.first_token.observe(self._clock() - self._arrived)
        tally.generated = delta.num_generated
        tally.cached = delta.num_cached

    def _observe_end(self) -> None:
        self._latencies.end_to_end.observe(self._clock() - self._arrived)

    def _usage(self) -> Usage:
        """A prompt counts once however many choices it has; cached as its first choice found it."""
        return Usage(
            prompt=sum(len(prompt) for prompt in self._prompts),
            completion=sum(tally.generated for tally in self._tallies),
            cached=sum(tally.cached for tally in self._tallies[:: self._n]),
        )


async def _all(relays: Iterator[Coroutine[None, None, None]]) -> None:
    """Run them side by side until all are done, or one raises: its error, the others cancelled."""
    first, *others = relays
    if not others:
        return await first
    try:
        async with asyncio.TaskGroup() as group:
            for relay in (first, *others):
                group.create_task(relay)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
