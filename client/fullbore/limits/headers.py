"""Rate-limit headers: what an endpoint says about its quotas.

Owns the spellings. Understood, all in lower case:

- `x-ratelimit-{limit,remaining,reset}-{requests,tokens}` and the same with a period at the end
  (`-minute`, `-day`): OpenAI and the many who copy it;
- `x-ratelimit-{limit,remaining,reset}`, which counts requests;
- `anthropic-ratelimit-{requests,tokens}-{limit,remaining,reset}`;
- `ratelimit-{limit,remaining,reset}` and `ratelimit: "name";r=50;t=30` of the IETF drafts
  (draft-ietf-httpapi-ratelimit-headers), which count requests.

A reset is a span (`6m0s`, `120ms`, `59.7`) or an instant (RFC 3339, or seconds or milliseconds
since 1970), which is compared with the response's own `date`. What cannot be read is left out:
a limiter must never fail because of a header.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Literal

Unit = Literal["requests", "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaReport:
    """One quota as an endpoint reported it.

    Attributes:
        unit: What is counted.
        period: `minute` or `day` where the header says so, else empty.
        remaining: How much is left.
        limit: The whole quota, if reported.
        reset: Seconds until the quota is whole again, if reported.
    """

    unit: Unit
    period: str
    remaining: float
    limit: float | None
    reset: float | None


_PREFIXES = ("x-ratelimit-", "anthropic-ratelimit-", "ratelimit")
_NAME = re.compile(
    r"(?:x-ratelimit-(?P<field>limit|remaining|reset)"
    r"(?:-(?P<unit>requests|tokens)(?:-(?P<period>minute|hour|day))?)?"
    r"|anthropic-ratelimit-(?P<a_unit>requests|tokens)-(?P<a_field>limit|remaining|reset)"
    r"|ratelimit-(?P<i_field>limit|remaining|reset))"
)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs|ns|d|h|m|s)")
_SPAN_WHOLE = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|us|µs|ns|d|h|m|s))+")
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_SECONDS |= {"ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_EPOCH = 1e8
"""A number of seconds above this is an instant since 1970: nobody waits for three years."""


def read_quotas(headers: Mapping[str, str]) -> list[QuotaReport]:
    """Every quota that the response headers report; names in lower case."""
    fields: dict[tuple[Unit, str], dict[str, str]] = {}
    for name, value in headers.items():
        if not name.startswith(_PREFIXES):
            continue
        if name == "ratelimit":
            fields.setdefault(("requests", ""), {}).update(_structured(value))
            continue
        parsed = _parse_name(name)
        if parsed is not None:
            unit, period, field = parsed
            fields.setdefault((unit, period), {})[field] = value
    reports = []
    for (unit, period), found in fields.items():
        remaining = _number(found.get("remaining"))
        if remaining is None:
            continue
        reports.append(
            QuotaReport(
                unit=unit,
                period=period,
                remaining=max(0.0, remaining),
                limit=_number(found.get("limit")),
                reset=read_reset(found.get("reset"), headers.get("date")),
            )
        )
    return reports


@lru_cache(maxsize=128)
def _parse_name(name: str) -> tuple[Unit, str, str] | None:
    """The unit, period and field that a header is about; every answer has the same few names."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    unit: Unit = "tokens" if "tokens" in (match["unit"], match["a_unit"]) else "requests"
    field = match["field"] or match["a_field"] or match["i_field"]
    return unit, match["period"] or "", field


def read_reset(value: str | None, date: str | None = None) -> float | None:
    """Seconds until the reset that a header value names; None if it cannot be read.

    Args:
        value: A span or an instant.
        date: The response's `date` header, the "now" of an instant.
    """
    if not value:
        return None
    value = value.strip().lower()
    number = _number(value)
    if number is not None:
        if number < _EPOCH:
            return number
        instant = number / 1000 if number > _EPOCH * 1000 else number
        return max(0.0, instant - _server_time(date))
    if _SPAN_WHOLE.fullmatch(value):
        return sum(float(amount) * _SECONDS[unit] for amount, unit in _SPAN.findall(value))
    try:
        return max(0.0, datetime.fromisoformat(value.upper()).timestamp() - _server_time(date))
    except ValueError:
        return None


def _server_time(date: str | None) -> float:
    if date:
        try:
            return parsedate_to_datetime(date).timestamp()
        except ValueError:
            pass
    return time.time()


def _number(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        # the IETF drafts allow `100, 100;window=60`: the first item is the one in force
        number = float(value.partition(",")[0].partition(";")[0])
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _structured(value: str) -> dict[str, str]:
    names = {"r": "remaining", "t": "reset", "q": "limit"}
    names |= {name: name for name in ("limit", "remaining", "reset")}
    found = {}
    for part in re.split("[,;]", value):
        key, _, number = part.strip().partition("=")
        if key in names:
            found[names[key]] = number
    return found
