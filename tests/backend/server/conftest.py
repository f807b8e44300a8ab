"""A scripted engine, and calls to the application over it as an ASGI server makes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from fullbore_backend import (
    ContextLengthError,
    Delta,
    EngineStats,
    EngineStoppedError,
    QueueFullError,
    SamplingParams,
    TokenLogprobs,
)
from fullbore_backend.server import ServerConfig, create_app


@pytest.fixture
def anyio_backend() -> str:
    """The server runs on asyncio alone, as Granian does."""
    return "asyncio"


class LetterTokenizer:
    """One token for each character: its code point."""

    def encode_prompt(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode_prompt("".join(message["content"] for message in messages))

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class EchoStream:
    """Says the prompt, a token a delta; waits while held; fails where told to."""

    def __init__(self, engine: EchoEngine, request_id: str, prompt: Sequence[int], limit: int):
        self.request_id = request_id
        self.engine = engine
        self.tokens = list(prompt)[:limit]
        self.said = 0

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        await self.engine.go.wait()
        await asyncio.sleep(0)
        if self.engine.failure is not None and self.said == self.engine.fail_after:
            raise self.engine.failure
        if self.said == len(self.tokens):
            raise StopAsyncIteration
        token = self.tokens[self.said]
        self.said += 1
        last = self.said == len(self.tokens)
        if last:
            self.engine.live.discard(self.request_id)
        return Delta(
            text=chr(token),
            token_ids=(token,),
            logprobs=(TokenLogprobs(token, -0.5, ((token, -0.5), (65, -2.0))),)
            if self.engine.params[-1].logprobs is not None
            else (),
            finish_reason="length" if last else None,
            num_generated=self.said,
            num_cached=1,
        )

    def cancel(self) -> None:
        if self.request_id in self.engine.live:
            self.engine.live.discard(self.request_id)
            self.engine.cancelled.append(self.request_id)


class EchoEngine:
    """The face of an AsyncEngine, scripted."""

    def __init__(self) -> None:
        self.tokenizer = LetterTokenizer()
        self.model_name = "echo"
        self.max_model_len = 1000
        self.engine = SimpleNamespace(config="echo config")
        self.healthy = True
        self.death: BaseException | None = None
        self.go = asyncio.Event()
        self.go.set()
        self.failure: Exception | None = None
        self.fail_after = 0
        self.queue_limit = 100
        self.live: set[str] = set()
        self.cancelled: list[str] = []
        self.params: list[SamplingParams] = []
        self.salts: list[str | None] = []
        self.buffers: list[int | None] = []
        self.submitted = asyncio.Semaphore(0)

    async def until_live(self, count: int) -> None:
        """Wait until that many requests were submitted since the last call."""
        for _ in range(count):
            await self.submitted.acquire()

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str | None,
        priority: int,
        buffer_tokens: int | None,
    ) -> EchoStream:
        params.validate(vocab_size=0x110000)
        if not self.healthy:
            raise EngineStoppedError("stopping")
        if len(prompt_token_ids) > self.max_model_len:
            raise ContextLengthError("too long", param="prompt")
        if len(self.live) >= self.queue_limit:
            raise QueueFullError("full", retry_after=1.2)
        self.live.add(request_id)
        self.params.append(params)
        self.salts.append(cache_salt)
        self.buffers.append(buffer_tokens)
        self.submitted.release()
        return EchoStream(self, request_id, prompt_token_ids, params.max_tokens or 1000)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.live),
            num_waiting=0,
            num_blocks=8,
            num_blocks_used=2,
            num_blocks_cached=0,
            num_preemptions=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            prompt_tokens=0,
            generation_tokens=0,
            num_steps=0,
            step_seconds=0.0,
            requests_finished={"stop": 3},
        )


@dataclass
class Exchange:
    """What a response said, message by message."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(b"".join(self.parts))

    @property
    def events(self) -> list[str]:
        blocks = b"".join(self.parts).decode().split("\n\n")
        assert blocks.pop() == ""
        return [block.removeprefix("data: ") for block in blocks]

    @property
    def chunks(self) -> list[Any]:
        assert self.events[-1] == "[DONE]"
        return [json.loads(event) for event in self.events[:-1]]


Call = Callable[..., Awaitable[Exchange]]


async def exchange(
    app: Any,
    path: str,
    body: object = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
    left: asyncio.Event | None = None,
    got: Exchange | None = None,
) -> Exchange:
    """One request and its response, written to ``got``; the peer leaves when ``left`` is set."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    all_headers = {"content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method or ("GET" if body is None else "POST"),
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(k.encode(), v.encode()) for k, v in all_headers.items()],
        "server": ("test", 80),
        "client": ("test", 1),
    }
    inbox = [{"type": "http.request", "body": raw, "more_body": False}]
    got = Exchange() if got is None else got

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert got.status == 0, "a second response was started"
            got.status = message["status"]
            got.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            assert got.status, "a body without a start"
            got.parts.append(message["body"])

    await app(scope, receive, send)
    return got


@pytest.fixture
def engine() -> EchoEngine:
    """The engine behind the application."""
    return EchoEngine()


@pytest.fixture
def call_with(engine: EchoEngine) -> Callable[[ServerConfig], Call]:
    """Makes a :func:`call` to an application with settings of its own."""

    def with_config(config: ServerConfig) -> Call:
        app = create_app(engine, config, clock=lambda: 0.0, wall_clock=lambda: 1000.0)
        return partial(exchange, app)

    return with_config


@pytest.fixture
def call(call_with: Callable[[ServerConfig], Call]) -> Call:
    """Sends a request to an application with default settings, and returns what it answered."""
    return call_with(ServerConfig())
