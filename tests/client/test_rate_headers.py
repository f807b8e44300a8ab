"""Rate-limit headers in every spelling that is understood."""

from __future__ import annotations

import pytest

from fullbore.limits.headers import QuotaReport, read_quotas, read_reset

DATE = "Wed, 05 Mar 2025 12:00:00 GMT"
EPOCH = 1741176000  # the same instant


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("1s", 1.0),
        ("6m0s", 360.0),
        ("1h2m", 3720.0),
        ("1h2m3.5s", 3723.5),
        ("120ms", 0.12),
        ("2m59.56s", 179.56),
        ("1d", 86400.0),
        ("59.7", 59.7),
        ("0", 0.0),
        ("2025-03-05T12:00:30Z", 30.0),
        ("2025-03-05T11:59:00Z", 0.0),
        (str(EPOCH + 90), 90.0),
        (str((EPOCH + 90) * 1000), 90.0),
    ],
)
def test_reset_is_read(value: str, seconds: float) -> None:
    """Spans, plain seconds and instants."""
    assert read_reset(value, DATE) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "soon", "-5", "1x", "nan", "1s later", None])
def test_a_reset_that_cannot_be_read_is_none(value: str | None) -> None:
    """No header makes a limiter fail."""
    assert read_reset(value, DATE) is None


def report(**fields: object) -> QuotaReport:
    defaults: dict[str, object] = {"unit": "requests", "period": "", "limit": None, "reset": None}
    return QuotaReport(**(defaults | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        pytest.param(
            {
                "x-ratelimit-limit-requests": "60",
                "x-ratelimit-remaining-requests": "59",
                "x-ratelimit-reset-requests": "1s",
                "x-ratelimit-limit-tokens": "150000",
                "x-ratelimit-remaining-tokens": "149984",
                "x-ratelimit-reset-tokens": "6m0s",
                "content-type": "application/json",
            },
            [
                report(remaining=59, limit=60, reset=1),
                report(unit="tokens", remaining=149984, limit=150000, reset=360),
            ],
            id="openai",
        ),
        pytest.param(
            {
                "x-ratelimit-limit-requests-day": "14400",
                "x-ratelimit-remaining-requests-day": "14398",
                "x-ratelimit-reset-requests-day": "33011.38",
            },
            [report(period="day", remaining=14398, limit=14400, reset=33011.38)],
            id="with-a-period",
        ),
        pytest.param(
            {
                "anthropic-ratelimit-requests-limit": "50",
                "anthropic-ratelimit-requests-remaining": "0",
                "anthropic-ratelimit-requests-reset": "2025-03-05T12:00:12Z",
                "anthropic-ratelimit-input-tokens-remaining": "7",
                "date": DATE,
            },
            [report(remaining=0, limit=50, reset=12)],
            id="anthropic",
        ),
        pytest.param(
            {"ratelimit-limit": "100, 100;w=60", "ratelimit-remaining": "3"},
            [report(remaining=3, limit=100)],
            id="ietf-old",
        ),
        pytest.param(
            {"ratelimit": '"default";r=50;t=30'}, [report(remaining=50, reset=30)], id="ietf-new"
        ),
        pytest.param({"x-ratelimit-remaining": "4"}, [report(remaining=4)], id="plain"),
        pytest.param({"x-ratelimit-limit-requests": "60"}, [], id="nothing-remaining-said"),
        pytest.param({"x-ratelimit-remaining-requests": "many"}, [], id="unreadable"),
        pytest.param({"retry-after": "3"}, [], id="none"),
    ],
)
def test_quotas_are_read(headers: dict[str, str], expected: list[QuotaReport]) -> None:
    """One report for each quota that says how much is left."""
    assert read_quotas(headers) == expected
