"""The engine on its thread: streams, cancellation, draining, death."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fullbore_backend import (
    AsyncEngine,
    Engine,
    EngineConfig,
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
    RequestStream,
    SamplingParams,
    StepFailedError,
)

pytestmark = pytest.mark.anyio
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(100, 140))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def core(model_path: object) -> Engine:
    return Engine(EngineConfig(max_num_seqs=4, kv_cache_bytes=2**27, max_waiting=6))


@asynccontextmanager
async def running(core: Engine) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(core)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        assert not core.has_work()
        assert core.stats().num_blocks_used == 0


async def ended(engine: AsyncEngine, count: int) -> None:
    """Until this many requests have ended and the loop knows it."""
    while sum(engine.stats().requests_finished.values()) < count:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert engine.stats().num_blocks_used == 0


async def text_of(stream: RequestStream) -> tuple[list[int], str]:
    ids: list[int] = []
    text = ""
    async for delta in stream:
        ids += delta.token_ids
        text += delta.text
    return ids, text


async def test_streams_give_what_generate_gives(core: Engine) -> None:
    prompts = [PROMPT[i:] for i in range(5)]
    want = [(list(c.token_ids), c.text) for c in core.generate(prompts, SHORT)]
    async with running(core) as engine:
        streams = [engine.submit(prompt, SHORT) for prompt in prompts]
        assert await asyncio.gather(*map(text_of, streams)) == want


async def test_a_reader_that_was_away_gets_one_delta(core: Engine) -> None:
    async with running(core) as engine:
        stream = engine.submit(PROMPT, SHORT)
        await ended(engine, 1)
        deltas = [delta async for delta in stream]
    assert [len(delta.token_ids) for delta in deltas] == [6]
    assert (deltas[0].finish_reason, deltas[0].num_generated) == ("length", 6)


@pytest.mark.parametrize("tokens_first", [0, 1, 3])
async def test_cancel_frees_everything(core: Engine, tokens_first: int) -> None:
    async with running(core) as engine:
        stream = engine.submit(PROMPT, LONG)
        for _ in range(tokens_first):
            await anext(stream)
        stream.cancel()
        stream.cancel()
        await ended(engine, 1)
        assert engine.stats().requests_finished == {"cancelled": 1}
        with pytest.raises(StopAsyncIteration):
            while True:
                await anext(stream)


async def test_cancel_wakes_a_waiting_reader(core: Engine) -> None:
    async with running(core) as engine:
        blockers = [engine.submit(PROMPT, LONG) for _ in range(4)]
        stream = engine.submit(PROMPT, LONG)
        reader = asyncio.create_task(text_of(stream))
        await asyncio.sleep(0)
        stream.cancel()
        assert await reader == ([], "")
        for blocker in blockers:
            blocker.cancel()
        await ended(engine, 5)


async def test_a_full_queue_is_refused_at_once(core: Engine) -> None:
    async with running(core) as engine:
        streams = []
        with pytest.raises(QueueFullError):
            while len(streams) < 20:
                streams += [engine.submit(PROMPT, LONG)]
        assert 6 <= len(streams) <= 11
        for stream in streams:
            stream.cancel()
        await ended(engine, len(streams))


async def test_requests_at_fault_are_refused_at_once(core: Engine) -> None:
    async with running(core) as engine:
        with pytest.raises(InvalidRequestError):
            engine.submit(PROMPT, SamplingParams(temperature=9))
        stream = engine.submit(PROMPT, SHORT, request_id="mine")
        with pytest.raises(InvalidRequestError, match="mine"):
            engine.submit(PROMPT, SHORT, request_id="mine")
        await text_of(stream)


async def test_drain_finishes_what_runs_and_refuses_what_comes(core: Engine) -> None:
    async with running(core) as engine:
        reader = asyncio.create_task(text_of(engine.submit(PROMPT, SHORT)))
        assert await engine.drain(timeout=60)
        assert len((await reader)[0]) == 6
        assert not engine.healthy
        with pytest.raises(EngineStoppedError):
            engine.submit(PROMPT, SHORT)


async def test_drain_gives_up_after_its_timeout(core: Engine) -> None:
    async with running(core) as engine:
        stream = engine.submit(PROMPT, LONG)
        await anext(stream)
        assert not await engine.drain(timeout=0)
        with pytest.raises(EngineStoppedError):
            await text_of(stream)
        await ended(engine, 1)


async def test_stop_fails_what_runs(core: Engine) -> None:
    async with running(core) as engine:
        stream = engine.submit(PROMPT, LONG)
        await anext(stream)
        await engine.stop()
        with pytest.raises(EngineStoppedError):
            await text_of(stream)


class Raising:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def run(self, *args: Any) -> Any:
        raise self.error


async def test_a_failed_step_fails_its_streams_only(core: Engine) -> None:
    async with running(core) as engine:
        runner: Any = core.runner
        core.runner = Raising(RuntimeError("bad luck"))  # type: ignore[assignment]
        try:
            with pytest.raises(StepFailedError, match="bad luck"):
                await text_of(engine.submit(PROMPT, SHORT))
        finally:
            core.runner = runner
        assert engine.healthy
        assert len((await text_of(engine.submit(PROMPT, SHORT)))[0]) == 6


async def test_a_dead_engine_says_so(core: Engine) -> None:
    """What is no Exception is no failed step: the thread ends, and every stream is told."""
    async with running(core) as engine:
        runner: Any = core.runner
        core.runner = Raising(SystemExit("gone"))  # type: ignore[assignment]
        stream = engine.submit(PROMPT, SHORT)
        try:
            with pytest.raises(EngineStoppedError, match="gone"):
                await text_of(stream)
        finally:
            core.runner = runner
        assert isinstance(engine.death, SystemExit)
        assert not engine.healthy
        with pytest.raises(EngineStoppedError):
            engine.submit(PROMPT, SHORT)
