"""The engine on its thread: streams, backpressure, cancellation, draining, death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fullbore_backend import (
    AsyncEngine,
    ConfigError,
    Engine,
    EngineConfig,
    EngineStats,
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
MEDIUM = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
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


async def until(engine: AsyncEngine, condition: Callable[[EngineStats], bool]) -> EngineStats:
    """The first statistics that the loop gets to know of which this is true."""
    while not condition(engine.stats()):
        await asyncio.sleep(0.001)  # a loop that spins would keep the engine's thread from running
    return engine.stats()


async def ended(engine: AsyncEngine, count: int) -> None:
    """Until this many requests have ended and the loop knows it."""
    stats = await until(engine, lambda stats: sum(stats.requests_finished.values()) >= count)
    assert stats.num_blocks_used == 0


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


async def test_a_reader_that_stops_stops_its_request_and_no_other(core: Engine) -> None:
    """Exactly ``buffer_tokens`` are generated ahead; nothing is lost when it reads on."""
    one, other = core.generate([PROMPT, PROMPT[5:]], MEDIUM)
    before = core.stats()
    async with running(core) as engine:
        stream = engine.submit(PROMPT, MEDIUM, buffer_tokens=8)
        neighbour = engine.submit(PROMPT[5:], MEDIUM, buffer_tokens=8)
        assert await text_of(neighbour) == (list(other.token_ids), other.text)
        stats = await until(engine, lambda stats: stats.num_paused == 1 and not stats.num_running)
        assert stats.generation_tokens - before.generation_tokens == 30 + 8
        assert stats.num_blocks_used > 0  # kept, since nobody needs them
        assert not core.has_work()  # so the thread sleeps
        first = await anext(stream)
        assert len(first.token_ids) == 8
        # Read as soon as it can be, it is paused again and again, and complete in the end.
        ids, text = await text_of(stream)
        assert [*first.token_ids, *ids] == list(one.token_ids)
        assert first.text + text == one.text
        assert engine.stats().num_preemptions == before.num_preemptions


@pytest.mark.parametrize("buffer_tokens", [1, 3])
async def test_no_more_is_ever_unread_than_the_buffer_holds(
    core: Engine, buffer_tokens: int
) -> None:
    """Read whenever the request is paused, so that each read finds the buffer full."""
    async with running(core) as engine:
        stream = engine.submit(PROMPT, SHORT, buffer_tokens=buffer_tokens)
        read = 0
        while read < 6:
            expected = min(read + buffer_tokens, 6)
            stats = await until(engine, lambda stats, n=expected: stats.generation_tokens >= n)
            assert (stats.generation_tokens, stats.num_running) == (expected, 0)
            read += len((await anext(stream)).token_ids)
            assert read == expected


async def test_the_bound_holds_while_the_loop_is_busy(core: Engine) -> None:
    """The loop hears of no step until it has time; the engine's thread keeps count itself."""
    async with running(core) as engine:
        before = core.stats().generation_tokens
        stream = engine.submit(PROMPT, LONG, buffer_tokens=8)
        while not core.stats().num_paused:
            time.sleep(0.001)  # noqa: ASYNC251  # the loop is kept busy on purpose
        assert core.stats().generation_tokens - before == 8
        assert len((await anext(stream)).token_ids) == 8
        stream.cancel()
        await ended(engine, 1)


async def test_without_a_bound_a_request_runs_to_its_end_unread(core: Engine) -> None:
    async with running(core) as engine:
        stream = engine.submit(PROMPT, MEDIUM, buffer_tokens=None)
        stats = await until(engine, lambda stats: bool(stats.requests_finished))
        assert stats.num_paused == 0
        assert [len(delta.token_ids) async for delta in stream] == [30]


async def test_readers_that_are_away_do_not_stop_the_service(core: Engine) -> None:
    """More of them than there are seats, and still others are served at once."""
    async with running(core) as engine:
        away = [engine.submit(PROMPT[i:], LONG, buffer_tokens=2) for i in range(6)]
        await until(engine, lambda stats: stats.num_paused == 6)
        assert len((await text_of(engine.submit(PROMPT, SHORT)))[0]) == 6
        for stream in away:
            stream.cancel()
        await ended(engine, 7)


async def test_a_paused_request_is_cancelled_and_drained_like_any_other(core: Engine) -> None:
    async with running(core) as engine:
        streams = [engine.submit(PROMPT, LONG, buffer_tokens=2) for _ in range(2)]
        await until(engine, lambda stats: stats.num_paused == 2)
        streams[0].cancel()
        await until(engine, lambda stats: stats.num_paused == 1)
        assert not await engine.drain(timeout=0)
        await ended(engine, 2)
        with pytest.raises(EngineStoppedError):
            await text_of(streams[1])


async def test_a_buffer_below_one_is_refused(core: Engine) -> None:
    async with running(core) as engine:
        with pytest.raises(ConfigError, match="buffer_tokens is 0"):
            engine.submit(PROMPT, SHORT, buffer_tokens=0)


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


async def test_the_refused_are_told_to_come_back_as_fast_as_the_queue_drains(core: Engine) -> None:
    now = 0.0
    engine = AsyncEngine(core, clock=lambda: now)
    await engine.start()
    try:
        streams = []
        told: list[float] = []
        while len(told) < 3:
            try:
                streams.append(engine.submit(PROMPT, LONG))
            except QueueFullError as error:
                told.append(error.retry_after)
                now += 4  # in which nobody is served
        assert told == [1, 4, 8]
    finally:
        await engine.stop()


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

    def launch(self, *args: Any) -> Any:
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
