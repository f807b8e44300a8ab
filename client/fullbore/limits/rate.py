"""Pacing: how many requests and tokens may be started per minute and per day.

Owns the reservations and the answer to "how long must this request wait". Joins three sources:
the rates a user states, the quotas an endpoint reports in its headers, and `Retry-After`. The
arithmetic of one quota is in `quota.py`, the waiting in `admission.py`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import anyio

from fullbore._clock import Clock
from fullbore.errors import ConfigError
from fullbore.limits._limiter import NO_WAIT, Outcome, Wait
from fullbore.limits.admission import Admission, Sleep
from fullbore.limits.fixed import FixedWindow
from fullbore.limits.headers import Unit, read_quotas
from fullbore.limits.quota import Entry, ReportedQuota, SlidingQuota


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates an endpoint allows, where its user knows them; None for no such limit.

    Attributes:
        requests_per_minute: Requests started in any 60 seconds.
        requests_per_day: Requests started in any 24 hours.
        tokens_per_minute: Tokens of prompts and answers in any 60 seconds.
        tokens_per_day: Tokens of prompts and answers in any 24 hours.

    Raises:
        ConfigError: One is below 1.
    """

    requests_per_minute: int | None = None
    requests_per_day: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            rate = getattr(self, name)
            if rate is not None and rate < 1:
                raise ConfigError(f"{name} must be at least 1, got {rate}; None is no limit")


@dataclass(slots=True)
class Reservation:
    """What one request was charged when it started."""

    at: float
    tokens: int
    requests_so_far: float
    tokens_so_far: float
    entries: list[Entry]


class RatePacer:
    """A `Pacer` by stated rates, reported quotas and `Retry-After`.

    A report counts what the endpoint knew when it answered; what was sent after that request is
    taken off. Reports of requests older than the last one read are ignored.

    Args:
        rates: What is known beforehand.
    """

    def __init__(self, rates: Rates = Rates()) -> None:
        self._stated = [
            (f"{rate} {unit} a {period}", unit, SlidingQuota(rate, seconds))
            for rate, unit, period, seconds in (
                (rates.requests_per_minute, "requests", "minute", 60.0),
                (rates.requests_per_day, "requests", "day", 86400.0),
                (rates.tokens_per_minute, "tokens", "minute", 60.0),
                (rates.tokens_per_day, "tokens", "day", 86400.0),
            )
            if rate is not None
        ]
        self._reported: dict[tuple[Unit, str], ReportedQuota] = {}
        self._requests = 0.0  # ever charged
        self._tokens = 0.0
        self._newest_report = 0.0  # requests charged up to the one whose report was read last
        self._hold = _Hold()

    def wait(self, now: float, tokens: int, in_flight: int) -> Wait:
        """See `Pacer.wait`."""
        seconds, quota = self._hold.delay(now, in_flight), "Retry-After"
        for name, unit, stated in self._stated:
            delay = stated.delay(now, 1 if unit == "requests" else tokens)
            if delay > seconds:
                seconds, quota = delay, name
        for (unit, period), reported in self._reported.items():
            delay = reported.delay(now, 1 if unit == "requests" else tokens)
            if delay > seconds:
                each = f" a {period}" if period else ""
                seconds, quota = delay, f"the endpoint's quota of {unit}{each}"
        return Wait(seconds=seconds, quota=quota) if seconds > 0 else NO_WAIT

    def headroom(self, now: float, in_flight: int) -> int | None:
        """See `Pacer.headroom`."""
        room = self._hold.room(now, in_flight)
        for _, unit, stated in self._stated:
            room = min(room, _whole(unit, stated.available(now)))
        for (unit, _), reported in self._reported.items():
            room = min(room, _whole(unit, reported.available(now)))
        return None if room == math.inf else max(0, int(room))

    def reserve(self, now: float, tokens: int) -> Reservation:
        """See `Pacer.reserve`."""
        self._requests += 1
        self._tokens += tokens
        entries = [
            stated.charge(now, 1 if unit == "requests" else tokens)
            for _, unit, stated in self._stated
        ]
        for (unit, _), reported in self._reported.items():
            reported.charge(now, 1 if unit == "requests" else tokens)
        return Reservation(now, tokens, self._requests, self._tokens, entries)

    def settle(
        self, now: float, reservation: Reservation, outcome: Outcome, in_flight: int
    ) -> None:
        """See `Pacer.settle`."""
        change = _tokens_used(reservation, outcome) - reservation.tokens
        never_sent = outcome.kind == "cancelled" and outcome.total == 0
        for (_, unit, stated), entry in zip(self._stated, reservation.entries, strict=True):
            if unit == "tokens":
                stated.correct(now, entry, change)
            elif never_sent:
                stated.correct(now, entry, -1)
        if outcome.headers:
            self._read(now, reservation, outcome)
        self._hold.settle(now, reservation.at, outcome, in_flight)

    def _read(self, now: float, reservation: Reservation, outcome: Outcome) -> None:
        if reservation.requests_so_far < self._newest_report:
            return
        for report in read_quotas(outcome.headers):
            self._newest_report = reservation.requests_so_far
            requests = report.unit == "requests"
            since = (
                self._requests - reservation.requests_so_far
                if requests
                else self._tokens - reservation.tokens_so_far
            )
            quota = self._reported.setdefault((report.unit, report.period), ReportedQuota())
            quota.report(
                now, remaining=report.remaining - since, limit=report.limit, reset=report.reset
            )


