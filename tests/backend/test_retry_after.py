"""What refused requests are told, under a clock that the test moves."""

from __future__ import annotations

import pytest

from fullbore_backend.retry_after import LONGEST, SHORTEST, WINDOW, RetryAfter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def retry_after(clock: Clock) -> RetryAfter:
    return RetryAfter(clock)


def drain(retry_after: RetryAfter, clock: Clock, *, every: float, seconds: float) -> None:
    """One request ends every so many seconds."""
    for _ in range(round(seconds / every)):
        clock.now += every
        retry_after.end()


@pytest.mark.parametrize(("every", "expected"), [(0.1, SHORTEST), (2.0, 2.0), (10.0, 10.0)])
def test_a_place_is_free_when_the_next_request_has_ended(
    retry_after: RetryAfter, clock: Clock, every: float, expected: float
) -> None:
    retry_after.begin()
    drain(retry_after, clock, every=every, seconds=WINDOW)
    # What ended exactly a window ago still counts.
    assert retry_after.refuse() == pytest.approx(expected, rel=0.1)


def test_those_refused_together_are_told_different_times(
    retry_after: RetryAfter, clock: Clock
) -> None:
    retry_after.begin()
    drain(retry_after, clock, every=1.0, seconds=10)
    assert [retry_after.refuse() for _ in range(5)] == [1, 2, 3, 4, 5]
    clock.now += 3
    assert retry_after.refuse() == pytest.approx(2 + 1.3)  # three have come; ends are rarer now


def test_before_anything_ended_the_time_that_passed_is_the_estimate(
    retry_after: RetryAfter, clock: Clock
) -> None:
    retry_after.begin()
    assert retry_after.refuse() == SHORTEST
    clock.now += 7
    assert retry_after.refuse() == 7


def test_the_answer_stays_in_its_range(retry_after: RetryAfter, clock: Clock) -> None:
    retry_after.begin()
    clock.now += 10_000
    answers = [retry_after.refuse() for _ in range(10)]
    assert answers[0] == WINDOW
    assert answers[1:] == [LONGEST] * 9
    clock.now += LONGEST  # and no promise is further off than that
    assert retry_after.refuse() == WINDOW


def test_only_the_recent_past_counts(retry_after: RetryAfter, clock: Clock) -> None:
    retry_after.begin()
    drain(retry_after, clock, every=0.01, seconds=WINDOW)
    drain(retry_after, clock, every=5.0, seconds=2 * WINDOW)
    assert retry_after.refuse() == pytest.approx(5, rel=0.2)


def test_an_idle_time_is_not_taken_for_a_slow_one(retry_after: RetryAfter, clock: Clock) -> None:
    retry_after.begin()
    drain(retry_after, clock, every=1.0, seconds=5)
    clock.now += 3600
    retry_after.begin()
    assert retry_after.refuse() == SHORTEST
