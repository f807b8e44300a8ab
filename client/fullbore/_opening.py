"""From a user's settings to a governor: limiter, transport, prices, made to fit each other.

Owns the choices that follow from more than one setting. Opens no connection.
"""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import httpx2

from ._clock import loop_clock
from ._governor import Governor
from ._hedge import Hedge, Hedging
from ._moves import Moves
from ._retry import Retry
from ._types import Timeouts
from .errors import ConfigError
from .limits import AdaptiveConfig, Limiter, Move, Rates, make_limiter
from .pricing import CatalogPlan, Ledger, Plan, Subscription
from .transport.connect import (
    Endpoint,
    allowed_connections,
    check_descriptors,
    open_transport,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What governors are made of; see ``Client`` for what each means.

    :raises ConfigError: a setting that cannot work, alone or with another.
    """

    concurrency: Literal["auto"] | int = "auto"
    rates: Rates | None = None
    pricing: Plan | None = None
    http2: bool | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    retry: Retry = field(default_factory=Retry)
    hedge: Hedge | None = None
    on_move: Callable[[Move], object] | None = None
    verify: ssl.SSLContext | bool = True
    limiter: Limiter | None = None
    transport: httpx2.AsyncBaseTransport | None = None
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        _check_concurrency(self.concurrency)
        self.retry.validate()
        if self.hedge is not None and getattr(self.pricing, "charges_per_request", False):
            raise ConfigError(
                f"hedge sends some requests twice, and the plan {self.pricing!r} charges for each "
                "request, or counts it against a quota. Leave hedge out."
            )
        if self.limiter is not None and self.rates is not None:
            raise ConfigError("Pass limiter or rates, not both: a limiter has rates of its own.")

    @property
    def most(self) -> int:
        """Requests that may be in flight at once, at any time."""
        if self.limiter is not None:
            return max(self.limiter.limit, AdaptiveConfig().maximum)
        return AdaptiveConfig().maximum if self.concurrency == "auto" else self.concurrency


def open_governor(
    base_url: httpx2.URL,
    settings: Settings,
    *,
    ledger: Ledger,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Governor:
    """Put the governor of one endpoint together, in the event loop that will use it.

    :raises ConfigError: the process may not hold as many connections as there would be.
    """
    clock = loop_clock()
    moves = Moves(settings.on_move)
    transport = settings.transport or open_transport(
        base_url, http2=settings.http2, verify=settings.verify, most=settings.most
    )
    endpoint = Endpoint(
        base_url,
        transport,
        api_key=api_key,
        headers=headers,
        connect_timeout=settings.timeouts.connect,
    )
    return Governor(
        endpoint=endpoint,
        limiter=settings.limiter or _make_limiter(base_url, settings, clock, moves),
        moves=moves,
        ledger=ledger,
        plan=settings.pricing or default_plan(base_url),
        retry=settings.retry,
        timeouts=settings.timeouts,
        hedging=None if settings.hedge is None else Hedging(settings.hedge),
        clock=clock,
        wall=time.time,
        sleep=anyio.sleep,
        rng=settings.rng,
    )


def default_plan(base_url: httpx2.URL) -> Plan | None:
    """Return the plan that an endpoint has if nothing is said: list prices for OpenAI's own."""
    return CatalogPlan("openai") if base_url.host == "api.openai.com" else None


def rates_of(plan: Plan | None) -> Rates | None:
    """Return the rates that a plan's terms allow, if they say any."""
    if not isinstance(plan, Subscription):
        return None
    return Rates(
        requests_per_minute=plan.requests_per_minute, requests_per_day=plan.requests_per_day
    )


def wire_timeouts(timeouts: Timeouts) -> httpx2.Timeout:
    """Return what comes nearest to our limits on time in httpx2's terms, for other libraries."""
    waits = (timeouts.first_token, timeouts.stall)
    read = None if None in waits else max(wait for wait in waits if wait is not None)
    return httpx2.Timeout(connect=timeouts.connect, read=read, write=None, pool=None)


def _make_limiter(
    base_url: httpx2.URL, settings: Settings, clock: Callable[[], float], moves: Moves
) -> Limiter:
    """Build the limiter; over HTTP/1.1 it keeps within the file descriptors there are."""
    rates = settings.rates or rates_of(settings.pricing)
    each_has_a_descriptor = settings.transport is None and (
        settings.http2 is False or (base_url.scheme == "http" and not settings.http2)
    )
    if settings.concurrency == "auto":
        most = AdaptiveConfig().maximum
        if each_has_a_descriptor:
            most = allowed_connections(most)
        bounds = AdaptiveConfig(start=min(AdaptiveConfig().start, most), maximum=most)
        return make_limiter("auto", rates=rates, adaptive=bounds, on_move=moves, clock=clock)
    if each_has_a_descriptor:
        check_descriptors(settings.concurrency)
    return make_limiter(settings.concurrency, rates=rates, clock=clock)


def _check_concurrency(concurrency: Any) -> None:
    if concurrency == "auto":
        return
    if not isinstance(concurrency, int) or isinstance(concurrency, bool) or concurrency < 1:
        raise ConfigError(
            f"concurrency is {concurrency!r}; it must be a whole number of at least 1, or 'auto'."
        )
