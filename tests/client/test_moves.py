"""Why the limit moves, where it can be seen; and rates, from the user or from the plan."""

from __future__ import annotations

import gc
from typing import Any, get_args

import anyio
import pytest

from fullbore import Client, Move, Rates, oxlo
from fullbore._moves import KEPT, WORDS, Moves
from fullbore._opening import rates_of
from fullbore._stats import RunStats
from fullbore.limits import Reason, make_limiter
from fullbore.progress import describe
from fullbore.testing import FaultServer, Visit, answer, rate_limits, status

MOVE = Move(reason="endpoint_full", old=16, new=32, detail="full at about 29", at=1.0)


def test_every_reason_has_words() -> None:
    """None is shown as its name."""
    assert set(WORDS) == set(get_args(Reason))


def test_the_bar_says_why() -> None:
    """How many, of how many, and for what reason."""
    moves = Moves()
    stats = RunStats(lambda: 0.0, total=None, limit=lambda: 32, why=moves.words)
    stats.in_flight = 30
    assert "30 of 32 in flight ·" in describe(stats)
    moves(MOVE)
    assert "30 of 32 in flight: found the knee" in describe(stats)
    stats.paced_by = "30 requests a minute"
    assert "30 of 32 in flight: waiting for 30 requests a minute" in describe(stats)


@pytest.mark.anyio
async def test_a_listener_hears_every_move_and_a_slow_one_the_latest() -> None:
    """The limiter never waits for either."""
    heard: list[Move] = []
    moves = Moves(heard.append)
    stream = moves.subscribe()
    for at in range(KEPT + 10):
        moves(Move(reason="probe_up", old=at, new=at + 1, detail="", at=at))
    moves.end()
    got = [move.old async for move in stream]
    assert got == list(range(10, KEPT + 10))
    assert len(heard) == KEPT + 10
    assert moves.latest == heard[-1]


@pytest.mark.anyio
async def test_a_listener_that_is_gone_is_forgotten() -> None:
    """Nobody has to unsubscribe."""
    moves = Moves()
    moves.subscribe()
    gc.collect()
    assert not moves._streams


@pytest.mark.anyio
async def test_a_client_reports_its_moves() -> None:
    """To ``on_move`` and to ``events``: a refusing endpoint is followed, with its reason."""
    heard: list[Move] = []

    async def at_most_four(visit: Visit) -> None:
        # Everyone is kept until twelve are there, so that the limit of four is met for certain.
        if visit.number < 12:
            while len(server.requests) < 12:
                await anyio.sleep(0.001)
        await (status(429, retry_after=0) if 4 <= visit.number < 12 else answer("x"))(visit)

    async with FaultServer(at_most_four) as server:
        async with Client(server.url, model="m", on_move=heard.append) as client:
            events = client.events()
            results = await client.map(["a"] * 40)
            assert all(result.ok for result in results)
        streamed = [move async for move in events]
    assert streamed == heard
    assert "overloaded" in {move.reason for move in heard}
    assert all(move.detail for move in heard)


@pytest.mark.anyio
async def test_rates_pace_what_is_sent() -> None:
    """Three a minute: the fourth waits, and the run says for what."""
    async with FaultServer(answer("x")) as server:
        rates = Rates(requests_per_minute=3)
        async with Client(server.url, model="m", concurrency=8, rates=rates) as client:
            run = client.map(["a"] * 10)
            async with anyio.create_task_group() as group:
                group.start_soon(run._collect)
                while run.stats.done < 3:
                    await anyio.sleep(0.001)
                for _ in range(20):
                    await anyio.lowlevel.checkpoint()
                assert run.stats.paced_by == "3 requests a minute"
                assert len(server.requests) == 3
                group.cancel_scope.cancel()


def test_a_plan_brings_its_rates() -> None:
    """Oxlo's quotas are limits of its endpoint."""
    assert rates_of(oxlo("pro")) == Rates(requests_per_minute=30, requests_per_day=1000)
    assert rates_of(None) is None


@pytest.mark.anyio
async def test_a_plans_rates_hold_unless_others_are_given() -> None:
    """The user may know better."""
    settings: Any = {"model": "m", "pricing": oxlo("free"), "concurrency": 8}
    async with Client("http://127.0.0.1:9/v1", **settings) as client:
        assert client.limiter.headroom() == 5
    async with Client("http://127.0.0.1:9/v1", **settings, rates=Rates()) as client:
        assert client.limiter.headroom() == 8


@pytest.mark.anyio
async def test_rate_limit_headers_reach_the_limiter() -> None:
    """What the endpoint says is left is what may be sent."""
    headers = rate_limits(requests_left=2, requests_limit=100, requests_reset="60s")
    server = FaultServer(answer("x", headers=headers))
    async with server, Client(server.url, model="m", concurrency=50) as client:
        await client.complete("hi")
        assert client.limiter.headroom() == 2


@pytest.mark.anyio
async def test_retry_after_as_a_date_is_measured_by_the_servers_clock() -> None:
    """``date`` goes to the limiter along with the quota it is for."""
    headers = {
        "date": "Tue, 01 Dec 2026 10:00:00 GMT",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "2026-12-01T10:00:30Z",
    }
    server = FaultServer(answer("x", headers=headers))
    async with server, Client(server.url, model="m", concurrency=50) as client:
        await client.complete("hi")
        assert client.limiter.pace().seconds == pytest.approx(30, abs=1)


@pytest.mark.anyio
async def test_one_limiter_for_all_calls_of_a_client() -> None:
    """map, stream, complete and the SDK, at once, never above the limit."""
    async with FaultServer(answer("a b c")) as server:
        async with Client(server.url, model="m", limiter=make_limiter(3)) as client:

            async def stream() -> None:
                async with client.stream("hi") as pieces:
                    assert [piece async for piece in pieces]

            async def sdk() -> None:
                await client.openai.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}]
                )

            async def run() -> None:
                assert all(result.ok for result in await client.map(["a"] * 20))

            async def complete() -> None:
                await client.complete("hi")

            async with anyio.create_task_group() as group:
                for call in (run, run, *[stream, sdk, complete] * 10):
                    group.start_soon(call)
            assert client.limiter.in_flight == 0
        assert server.peak == 3
        assert client.ledger.totals().ok == 70
