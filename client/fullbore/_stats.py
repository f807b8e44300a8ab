"""What a run of ``map`` is doing and how it went: counters, rates, percentiles in bounded memory.

Written by the run as items move; read by progress bars and by users, at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Protocol

from ._clock import Clock
from ._types import Result

_GROWTH = math.log(1.01)


class Quantiles:
    """Quantiles of positive numbers, each within 0.5 % of its true value, in bounded memory.

    Counts values in buckets that grow by 1 % (as in DDSketch, arXiv 1908.10693): at most about
    2,800 of them between a microsecond and a week.
    """

    __slots__ = ("_buckets", "count")

    def __init__(self) -> None:
        self.count = 0
        self._buckets: dict[int, int] = {}

    def add(self, value: float) -> None:
        """Count one value; anything below a microsecond counts as a microsecond."""
        bucket = math.ceil(math.log(max(value, 1e-6)) / _GROWTH)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1

    def quantile(self, q: float) -> float | None:
        """Return the value that a share ``q`` (0 to 1) is not above; ``None`` without values."""
        if not self.count:
            return None
        rank = max(1, math.ceil(q * self.count))
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                return math.exp((bucket - 0.5) * _GROWTH)
        raise AssertionError("ranks end with the last bucket")

    @property
    def p50(self) -> float | None:
        """The median."""
        return self.quantile(0.5)

    @property
    def p99(self) -> float | None:
        """The value that only one in a hundred is above."""
        return self.quantile(0.99)


class RunStats:
    """Live numbers of one ``map``; plain attributes, to be read only.

    :ivar total: items in the input, if it says (``len``).
    :ivar pulled: items taken from the input so far.
    :ivar done: items finished, failed ones included.
    :ivar failed: items finished with an error.
    :ivar retries: failed attempts that were followed by another.
    :ivar hedges: second tries at late items.
    :ivar paced_by: the quota that the next item waits for; empty if it waits for none.
    :ivar cost: price of the answers that counted, in US dollars; ``unpriced`` counts those
        without a price.
    :ivar first_token: seconds from sending to the first text, of each answered item.
    :ivar latency: seconds from waiting for admission to the end, of each answered item.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        total: int | None,
        limit: Callable[[], int],
        why: Callable[[], str] = lambda: "",
    ) -> None:
        self._clock = clock
        self._limit = limit
        self._why = why
        self._started_at = clock()
        self._ended_at: float | None = None
        self.total = total
        self.pulled = 0
        self.in_flight = 0
        self.done = 0
        self.failed = 0
        self.retries = 0
        self.hedges = 0
        self.paced_by = ""
        self.input_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.cost = Decimal(0)
        self.unpriced = 0
        self.first_token = Quantiles()
        self.latency = Quantiles()

    @property
    def ok(self) -> int:
        """Items answered in full."""
        return self.done - self.failed

    @property
    def limit(self) -> int:
        """How many requests the client may have in flight at the moment."""
        return self._limit()

    @property
    def limit_reason(self) -> str:
        """Why it is that many, in words; empty for a limit that has not moved."""
        return self._why()

    @property
    def elapsed(self) -> float:
        """Seconds since the start; of the whole run once it is over."""
        return (self._clock() if self._ended_at is None else self._ended_at) - self._started_at

    @property
    def output_tokens_per_second(self) -> float:
        """Output tokens of finished items over the time elapsed."""
        return self.output_tokens / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def remaining(self) -> float | None:
        """Seconds the rest will take at the rate so far; ``None`` while nobody can say."""
        if self.total is None or not self.done:
            return None
        return self.elapsed / self.done * max(self.total - self.done, 0)

    def finished(self, result: Result) -> None:
        """Count one finished item."""
        self.done += 1
        if len(result.attempts) > 1:
            cut_off = sum(attempt.error is None for attempt in result.attempts) - result.ok
            self.hedges += cut_off
            self.retries += len(result.attempts) - 1 - cut_off
        if result.error is not None:
            self.failed += 1
            return
        self.input_tokens += result.usage.input_tokens
        self.cached_tokens += result.usage.cached_tokens
        self.output_tokens += result.usage.output_tokens
        if result.cost is None:
            self.unpriced += 1
        else:
            self.cost += result.cost
        if result.timing.first_token is not None:
            self.first_token.add(result.timing.first_token)
        self.latency.add(result.timing.total)

    def ended(self) -> None:
        """The run is over: time stands still from here."""
        if self._ended_at is None:
            self._ended_at = self._clock()

    def __str__(self) -> str:
        total = "" if self.total is None else f" of {self.total}"
        lines = [
            f"{self.done}{total} done, {self.failed} failed, {self.retries} retries "
            f"in {self.elapsed:.1f} s",
            f"{self.output_tokens:,} output tokens, {self.output_tokens_per_second:,.1f}/s; "
            f"{self.input_tokens:,} input tokens, {self.cached_tokens:,} of them cached",
        ]
        for name, values in (("first token", self.first_token), ("whole answer", self.latency)):
            if values.p50 is not None and values.p99 is not None:
                lines.append(f"{name}: p50 {values.p50:.3f} s, p99 {values.p99:.3f} s")
        return "\n".join(lines)


class Observer(Protocol):
    """Watches a run; never drives it."""

    def start(self, stats: RunStats) -> None:
        """The run begins; ``stats`` changes as it goes on."""
        ...

    def stop(self) -> None:
        """The run is over, for whatever reason."""
        ...
