"""``map``: lazy input, bounded in flight, results in order or as they finish, clean ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fullbore import (
    BadRequestError,
    Client,
    ClientClosedError,
    ClientStateError,
    ConfigError,
    PromptError,
    Retry,
)
from fullbore.testing import FaultServer, Reply, Visit, answer, hold, pieces, status

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def opened(*replies: Reply, **settings: Any) -> AsyncIterator[tuple[Client, FaultServer]]:
    """Open a server with these replies and a client of it."""
    settings = {"model": "m", "concurrency": 4, "retry": Retry(base=0.0), **settings}
    async with FaultServer(*replies) as server, Client(server.url, **settings) as client:
        yield client, server


async def echo(visit: Visit) -> None:
    """Answer with the prompt."""
    await answer(visit.request.json["messages"][-1]["content"])(visit)


class Gates:
    """Answers each prompt when its gate is opened."""

    def __init__(self) -> None:
        self.events: dict[str, anyio.Event] = {}

    def gate(self, prompt: str) -> anyio.Event:
        """Return the event that lets the answer to this prompt go."""
        return self.events.setdefault(prompt, anyio.Event())

    async def __call__(self, visit: Visit) -> None:
        """Answer, when allowed."""
        prompt = visit.request.json["messages"][-1]["content"]
        await self.gate(prompt).wait()
        await answer(prompt)(visit)


async def settled() -> None:
    """Let everything that can run without the network run."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


async def test_awaited_gives_a_list_in_input_order() -> None:
    """Each result belongs to its prompt."""
    prompts = [f"prompt {i}" for i in range(50)]
    async with opened(echo) as (client, server):
        results = await client.map(prompts)
    assert [result.text for result in results] == prompts
    assert [result.input for result in results] == prompts
    assert [result.index for result in results] == list(range(50))
    assert server.peak <= 4


async def test_awaiting_again_gives_the_same_list() -> None:
    """As a task does."""
    async with opened(echo) as (client, server):
        run = client.map(["a"])
        assert await run is await run
    assert len(server.requests) == 1


async def test_iterated_as_they_finish() -> None:
    """The second is done first and comes first."""
    gates = Gates()
    async with opened(gates) as (client, _):
        run = client.map(["a", "b"])
        gates.gate("b").set()
        assert (await anext(run)).text == "b"
        gates.gate("a").set()
        assert (await anext(run)).text == "a"
        with pytest.raises(StopAsyncIteration):
            await anext(run)


async def test_iterated_in_order() -> None:
    """The second waits for the first."""
    gates = Gates()
    async with opened(gates) as (client, server):
        run = client.map(["a", "b", "c"], ordered=True)
        async with run:
            gates.gate("b").set()
            gates.gate("c").set()
            with anyio.move_on_after(0.05):
                pytest.fail(f"came before 'a': {await anext(run)}")
            gates.gate("a").set()
            assert [result.text async for result in run] == ["a", "b", "c"]
    assert len(server.requests) == 3


async def test_prompts_are_pulled_no_faster_than_they_are_sent() -> None:
    """In flight plus one: a generator of a million prompts is not drained."""
    pulled = 0

    def prompts() -> Iterator[str]:
        nonlocal pulled
        for i in range(1_000_000):
            pulled += 1
            yield str(i)

    async with opened(hold(), concurrency=4) as (client, server), client.map(prompts()) as run:
        await server.until(lambda: server.in_progress == 4)
        await settled()
        assert pulled == 5
        assert run.stats.in_flight == 4


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_reader_that_stops_stops_the_pulling(ordered: bool) -> None:
    """Held at most: the buffer, what was in flight when it filled, and one more."""
    pulled = 0

    async def prompts() -> AsyncIterator[str]:
        nonlocal pulled
        while True:
            pulled += 1
            yield str(pulled)

    async with (
        opened(echo, concurrency=4) as (client, server),
        client.map(prompts(), buffer=10, ordered=ordered) as run,
    ):
        first = await anext(run)
        assert first.ok
        await server.until(lambda: len(server.requests) >= 11 and server.in_progress == 0)
        with anyio.move_on_after(0.1):
            await anyio.sleep_forever()
        stuck = pulled
        assert 11 <= stuck <= 1 + 10 + 4 + 1
        for _ in range(20):
            await anext(run)  # it goes on where it stopped
        assert pulled > stuck


