"""Hedging: late first tokens are raced, within the limits, and everything is accounted for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import anyio
import pytest

from fullbore import Client, Hedge, PerRequest, PerToken, Retry, Subscription, oxlo
from fullbore._hedge import LEAST_SAMPLES, Hedging
from fullbore.errors import ConfigError, ServerError
from fullbore.testing import FaultServer, Reply, answer, chunk, hold, pieces, sse, status

ALWAYS = Hedge(after=0.02, at_most=1.0)
HELLO = sse(chunk("slow"))


@asynccontextmanager
async def opened(
    *replies: Reply, http2: bool = False, **settings: Any
) -> AsyncIterator[tuple[Client, FaultServer]]:
    """Open a server with these replies and a client that hedges."""
    settings = {"model": "m", "concurrency": 4, "hedge": ALWAYS, **settings}
    server = FaultServer(*replies, http2=http2)
    async with server, Client(server.url, http2=http2, **settings) as client:
        yield client, server


@pytest.mark.anyio
@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
async def test_the_rival_wins_and_the_loser_is_reset(http2: bool) -> None:
    """At the server too; both are on the ledger."""
    plan = PerToken(input="1", output="2")
    async with opened(hold(), answer("quick"), http2=http2, pricing=plan) as (client, server):
        result = await client.complete("hi")
        await server.until(lambda: server.in_progress == 0)
        totals = client.ledger.totals()
        assert client.limiter.in_flight == 0
    assert result.text == "quick"
    assert len(server.requests) == 2
    assert server.requests[0].body == server.requests[1].body
    assert (totals.ok, totals.cancelled, totals.failed, totals.maybe_billed) == (1, 1, 0, 1)
    assert totals.maybe_cost > Decimal(0)
    loser, winner = result.attempts
    assert (loser.error, loser.billed, winner.billed) == (None, "maybe", "yes")


@pytest.mark.anyio
async def test_the_first_may_still_win() -> None:
    """Then the rival is reset."""
    late = anyio.Event()

    async def release(visit: Any) -> None:
        late.set()
        await visit.until_left()

    async with opened(hold(late, answer("first")), release) as (client, server):
        result = await client.complete("hi")
        await server.until(lambda: server.in_progress == 0)
        assert client.ledger.totals().cancelled == 1
    assert result.text == "first"


@pytest.mark.anyio
async def test_a_quick_answer_is_not_hedged() -> None:
    """Most are."""
    async with opened(answer("x"), hedge=Hedge(after=60.0, at_most=1.0)) as (client, server):
        await client.map(["a"] * 20)
        assert client.ledger.totals().calls == len(server.requests) == 20


@pytest.mark.anyio
async def test_a_stream_is_hedged_until_its_first_token() -> None:
    """And gives nothing twice."""
    async with opened(hold(), answer("one two")) as (client, server):
        async with client.stream("hi") as stream:
            parts = [part async for part in stream]
        await server.until(lambda: server.in_progress == 0)
    assert parts == ["one", " two"]
    assert client.ledger.totals().cancelled == 1


@pytest.mark.anyio
async def test_after_the_first_token_nothing_is_hedged() -> None:
    """However slow the rest is."""
    go = anyio.Event()

    async def slow(visit: Any) -> None:
        await visit.start(200, {"content-type": "text/event-stream"})
        await visit.send(HELLO)
        await go.wait()
        await visit.send(sse(chunk(None, finish_reason="stop"), "[DONE]"))
        await visit.end()

    async with opened(slow) as (client, server), client.stream("hi") as stream:
        assert await anext(stream) == "slow"
        await anyio.sleep(0.1)
        assert len(server.requests) == 1
        go.set()
        assert [part async for part in stream] == []


@pytest.mark.anyio
async def test_no_permit_no_hedge() -> None:
    """The limiter's word stands, and a hedge does not queue up for it either."""
    go = anyio.Event()
    async with opened(hold(go, answer("x")), concurrency=1) as (client, server):
        async with anyio.create_task_group() as group:
            group.start_soon(client.complete, "hi")
            await server.until(lambda: server.in_progress == 1)
            await anyio.sleep(0.1)
            assert len(server.requests) == 1
            go.set()
        assert server.peak == 1