def _whole(unit: str, available: float) -> float:
    """Requests that fit; how large the next ones are is unknown, so tokens stop at nothing left."""
    if unit == "requests":
        return available
    return math.inf if available > 0 else 0


def _tokens_used(reservation: Reservation, outcome: Outcome) -> int:
    used = outcome.input_tokens + outcome.output_tokens
    if used:
        return used
    if outcome.kind == "overloaded" or outcome.total == 0:
        return 0
    return reservation.tokens  # unknown: it may have been charged in full


class _Hold:
    """What `Retry-After` does: fewer, and none only if nothing else is accepted either.

    A refusal holds the number in flight at those that the endpoint accepted, for as long as it
    said. Finished ones may be replaced, so one refusal never stops the others. Further refusals
    bring the number down, and after three in a row of requests sent during the hold, nothing is
    sent until it ends: then it is a rate that is used up, and not a number in flight.
    """

    _ENOUGH_REFUSALS = 3

    def __init__(self) -> None:
        self._since = 0.0
        self._until = -math.inf
        self._most = 0
        self._refusals = 0

    def delay(self, now: float, in_flight: int) -> float:
        if now >= self._until or in_flight < self._most:
            return 0.0
        return self._until - now

    def room(self, now: float, in_flight: int) -> float:
        return math.inf if now >= self._until else max(0, self._most - in_flight)

    def settle(self, now: float, sent: float, outcome: Outcome, in_flight: int) -> None:
        during = self._since <= sent and now < self._until
        if outcome.kind == "ok" and during:
            self._refusals = 0
        if outcome.kind != "overloaded" or not outcome.retry_after:
            return
        if now >= self._until:
            self._since, self._most, self._refusals = now, in_flight, 0
        else:
            self._most = min(self._most, in_flight)
            self._refusals += during
            if self._refusals >= self._ENOUGH_REFUSALS:
                self._most = 0
        self._until = max(self._until, now + outcome.retry_after)


class RateLimiter(Admission):
    """A limiter that only paces; `most` bounds the requests in flight.

    Args:
        rates: What is known beforehand; the endpoint's own headers are read in any case.
        most: The most requests in flight.
        clock: Seconds.
        sleep: Sleeps on the same clock.
    """

    def __init__(
        self,
        rates: Rates = Rates(),
        *,
        most: int = 1024,
        clock: Clock = time.monotonic,
        sleep: Sleep = anyio.sleep,
    ) -> None:
        super().__init__(FixedWindow(most), pacer=RatePacer(rates), clock=clock, sleep=sleep)
