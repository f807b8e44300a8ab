"""Finds how many requests an endpoint can use at once.

Owns the policy: when the window grows, holds and shrinks, and the named reason for each move. The
statistics are in `roofline.py`, the waiting in `admission.py`.

Sources of the ideas. Slow start and its one doubling a round trip: Jacobson 1988, "Congestion
avoidance and control". No growth while the caller, not the window, is what limits: RFC 7661.
Estimating the bandwidth-delay product from a model and probing around it in cycles: BBR (Cardwell
et al. 2016). Limits from latency for services: TCP Vegas (Brakmo and Peterson 1995) and Netflix's
concurrency-limits. Those read any rise of latency as queueing; a GPU that batches answers every
request more slowly and all of them sooner, so here a rise counts as queueing only where
throughput stops rising. Down it goes in steps, the next one as soon as the last did no harm, so
that what a lower limit costs is seen before much of it is paid.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from fullbore._clock import Clock
from fullbore.errors import ConfigError
from fullbore.limits._limiter import Outcome
from fullbore.limits.admission import Admission, Pacer, Sleep
from fullbore.limits.ceiling import Ceiling
from fullbore.limits.move import Move, Reason
from fullbore.limits.roofline import Fit, LoadTable


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveConfig:
    """Bounds of the adaptive window.

    Attributes:
        start: Requests in flight at first.
        minimum: The least the limit may be.
        maximum: The most the limit may be.

    Raises:
        ConfigError: Not 1 <= minimum <= start <= maximum.
    """

    start: int = 16
    minimum: int = 1
    maximum: int = 1024

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.start <= self.maximum:
            raise ConfigError(
                "adaptive concurrency needs 1 <= minimum <= start <= maximum, got "
                f"minimum={self.minimum}, start={self.start}, maximum={self.maximum}"
            )


_MARGIN = 1.1
"""Limit per estimated knee: a short queue, so that the endpoint never waits for the client."""
_ENOUGH = 0.985
"""Share of the model's best throughput that is taken for the best, with fewer in flight."""
_PROBE = 1.25
_HOPE = 0.05
"""Possible gain of throughput for which it is worth to look higher."""
_LEAST_ROUND = 8
_STEADY = 0.8
"""Least ratio between the loads that a request met at its start, at its end and on average."""
_RAMP = 3
"""Requests added for each answer while growing: quick, and yet no burst."""
_STEP_DOWN = 0.8
_LEAST_STEP_DOWN = 0.6
"""A limit falls to no less than this share of itself in a round, refusals apart: to the lesser one
only where no model that the samples allow loses throughput by it."""
_UNSEEN = 0.85
"""Least useful load taken from the model, as a share of the lowest load with samples."""
_DOUBT = 0.5
"""Share of the highest load seen; if the endpoint may have been full below it, nothing grows but by
a probe. Where every load seen was too much, latency is proportional to load, and the least error
of it looks like an endpoint that is nowhere full."""
_PROBE_UP_EVERY = 8
_PROBE_DOWN_EVERY = 12
_QUEUED = 0.25
"""Share of the first requests, served side by side, below which the others must have queued."""


@dataclass(slots=True)
class _Opening:
    """The first answers: how many requests were served side by side.

    BBR's estimate of the bandwidth-delay product while it starts up (Cardwell et al. 2016): the
    rate of delivery times the least delay. Good for a factor of two or three, not for a verdict.
    """

    began: float = math.inf
    ended: float = 0.0
    work: float = 0.0
    fastest: float = math.inf  # seconds per unit of work

    def add(self, seconds: float, work: int, now: float) -> None:
        self.began = min(self.began, now - seconds)
        self.ended = now
        self.work += work
        self.fastest = min(self.fastest, seconds / work)

    def side_by_side(self) -> float:
        took = self.ended - self.began
        return self.work * self.fastest / took if took > 0 else math.inf


