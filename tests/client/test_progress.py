"""Numbers of a run and the bar that draws them."""

from __future__ import annotations

import io
import random
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fullbore import Client, ProgressBar, Quantiles, Result, RunStats, Timing, Usage
from fullbore.progress import describe
from fullbore.testing import FaultServer, answer


@given(st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=300), st.floats(0, 1))
def test_quantiles_are_within_one_percent(values: list[float], q: float) -> None:
    """Of the value of that rank."""
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    exact = sorted(values)[max(0, -(-int(q * len(values) * 1e9) // int(1e9)) - 1)]
    found = quantiles.quantile(q)
    assert found is not None
    ranked = sorted(values)
    near = [v for v in ranked if abs(found - v) <= 0.01 * v]
    assert near, (found, exact)


def test_quantiles_are_bounded_in_memory() -> None:
    """A million values, a few hundred buckets."""
    quantiles, rng = Quantiles(), random.Random(0)
    for _ in range(100_000):
        quantiles.add(rng.lognormvariate(0, 1))
    assert len(quantiles._buckets) < 1500
    assert quantiles.p50 == pytest.approx(1.0, rel=0.03)
    assert Quantiles().p99 is None


def made(stats_clock: list[float], total: int | None = 10) -> RunStats:
    """Return the numbers of a run on a clock that stands still unless moved."""
    return RunStats(lambda: stats_clock[0], total=total, limit=lambda: 8)


def test_describe_reads_well() -> None:
    """Done, in flight, speed, cost, time left."""
    clock = [0.0]
    stats = made(clock)
    for index in range(4):
        stats.finished(
            Result(
                index=index,
                input="x",
                usage=Usage(input_tokens=5, output_tokens=100),
                cost=Decimal("0.01"),
                timing=Timing(first_token=0.1, total=1.0),
            )
        )
    stats.finished(Result(index=4, input="x", error=None if index < 0 else _error()))
    stats.in_flight = 3
    clock[0] = 10.0
    assert describe(stats) == (
        "5/10 · 1 failed · 3 of 8 in flight · 40 tok/s · $0.0400 · 0:10 left"
    )
    stats.ended()
    clock[0] = 99.0
    assert stats.elapsed == 10.0


def _error() -> Exception:
    from fullbore import ServerError

    return ServerError("x", status=500)


def test_a_length_nobody_knows_is_not_made_up() -> None:
    """No total, no time left."""
    stats = made([1.0], total=None)
    assert describe(stats) == "0 · 0 of 8 in flight · 0 tok/s"


@pytest.mark.anyio
@pytest.mark.parametrize("force", [True, False], ids=["forced", "not a terminal"])
async def test_the_bar_is_drawn_where_somebody_watches(force: bool) -> None:
    """And only there."""
    out = io.StringIO()
    bar = ProgressBar(
        "run", console=Console(file=out, force_terminal=force, width=120), force=force
    )
    async with FaultServer(answer("x")) as server, Client(server.url, model="m") as client:
        results = await client.map(["a"] * 5, progress=bar)
    assert len(results) == 5
    assert ("5/5" in out.getvalue()) == force


@pytest.mark.anyio
async def test_a_bar_that_fails_to_start_fails_the_run() -> None:
    """It is the user's own code; its error is not swallowed."""

    class Broken:
        def start(self, stats: RunStats) -> None:
            raise ValueError("no display")

        def stop(self) -> None:
            raise ValueError("still none")

    async with FaultServer(answer("x")) as server, Client(server.url, model="m") as client:
        with pytest.raises(ValueError, match="no display"):
            await client.map(["a"], progress=Broken())