async def test_the_reorder_buffer_is_bounded_too() -> None:
    """While the first prompt is stuck, only so many later ones are answered."""
    gates = Gates()
    for i in range(1, 100):
        gates.gate(str(i)).set()
    async with (
        opened(gates, concurrency=2) as (client, server),
        client.map((str(i) for i in range(100)), ordered=True, buffer=5) as run,
    ):
        await server.until(lambda: len(server.requests) >= 6 and server.in_progress == 1)
        with anyio.move_on_after(0.1):
            await anyio.sleep_forever()
        assert len(server.requests) <= 8
        gates.gate("0").set()
        assert [result.index async for result in run] == list(range(100))


async def test_async_input_and_input_without_a_length() -> None:
    """Anything that can be iterated."""

    async def prompts() -> AsyncIterator[str]:
        for i in range(5):
            await anyio.lowlevel.checkpoint()
            yield str(i)

    async with opened(echo) as (client, _):
        run = client.map(prompts())
        assert run.stats.total is None
        assert len(await run) == 5
        assert await client.map([]) == []


async def test_a_failure_is_a_result() -> None:
    """Its neighbours are not touched."""

    async def picky(visit: Visit) -> None:
        prompt = visit.request.json["messages"][-1]["content"]
        await (status(400) if prompt == "bad" else answer(prompt))(visit)

    async with opened(picky) as (client, _):
        run = client.map(["a", "bad", "c"])
        results = await run
    assert [result.ok for result in results] == [True, False, True]
    assert isinstance(results[1].error, BadRequestError)
    assert (run.stats.ok, run.stats.failed, run.stats.done) == (2, 1, 3)


async def test_a_prompt_that_makes_no_sense_is_a_failed_result() -> None:
    """Nothing is sent for it."""
    async with opened(echo) as (client, server):
        results = await client.map(["a", {"nonsense": 1}, "c"])  # type: ignore[list-item]
    assert isinstance(results[1].error, PromptError)
    assert [result.text for result in results] == ["a", "", "c"]
    assert len(server.requests) == 2


async def test_raise_raises_the_first_failure_and_stops_the_rest() -> None:
    """In flight is cut off, the input is let go."""
    async with opened(hold(), status(400), hold(), concurrency=2) as (client, server):
        with pytest.raises(BadRequestError):
            await client.map((str(i) for i in range(1000)), on_error="raise")
        await server.until(lambda: server.in_progress == 0)
        assert client.limiter.in_flight == 0
        assert len(server.requests) <= 3


async def test_a_retry_starts_at_once_and_keeps_its_item() -> None:
    """Not after the batch; and the answer is not another prompt's."""
    failed = set()

    async def once(visit: Visit) -> None:
        prompt = visit.request.json["messages"][-1]["content"]
        if prompt not in failed:
            failed.add(prompt)
            await status(500)(visit)
        else:
            await answer(prompt)(visit)

    async with opened(once, concurrency=2) as (client, server):
        results = await client.map([str(i) for i in range(20)])
        order = [request.json["messages"][-1]["content"] for request in server.requests]
    assert [result.text for result in results] == [str(i) for i in range(20)]
    assert all(len(result.attempts) == 2 for result in results)
    assert order.index("0", 1) < order.index("19")


async def test_an_input_that_raises_hands_out_what_was_in_flight_first() -> None:
    """Then its own error comes through, as it is."""

    def prompts() -> Iterator[str]:
        yield "a"
        yield "b"
        raise OSError("disk gone")

    async with opened(echo) as (client, _):
        got = []
        with pytest.raises(OSError, match="disk gone"):
            async for result in client.map(prompts()):
                got.append(result.text)  # noqa: PERF401 - kept also when it raises
        assert sorted(got) == ["a", "b"]
        with pytest.raises(OSError, match="disk gone"):
            await client.map(prompts())
        assert client.limiter.in_flight == 0


async def test_break_cuts_off_what_is_in_flight() -> None:
    """The object is gone with the loop, and the work with it, at the server too."""
    gates = Gates()
    gates.gate("0").set()
    async with opened(gates) as (client, server):
        async for result in client.map(str(i) for i in range(100)):
            assert result.text == "0"
            break
        await server.until(lambda: server.in_progress == 0)
        assert len(server.requests) < 10
        assert (await client.map(["0"]))[0].ok


async def test_leaving_the_block_waits_until_all_has_ended() -> None:
    """And the input's ``finally`` has run."""
    closed = False

    async def prompts() -> AsyncIterator[str]:
        nonlocal closed
        try:
            for i in range(100):
                yield str(i)
        finally:
            closed = True

    async with opened(hold()) as (client, server):
        async with client.map(prompts()) as run:
            await server.until(lambda: server.in_progress == 4)
        assert closed
        assert client.limiter.in_flight == 0
        with pytest.raises(StopAsyncIteration):
            await anext(run)
        await server.until(lambda: server.open_connections == 0)