class AdaptiveWindow:
    """A window that follows the endpoint. A round is a turn-over of the requests in flight.

    Args:
        config: Bounds.
        on_move: Called with every `Move`, synchronously; it must not raise.
    """

    def __init__(
        self,
        config: AdaptiveConfig = AdaptiveConfig(),
        *,
        on_move: Callable[[Move], None] | None = None,
    ) -> None:
        self._config = config
        self._on_move = on_move
        self._limit = config.start
        self._target = config.start
        self._table = LoadTable()
        self._now = 0.0
        self._area = 0.0  # request-seconds
        self._ceiling = Ceiling()
        self._rounds_to_up = _PROBE_UP_EVERY
        self._rounds_to_down = 0
        # until the first requests are answered; None from then on
        self._opening: _Opening | None = _Opening()
        # of this round
        self._answers = 0
        self._samples = 0
        self._failed = 0
        self._peak = 0
        self._round_size = max(_LEAST_ROUND, config.start)

    @property
    def limit(self) -> int:
        """The limit now."""
        return self._limit

    @property
    def ceiling(self) -> int | None:
        """The number in flight above which the endpoint refused, if it ever did."""
        return self._ceiling.level

    def admitted(self, *, now: float, in_flight: int) -> tuple[float, int]:
        """See `Window.admitted`."""
        self._advance(now, in_flight - 1)
        self._peak = max(self._peak, in_flight)
        return self._area, in_flight

    def finished(
        self,
        outcome: Outcome,
        *,
        now: float,
        started: float,
        mark: tuple[float, int],
        in_flight: int,
    ) -> None:
        """See `Window.finished`."""
        self._advance(now, in_flight)
        if outcome.kind == "cancelled":
            return
        self._answers += 1
        if outcome.kind == "ok":
            self._ceiling.accepted()
            self._sample(outcome, now - started, mark, in_flight)
            self._open(outcome, now - started, now)
            if self._limit < self._target and self._bound():
                self._limit = min(self._target, self._limit + _RAMP)
        elif outcome.kind == "overloaded":
            self._refuse(in_flight - 1)
        else:
            self._failed += 1
        if self._samples >= self._round_size or self._answers >= 4 * self._round_size:
            self._close_round()

    def _open(self, outcome: Outcome, seconds: float, now: float) -> None:
        """Double once when as many were answered as may be in flight, as TCP does from the start.

        What they tell of latency belongs to a load that was still building up, so a first verdict
        takes one more turn-over: better to have it for the larger load. Only where they came as
        from a queue, one after the other, is the load large enough already.
        """
        opening = self._opening
        if opening is None:
            return
        opening.add(seconds, max(outcome.output_tokens, 1), now)
        if self._answers >= self._limit and self._bound():
            self._opening = None
            if opening.side_by_side() < _QUEUED * self._limit:
                return
            wanted = min(2 * self._limit, self._config.maximum, self._ceiling.level or math.inf)
            self._go("slow_start", int(wanted), f"the first {self._answers} were answered")

    def _advance(self, now: float, in_flight: int) -> None:
        """Integrate the requests in flight over time, for the mean load that each one met."""
        self._area += in_flight * (now - self._now)
        self._now = now

    def _sample(
        self, outcome: Outcome, seconds: float, mark: tuple[float, int], in_flight: int
    ) -> None:
        if seconds <= 0:
            return
        area, at_start = mark
        mean = (self._area - area) / seconds
        if min(mean, at_start, in_flight) < _STEADY * max(mean, at_start, in_flight):
            return  # too much changed in its time to tell which load its latency belongs to
        self._samples += 1
        # Where requests queue, latency is set by the load at the start; where they share, by the
        # mean load. Which one it is cannot be known, so take the middle; both are near.
        self._table.add((at_start + mean) / 2, seconds, outcome.output_tokens)

    def _bound(self) -> bool:
        """Whether the window, and not the caller, kept more requests from being in flight."""
        return self._peak >= 0.9 * self._limit

    def _refuse(self, others: int) -> None:
        """Follow the accepted requests down: the refused ones are not replaced."""
        follows = self._ceiling.refused(
            others,
            limit=self._limit,
            least=self._config.minimum,
            round_size=self._round_size,
        )
        level = self._ceiling.level
        if follows and level is not None:
            self._target = min(self._target, level)
            if level < self._limit:
                self._go("overloaded", level, f"refused with {others} others in flight")

    def _close_round(self) -> None:
        self._opening = None
        bound = self._bound()
        if self._failed > self._answers / 2:
            floor = min(self._limit, self._config.start)
            detail = f"{self._failed} of {self._answers} requests failed"
            self._go("failures", max(floor, self._limit // 2), detail)
        else:
            self._consider(bound)
        self._ceiling.close_round(self._peak, bound=bound)
        self._answers = self._samples = self._failed = self._peak = 0
        self._round_size = max(_LEAST_ROUND, self._limit)

    def _consider(self, bound: bool) -> None:
        """Take the round's samples in and go where they point."""
        changed = self._table.close_round()
        fit = self._table.fit(self._limit)
        if fit is None:
            return
        reason, wanted, detail = self._higher(fit) or self._lower(fit)
        if not bound and wanted >= self._peak:
            return  # the caller is what limits: nothing was learnt about more
        if changed:
            reason = "endpoint_changed"
        wanted = max(self._config.minimum, min(self._config.maximum, wanted))
        level = self._ceiling.level
        if level is not None and wanted > level:
            raised = self._ceiling.raised(self._limit) if bound and self._limit >= level else None
            if raised is not None:
                reason, detail = raised, f"{level} in flight were the most before"
            wanted = min(wanted, self._ceiling.level or wanted)
        self._go(reason, wanted, detail)

    def _higher(self, fit: Fit) -> tuple[Reason, int, str] | None:
        """A higher limit, if the samples speak for it or it is time to look."""
        horizon = 2 * fit.top
        useful = fit.best.useful(_ENOUGH, horizon)
        if useful > fit.top and not self._in_doubt(fit):
            self._rounds_to_up = _PROBE_UP_EVERY
            detail = f"no sign of a queue up to {fit.top:.0f} in flight"
            return "throughput_rises", 2 * self._limit, detail
        self._rounds_to_up -= 1
        hope = fit.hope(self._limit)
        if hope > _HOPE or self._rounds_to_up <= 0:
            self._rounds_to_up = _PROBE_UP_EVERY
            detail = f"{hope:.0%} more throughput may be possible"
            return "probe_up", max(self._limit + 1, round(self._limit * _PROBE)), detail
        return None

    def _lower(self, fit: Fit) -> tuple[Reason, int, str]:
        """The limit at which the endpoint is full, or a look below this one."""
        limit = self._limit
        useful = max(fit.best.useful(_ENOUGH, 2 * fit.top), _UNSEEN * fit.bottom)
        lowest = fit.lowest(_ENOUGH)
        spared = max(
            _LEAST_STEP_DOWN * limit, min(_STEP_DOWN * limit, _MARGIN * fit.highest(_ENOUGH))
        )
        wanted = max(round(_MARGIN * useful) + 1, round(spared))
        if self._in_doubt(fit):
            wanted = min(wanted, limit)
        self._rounds_to_down -= 1
        if wanted <= limit and self._rounds_to_down >= _PROBE_DOWN_EVERY - 1:
            self._rounds_to_down = 0  # the last look lower did no harm: look lower still
        if self._rounds_to_down <= 0 and lowest < 0.75 * limit / _MARGIN:
            self._rounds_to_down = _PROBE_DOWN_EVERY
            far = fit.bottom > 0.7 * limit or lowest < 0.4 * limit
            lower = max(1, min(wanted, round(limit * (_STEP_DOWN if far else 1 / 1.15))))
            return "probe_down", lower, "fewer in flight may do as well"
        return "endpoint_full", wanted, f"the endpoint is full at about {useful:.0f} in flight"

    def _in_doubt(self, fit: Fit) -> bool:
        """Whether every load seen may have been too much, or nearly every one."""
        return fit.lowest(_ENOUGH) <= max(_DOUBT * fit.top, fit.bottom)

    def _go(self, reason: Reason, wanted: int, detail: str) -> None:
        """Make `wanted` the limit: at once if it is lower, with the answers to come if higher."""
        old, self._target = self._limit, wanted
        self._limit = min(old, wanted)
        if wanted != old and self._on_move is not None:
            move = Move(reason=reason, old=old, new=wanted, detail=detail, at=self._now)
            self._on_move(move)


class AdaptiveLimiter(Admission):
    """A limiter that finds the endpoint's capacity and says why it moves."""

    def __init__(
        self,
        config: AdaptiveConfig = AdaptiveConfig(),
        *,
        pacer: Pacer | None = None,
        on_move: Callable[[Move], None] | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = anyio.sleep,
    ) -> None:
        super().__init__(
            AdaptiveWindow(config, on_move=on_move), pacer=pacer, clock=clock, sleep=sleep
        )
