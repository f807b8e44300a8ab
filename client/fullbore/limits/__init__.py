"""How much may be in flight at an endpoint, and how fast it may be sent.

`make_limiter` builds the one limiter of an endpoint out of a window (fixed or adaptive
concurrency) and a pacer (requests and tokens per minute and day). Both are policies without I/O;
`admission.py` holds the only queue, so that flows are served fairly under both at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import anyio

from fullbore._clock import Clock
from fullbore.limits._limiter import Limiter, Outcome, OutcomeKind, Permit, Wait
from fullbore.limits.adaptive import AdaptiveConfig, AdaptiveLimiter
from fullbore.limits.admission import Admission, Sleep
from fullbore.limits.fixed import FixedLimiter
from fullbore.limits.move import Move, Reason
from fullbore.limits.rate import RateLimiter, RatePacer, Rates


def make_limiter(
    concurrency: Literal["auto"] | int = "auto",
    *,
    rates: Rates | None = None,
    adaptive: AdaptiveConfig | None = None,
    on_move: Callable[[Move], None] | None = None,
    clock: Clock = time.monotonic,
    sleep: Sleep = anyio.sleep,
) -> Admission:
    """Build the limiter of one endpoint.

    Args:
        concurrency: Requests in flight, or `"auto"` to have the number found.
        rates: Rates known beforehand. Quotas in response headers and `Retry-After` are honoured
            in any case.
        adaptive: Bounds of the number found; unused with a fixed one.
        on_move: Called with every move of the adaptive limit; it must not raise.
        clock: Seconds, never going back.
        sleep: Sleeps on the same clock.

    Raises:
        ConfigError: `concurrency` is below 1.
    """
    pacer = RatePacer(rates or Rates())
    if concurrency == "auto":
        config = adaptive or AdaptiveConfig()
        return AdaptiveLimiter(config, pacer=pacer, on_move=on_move, clock=clock, sleep=sleep)
    return FixedLimiter(concurrency, pacer=pacer, clock=clock, sleep=sleep)


__all__ = [
    "AdaptiveConfig",
    "AdaptiveLimiter",
    "FixedLimiter",
    "Limiter",
    "Move",
    "Outcome",
    "OutcomeKind",
    "Permit",
    "RateLimiter",
    "Rates",
    "Reason",
    "Wait",
    "make_limiter",
]
