"""When to try again, and what ``Retry-After`` says: pure functions, no clock."""

from __future__ import annotations

import random

import pytest

from fullbore import (
    AnswerFailedError,
    BadRequestError,
    ConfigError,
    ConnectionFailedError,
    ConnectionLostError,
    FirstTokenTimeoutError,
    OverloadedError,
    QuotaExceededError,
    RateLimitError,
    RequestError,
    Retry,
    RetryAfterTooLongError,
    ServerError,
    StatusError,
    TotalTimeoutError,
)
from fullbore.transport.headers import retry_after

RNG = random.Random(0)


def decide(
    error: RequestError,
    retry: Retry | None = None,
    *,
    attempt: int = 1,
    elapsed: float = 0.0,
    remaining: float | None = None,
    rng: random.Random = RNG,
) -> float | RequestError:
    """Ask the policy."""
    return (retry or Retry()).decide(
        error, attempt=attempt, elapsed=elapsed, remaining=remaining, rng=rng
    )


class Highest(random.Random):
    """Always draws the upper end."""

    def uniform(self, a: float, b: float) -> float:
        """Return ``b``."""
        return b


@pytest.mark.parametrize(
    "error",
    [
        ConnectionFailedError("x"),
        ConnectionLostError("x", answered=True),
        FirstTokenTimeoutError("x"),
        RateLimitError("x", status=429),
        ServerError("x", status=500),
        OverloadedError("x", status=503),
        StatusError("x", status=408),
        AnswerFailedError("x", code="500"),
        AnswerFailedError("x", type="server_error"),
        BadRequestError("x", status=400, should_retry=True),
    ],
    ids=repr,
)
def test_passing_troubles_are_retried(error: RequestError) -> None:
    """What may work the next time is tried again."""
    assert isinstance(decide(error), float)


@pytest.mark.parametrize(
    "error",
    [
        BadRequestError("x", status=400),
        QuotaExceededError("x", status=429),
        TotalTimeoutError("x"),
        AnswerFailedError("x", code="400"),
        AnswerFailedError("x", type="invalid_request_error"),
        ServerError("x", status=500, should_retry=False),
    ],
    ids=repr,
)
def test_lasting_troubles_are_not(error: RequestError) -> None:
    """What will fail again is not sent again."""
    assert decide(error) is error


def test_the_delay_is_fully_jittered_under_a_doubling_ceiling_with_a_cap() -> None:
    """Draws lie between nothing and base·2ⁿ, never above the cap."""
    retry = Retry(base=0.5, cap=3.0, attempts=10)
    error = ServerError("x", status=500)
    ceilings = [decide(error, retry, attempt=n, rng=Highest()) for n in range(1, 6)]
    assert ceilings == [0.5, 1.0, 2.0, 3.0, 3.0]
    rng = random.Random(1)
    draws = [decide(error, retry, attempt=2, rng=rng) for _ in range(200)]
    numbers = [draw for draw in draws if isinstance(draw, float)]
    assert len(numbers) == 200
    assert min(numbers) < 0.1 < 0.9 < max(numbers) <= 1.0


def test_attempts_are_capped() -> None:
    """The last attempt's error is the end."""
    error = ServerError("x", status=500)
    assert decide(error, Retry(attempts=3), attempt=3) is error


def test_total_time_is_capped() -> None:
    """No attempt starts after ``within`` or the request's own deadline."""
    error = ServerError("x", status=500)
    assert decide(error, Retry(within=60), elapsed=60) is error
    assert decide(error, remaining=0.0) is error


def test_a_closed_idle_connection_is_replaced_at_once() -> None:
    """Its first failure costs no wait; a second in a row does."""
    error = ConnectionLostError("x", answered=False)
    assert decide(error) == 0.0
    assert decide(error, attempt=2, rng=Highest()) == 1.0


def test_retry_after_of_a_minute_is_honoured() -> None:
    """61 s asked are 61 s waited, and a little more so that not all come at once."""
    delay = decide(RateLimitError("x", status=429, retry_after=61))
    assert isinstance(delay, float)
    assert 61 <= delay <= 62


def test_retry_after_beyond_the_deadline_fails_at_once_and_says_so() -> None:
    """Waiting in vain helps nobody."""
    error = RateLimitError("slow down.", status=429, retry_after=61, request_id="r-1")
    ended = decide(error, remaining=30.0)
    assert isinstance(ended, RetryAfterTooLongError)
    assert "61 s" in str(ended)
    assert "30 s left" in str(ended)
    assert ended.request_id == "r-1"


def test_partial_answers_are_retried_only_if_wanted() -> None:
    """A broken answer may be billed."""
    error = ConnectionLostError("x", partial="once upon", answered=True)
    assert isinstance(decide(error), float)
    assert decide(error, Retry(partial=False)) is error


@pytest.mark.parametrize("field", ["attempts", "base", "cap", "within"])
def test_senseless_policies_are_refused(field: str) -> None:
    """The error names the field."""
    with pytest.raises(ConfigError, match=f"Retry.{field}"):
        Retry(**{field: -1}).validate()


NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        pytest.param({}, None, id="absent"),
        pytest.param({"retry-after": "61"}, 61.0, id="seconds"),
        pytest.param({"retry-after": "0.5"}, 0.5, id="fractions, which some send"),
        pytest.param({"retry-after-ms": "250", "retry-after": "9"}, 0.25, id="milliseconds win"),
        pytest.param({"retry-after": "Fri, 15 Jan 2027 08:00:30 GMT"}, 30.0, id="date"),
        pytest.param(
            {
                "retry-after": "Fri, 15 Jan 2027 09:00:30 GMT",
                "date": "Fri, 15 Jan 2027 09:00:00 GMT",
            },
            30.0,
            id="date against the server's own clock",
        ),
        pytest.param({"retry-after": "Fri, 15 Jan 2027 07:00:00 GMT"}, 0.0, id="date in the past"),
        pytest.param({"retry-after": "soon"}, None, id="nonsense"),
        pytest.param({"retry-after": "-5"}, None, id="negative"),
        pytest.param({"retry-after": "nan"}, None, id="nan"),
    ],
)
def test_retry_after_headers(headers: dict[str, str], seconds: float | None) -> None:
    """All forms of RFC 9110 and OpenAI's milliseconds."""
    assert retry_after(headers, now=NOW) == seconds
