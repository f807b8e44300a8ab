"""Pacing: stated rates hold in every window, reports are followed, Retry-After reduces."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullbore.errors import ConfigError
from fullbore.limits import Outcome, Rates
from fullbore.limits.quota import ReportedQuota, SlidingQuota
from fullbore.limits.rate import RateLimiter, RatePacer

OK = Outcome(kind="ok", total=1.0)


def refused(after: float | None) -> Outcome:
    return Outcome(kind="overloaded", total=0.1, retry_after=after)


def headers(unit: str, *, limit: int, remaining: int, reset: str) -> Outcome:
    return Outcome(
        kind="ok",
        total=1.0,
        headers={
            f"x-ratelimit-limit-{unit}": str(limit),
            f"x-ratelimit-remaining-{unit}": str(remaining),
            f"x-ratelimit-reset-{unit}": reset,
        },
    )


@given(
    limit=st.integers(1, 50),
    asks=st.lists(st.tuples(st.floats(0, 40), st.integers(1, 60)), min_size=1, max_size=60),
)
def test_no_window_holds_more_than_the_quota(limit: int, asks: list[tuple[float, int]]) -> None:
    """Whatever is asked and when: charged after the delay, every 60 seconds hold the limit."""
    quota = SlidingQuota(limit, 60.0)
    now = 0.0
    charged: list[tuple[float, float]] = []
    for gap, amount in asks:
        now += gap
        while (delay := quota.delay(now, amount)) > 1e-6:
            now += delay
        quota.charge(now, amount)
        charged.append((now, amount))
    for start, first in charged:
        held = sum(amount for at, amount in charged if start <= at < start + 60)
        assert held <= max(limit, first)  # a request above the quota goes alone


def test_an_empty_quota_names_the_wait_exactly() -> None:
    """The wait ends when the oldest charges that stand in the way leave the window."""
    quota = SlidingQuota(10, 60.0)
    quota.charge(0.0, 4)
    quota.charge(20.0, 6)
    assert quota.delay(30.0, 4) == pytest.approx(30.05)
    assert quota.delay(30.0, 5) == pytest.approx(50.05)
    assert quota.delay(60.1, 4) == 0


def test_a_correction_counts_at_once_and_not_after_the_window() -> None:
    """Actual usage replaces the estimate where it was charged."""
    quota = SlidingQuota(100, 60.0)
    entry = quota.charge(0.0, 80)
    quota.correct(10.0, entry, -70)
    assert quota.available(10.0) == 90
    quota.correct(90.0, entry, 50)  # left the window long ago
    assert quota.available(90.0) == 100


def test_memory_is_bounded() -> None:
    """A million charges a window share a few hundred entries."""
    quota = SlidingQuota(10**9, 60.0)
    for number in range(100_000):
        quota.charge(number * 0.01, 1)
    assert len(quota._entries) < 400


@pytest.mark.parametrize(
    ("reset", "at_half"),
    [
        pytest.param(60.0, 30.0, id="token-bucket-refills-steadily"),
        pytest.param(17.0, 0.0, id="fixed-window-refills-at-the-reset"),
    ],
)
def test_reported_quota_is_brought_forward(reset: float, at_half: float) -> None:
    """The refill is taken for steady only if its speed is that of a period people use."""
    quota = ReportedQuota()
    quota.report(0.0, remaining=0, limit=60, reset=reset)
    assert quota.available(reset / 2) == pytest.approx(at_half)
    assert quota.available(reset) == pytest.approx(60)
    assert quota.delay(reset, 1000) == 0, "larger than the quota: alone"


def test_a_fixed_window_that_is_used_up_waits_until_its_reset() -> None:
    """Not longer, and after that a period at a time until the next report."""
    quota = ReportedQuota()
    quota.report(0.0, remaining=1, limit=5, reset=17.0)
    quota.charge(1.0, 1)
    assert quota.delay(1.0, 1) == pytest.approx(16.0)
    for _ in range(5):
        assert quota.delay(17.0, 1) == 0
        quota.charge(17.0, 1)
    assert quota.delay(17.0, 1) == pytest.approx(60.0)


def test_without_a_limit_only_what_remains_counts() -> None:
    """A report without a limit is forgotten at its reset."""
    quota = ReportedQuota()
    quota.report(0.0, remaining=0, limit=None, reset=10.0)
    assert quota.delay(4.0, 1) == pytest.approx(6.0)
    assert quota.available(10.0) == math.inf


@pytest.mark.parametrize("field", Rates.__slots__)
def test_rates_below_one_are_refused(field: str) -> None:
    """The error names the rate."""
    with pytest.raises(ConfigError, match=field):
        Rates(**{field: 0})


def test_a_day_that_is_used_up_is_a_typed_answer() -> None:
    """How long, and which quota, before anybody waits for hours."""
    pacer = RatePacer(Rates(requests_per_day=2, requests_per_minute=2))
    for at in (0.0, 1000.0):
        pacer.settle(at + 1, pacer.reserve(at, 0), OK, 0)
    wait = pacer.wait(1200.0, 0, 0)
    assert wait.quota == "2 requests a day"
    assert wait.seconds == pytest.approx(86400 - 1200, abs=1)
    assert pacer.headroom(1200.0, 0) == 0


@pytest.mark.parametrize(
    ("outcome", "left"),
    [
        pytest.param(Outcome(kind="ok", total=1.0, input_tokens=10, output_tokens=5), 85, id="ok"),
        pytest.param(OK, 50, id="usage-unknown"),
        pytest.param(Outcome(kind="failed", total=1.0), 50, id="failed-may-be-charged"),
        pytest.param(refused(None), 100, id="refused-is-not-charged"),
        pytest.param(Outcome(kind="cancelled", total=0.0), 100, id="never-sent"),
        pytest.param(Outcome(kind="ok", total=1.0, output_tokens=120), -20, id="more-than-said"),
    ],
)
def test_the_estimate_is_settled_by_the_usage(outcome: Outcome, left: int) -> None:
    """Reserved before, corrected after."""
    pacer = RatePacer(Rates(tokens_per_minute=100))
    pacer.settle(1.0, pacer.reserve(0.0, 50), outcome, 0)
    assert pacer._stated[0][2].available(1.0) == left
    assert (pacer.wait(1.0, 60, 0).seconds > 0) == (left < 60)


def test_a_request_never_sent_gives_its_turn_back() -> None:
    """A cancelled acquire costs no request of the day."""
    pacer = RatePacer(Rates(requests_per_day=1))
    pacer.settle(0.0, pacer.reserve(0.0, 0), Outcome(kind="cancelled", total=0.0), 0)
    assert pacer.wait(0.0, 0, 0).seconds == 0


def test_what_was_sent_since_is_taken_off_a_report() -> None:
    """The endpoint counted before it saw the requests that were under way."""
    pacer = RatePacer()
    first = pacer.reserve(0.0, 0)
    for _ in range(3):
        pacer.reserve(0.1, 0)
    pacer.settle(1.0, first, headers("requests", limit=10, remaining=5, reset="17s"), 3)
    assert pacer.headroom(1.0, 3) == 2


def test_an_older_report_does_not_replace_a_newer_one() -> None:
    """Answers overtake each other."""
    pacer = RatePacer()
    old, new = pacer.reserve(0.0, 0), pacer.reserve(0.1, 0)
    pacer.settle(1.0, new, headers("requests", limit=10, remaining=0, reset="17s"), 1)
    pacer.settle(1.1, old, headers("requests", limit=10, remaining=9, reset="1s"), 0)
    wait = pacer.wait(1.1, 0, 0)
    assert wait.seconds == pytest.approx(16.9)
    assert wait.quota == "the endpoint's quota of requests"


def test_reported_tokens_wait_for_the_refill_they_need() -> None:
    """A token bucket of 6,000 a minute gives 100 a second."""
    pacer = RatePacer()
    pacer.settle(
        1.0, pacer.reserve(0.0, 0), headers("tokens", limit=6000, remaining=0, reset="1m0s"), 0
    )
    assert pacer.wait(1.0, 500, 0).seconds == pytest.approx(5.0)
    assert pacer.headroom(1.0, 0) == 0
    assert pacer.headroom(2.0, 0) is None


def test_one_refusal_reduces_and_does_not_stop() -> None:
    """Those that were accepted go on, and each that ends may be replaced."""
    pacer = RatePacer()
    for _ in range(4):
        running = pacer.reserve(0.0, 0)
    extra = pacer.reserve(0.0, 0)
    pacer.settle(1.0, extra, refused(300.0), 4)
    assert pacer.wait(1.0, 0, 4).quota == "Retry-After"
    assert pacer.wait(1.0, 0, 4).seconds == pytest.approx(300.0)
    pacer.settle(2.0, running, OK, 3)
    assert pacer.wait(2.0, 0, 3).seconds == 0
    assert pacer.headroom(2.0, 3) == 1


def test_refusals_in_a_row_stop_until_the_time_that_was_said() -> None:
    """When nothing is accepted it is a rate, not a number in flight; then wait, and no longer."""
    pacer = RatePacer()
    pacer.settle(1.0, pacer.reserve(0.0, 0), refused(20.0), 8)
    in_flight = 8
    for second in (2.0, 3.0, 4.0):
        in_flight -= 1  # one ended, so one more is let in
        assert pacer.wait(second, 0, in_flight).seconds == 0
        pacer.settle(second + 0.1, pacer.reserve(second, 0), refused(20.0), in_flight)
    assert pacer.wait(5.0, 0, 1).seconds == pytest.approx(19.1)
    assert pacer.wait(24.2, 0, 8).seconds == 0


def test_refusals_without_a_time_do_not_hold() -> None:
    """They are for the window to judge."""
    pacer = RatePacer()
    pacer.settle(1.0, pacer.reserve(0.0, 0), refused(None), 4)
    assert pacer.wait(1.0, 0, 4).seconds == 0


@pytest.mark.anyio
async def test_the_limiter_sleeps_exactly_as_long_as_it_must() -> None:
    """Sixty-one requests at thirty a minute take two minutes of the clock."""
    now = 0.0
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    limiter = RateLimiter(Rates(requests_per_minute=30), clock=lambda: now, sleep=sleep)
    waited = []
    for _ in range(61):
        permit = await limiter.acquire(flow=0)
        waited.append(permit.waited)
        permit.release(OK)
    assert now == pytest.approx(120, abs=0.5)
    assert len(slept) == 2
    assert [seconds for seconds in waited if seconds] == pytest.approx([60.05, 60.05])
