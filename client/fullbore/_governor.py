"""What every request of one client shares: endpoint, limiter, prices, ledger, policies, clock."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from ._clock import Clock
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
    ledger: Ledger
    plan: Plan | None
    retry: Retry
    timeouts: Timeouts
    clock: Clock
    wall: Clock
    sleep: Callable[[float], Awaitable[object]]
    rng: random.Random

    def price(self, usage: Usage, model: str) -> Decimal | None:
        """Price one call, ``None`` if there is no plan or it knows no price."""
        return None if self.plan is None else self.plan.cost(usage, model)


def billed(status: int | None, error: RequestError | None) -> Literal["yes", "no", "maybe"]:
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


def rate_limit_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Keep the headers that limiters read, with lower-case names."""
    return {name: value for name, value in headers.items() if "ratelimit" in name}


def make_outcome(
    kind: OutcomeKind,
    *,
    total: float,
    first_token: float | None,
    usage: Usage | None,
    error: RequestError | None,
    headers: Mapping[str, str],
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