async def test_a_cancelled_await_leaves_nothing() -> None:
    """A deadline around ``map`` works like around anything else."""
    async with opened(hold()) as (client, server):
        with anyio.move_on_after(0.1) as scope:
            await client.map([str(i) for i in range(10)])
        assert scope.cancelled_caught
        assert client.limiter.in_flight == 0
        await server.until(lambda: server.in_progress == 0)


async def test_closing_the_client_ends_its_runs_with_a_clear_error() -> None:
    """Not with a hang."""
    async with opened(hold()) as (client, server), anyio.create_task_group() as group:

        async def read() -> None:
            with pytest.raises(ClientClosedError, match="while map was running"):
                await client.map(["a"])

        group.start_soon(read)
        await server.until(lambda: server.in_progress == 1)
        await client.aclose()


async def test_two_maps_share_the_limit_fairly() -> None:
    """One limiter for a client; neither starves the other."""
    order: list[str] = []

    async def note(visit: Visit) -> None:
        order.append(visit.request.json["messages"][-1]["content"])
        await answer("x")(visit)

    async with opened(note, concurrency=2) as (client, server):
        async with anyio.create_task_group() as group:
            for name in ("a", "b"):

                async def run(name: str = name) -> None:
                    await client.map([name] * 40)

                group.start_soon(run)
        assert server.peak <= 2
    assert 10 <= order[:40].count("b") <= 30


async def test_running_a_map_twice_at_once_is_refused() -> None:
    """Iterating and awaiting are one run."""
    async with opened(echo) as (client, _):
        run = client.map(["a", "b"])
        await anext(run)
        with pytest.raises(ClientStateError, match="iterated already"):
            await run
        await run.aclose()


async def test_a_map_that_is_never_used_is_pointed_out() -> None:
    """As Python does for a coroutine."""
    async with opened(echo) as (client, server):
        with pytest.warns(RuntimeWarning, match="neither awaited nor iterated"):
            client.map(["a"])
    assert not server.requests


async def test_arguments_are_checked_at_once() -> None:
    """A string would otherwise be mapped letter by letter."""
    async with opened(echo) as (client, _):
        with pytest.raises(ConfigError, match="many prompts"):
            client.map("hello")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="buffer"):
            client.map(["a"], buffer=0)


async def test_custom_ids_labels_and_overrides() -> None:
    """Each item may differ; the ledger files by label."""
    prompts = [
        {"messages": [{"role": "user", "content": "a"}], "custom_id": "x", "max_tokens": 1},
        {"messages": [{"role": "user", "content": "b"}], "model": "other"},
    ]
    async with opened(echo, defaults={"temperature": 0}) as (client, server):
        results = await client.map(prompts, max_tokens=9, label="exam")
        parts = client.ledger.parts()
    sent = {request.json["messages"][0]["content"]: request.json for request in server.requests}
    assert (sent["a"]["max_tokens"], sent["b"]["max_tokens"]) == (1, 9)
    assert sent["a"]["temperature"] == sent["b"]["temperature"] == 0
    assert (results[0].id, results[1].id, results[1].label) == ("x", None, "exam")
    assert set(parts) == {("m", "exam"), ("other", "exam")}


async def test_stats_tell_the_run() -> None:
    """Tokens, time to first token, time in all."""
    async with opened(answer("one two")) as (client, _):
        run = client.map(["a"] * 10)
        await run
    stats = run.stats
    assert (stats.total, stats.done, stats.pulled, stats.in_flight) == (10, 10, 10, 0)
    assert (stats.input_tokens, stats.output_tokens, stats.unpriced) == (50, 20, 10)
    assert stats.first_token.count == stats.latency.count == 10
    assert stats.elapsed > 0
    assert "10 of 10 done" in str(stats)


async def test_unstreamed_map() -> None:
    """Cheaper for the endpoint, without a time to first token."""
    async with opened(answer("hello")) as (client, server):
        (result,) = await client.map(["a"], stream=False)
    assert (result.text, result.timing.first_token) == ("hello", None)
    assert "stream" not in server.requests[0].json


async def test_broken_streams_are_whole_after_a_retry() -> None:
    """No text twice: the broken attempt's text is gone."""
    broken = pieces(b'data: {"choices":[{"delta":{"content":"once "}}]}\n\n', then="hang_up")
    async with opened(broken, answer("once upon a time")) as (client, _):
        (result,) = await client.map(["a"])
    assert result.text == "once upon a time"
