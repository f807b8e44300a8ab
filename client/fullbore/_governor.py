"""What every request of one client shares: endpoint, limiter, prices, ledger, policies, clock."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import httpx2

from ._clock import Clock
from ._hedge import Hedging
from ._moves import Moves
from ._retry import Retry
from ._types import Timeouts, Usage
from .errors import QuotaExceededError, RequestError, StatusError
from .limits import Limiter, Outcome, OutcomeKind
from .pricing import Ledger, Plan
from .transport.connect import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Governor:
    """The shared parts, none of which knows of the others.

    :param clock: the event loop's clock, in seconds.
    :param wall: seconds since 1970.
    """

    endpoint: Endpoint
    limiter: Limiter
    moves: Moves
    ledger: Ledger
    plan: Plan | None
    retry: Retry
    timeouts: Timeouts
    hedging: Hedging | None
    clock: Clock
    wall: Clock
    sleep: Callable[[float], Awaitable[object]]
    rng: random.Random

    def price(self, usage: Usage, model: str) -> Decimal | None:
        """Price one call, ``None`` if there is no plan or it knows no price."""
        return None if self.plan is None else self.plan.cost(usage, model)


def billed(error: RequestError | None) -> Literal["yes", "no", "maybe"]:
    """Whether an attempt that ended badly is charged for; no error means it was cancelled."""
    if error is None:
        return "maybe"
    return "maybe" if error.may_be_billed else "no"


def outcome_kind(error: RequestError | None) -> OutcomeKind:
    """What an end means to the limiter; ``None`` is success."""
    if error is None:
        return "ok"
    if isinstance(error, StatusError) and not isinstance(error, QuotaExceededError):
        return "overloaded" if error.status in (429, 503, 529) else "failed"
    return "failed"


def rate_limit_headers(headers: httpx2.Headers) -> Mapping[str, str]:
    """Keep the headers that limiters read, with lower-case names; most answers have none.

    ``date`` goes with them: it is the "now" of an instant that another of them names.
    """
    kept = [pair for pair in headers.raw if _is_for_limiters(pair[0])]
    if not kept:
        return _NONE
    kept += [pair for pair in headers.raw if pair[0].lower() == b"date"]
    return {name.decode("ascii").lower(): value.decode("latin-1") for name, value in kept}


@lru_cache(maxsize=1024)
def _is_for_limiters(name: bytes) -> bool:
    lower = name.lower()
    return b"ratelimit" in lower or lower == b"retry-after"


_NONE: Mapping[str, str] = MappingProxyType({})


def make_outcome(
    kind: OutcomeKind,
    *,
    total: float,
    first_token: float | None,
    usage: Usage | None,
    error: RequestError | None,
    headers: httpx2.Headers,
) -> Outcome:
    """Put together what a limiter is told when a permit is given back."""
    return Outcome(
        kind=kind,
        total=total,
        first_token=first_token,
        output_tokens=0 if usage is None else usage.output_tokens,
        input_tokens=0 if usage is None else usage.input_tokens,
        retry_after=error.retry_after if isinstance(error, StatusError) else None,
        headers=rate_limit_headers(headers),
    )