@pytest.mark.anyio
async def test_the_share_of_hedges_is_bounded() -> None:
    """Whatever the endpoint does."""
    rare = Hedge(after=0.01, at_most=0.1)
    async with opened(hold(), concurrency=100, hedge=rare) as (client, server):
        run = client.map([str(i) for i in range(40)])
        async with anyio.create_task_group() as group:
            group.start_soon(run._collect)
            await server.until(lambda: len(server.requests) == 44)
            await anyio.sleep(0.1)
            assert len(server.requests) == 44
            group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_failed_attempt_leaves_the_race_to_the_other() -> None:
    """The first fails after the rival has started: its error is on record, not in the result."""
    gone = anyio.Event()

    async def fail_later(visit: Any) -> None:
        await gone.wait()
        await status(500)(visit)

    async def second(visit: Any) -> None:
        gone.set()
        await anyio.sleep(0.05)
        await answer("good")(visit)

    async with opened(fail_later, second) as (client, server):
        result = await client.complete("hi")
        totals = client.ledger.totals()
    assert result.text == "good"
    assert (totals.ok, totals.failed) == (1, 1)
    assert isinstance(result.attempts[0].error, ServerError)
    assert len(server.requests) == 2


@pytest.mark.anyio
async def test_if_both_fail_the_retry_policy_decides() -> None:
    """As after any failure."""
    both = anyio.Event()

    async def fail(visit: Any) -> None:
        if visit.number == 1:
            both.set()
        await both.wait()
        await status(500)(visit)

    async with opened(fail, fail, answer("third"), retry=Retry(base=0)) as (client, _):
        result = await client.complete("hi")
        assert client.ledger.totals().failed == 2
        assert client.limiter.in_flight == 0
    assert result.text == "third"


@pytest.mark.anyio
async def test_cancelled_in_the_race() -> None:
    """Both are gone, here and at the server."""
    async with opened(hold()) as (client, server):
        async with anyio.create_task_group() as group:
            group.start_soon(client.complete, "hi")
            await server.until(lambda: server.in_progress == 2)
            group.cancel_scope.cancel()
        await server.until(lambda: server.in_progress == 0)
        assert client.limiter.in_flight == 0
        assert client.ledger.totals().cancelled == 2


@pytest.mark.anyio
async def test_hedges_are_no_retries_in_the_numbers_of_a_run() -> None:
    """They are counted on their own."""
    async with opened(hold(), pieces(HELLO), answer("x"), retry=Retry(base=0)) as (client, _):
        run = client.map(["a"])
        await run
    assert (run.stats.hedges, run.stats.retries) == (1, 1)


@pytest.mark.parametrize("plan", [PerRequest("0.002"), oxlo("pro")], ids=["per request", "quota"])
def test_a_plan_that_counts_requests_refuses_hedging(plan: Any) -> None:
    """With the reason."""
    with pytest.raises(ConfigError, match="charges for each request"):
        Client("http://x/v1", model="m", pricing=plan, hedge=ALWAYS)


def test_a_flat_fee_without_a_quota_allows_it() -> None:
    """Nothing is used up."""
    flat = Subscription(name="flat", monthly_fee=Decimal(10))
    Client("http://x/v1", model="m", pricing=flat, hedge=ALWAYS)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"after": 1.0, "quantile": 0.9},
        {"after": 0.0},
        {"quantile": 1.0},
        {"after": 1.0, "at_most": 0.0},
        {"after": 1.0, "at_most": 1.5},
    ],
    ids=str,
)
def test_senseless_hedges_are_refused(fields: dict[str, float]) -> None:
    """Each with what is allowed."""
    with pytest.raises(ConfigError, match="Hedge"):
        Hedge(**fields)


def test_a_quantile_is_learnt_before_it_is_used() -> None:
    """From twenty first tokens on, and then kept up to date."""
    hedging = Hedging(Hedge(quantile=0.8))
    for number in range(200):
        if number < LEAST_SAMPLES:
            assert hedging.begin() is None
        hedging.saw(1.0 if number % 10 else 3.0)
    delay = hedging.begin()
    assert delay == pytest.approx(1.0, rel=0.01)
