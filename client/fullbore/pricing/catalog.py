"""List prices per token from ``genai-prices``, read once a model and kept.

Owns the translation of that package's data into :class:`PerToken`. It is imported only when a
price is looked up, for it is heavy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from .._types import Usage
from .plans import PerToken, Rates

logger = logging.getLogger("fullbore.pricing")


class CatalogPlan:
    """Prices every model at its provider's list price of the day it is first met.

    A model without a price costs ``None``, and a warning says so once.

    :param provider: such as ``openai``; found by the model's name if left out.
    """

    def __init__(
        self,
        provider: str | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._provider = provider
        self._now = now
        self._plans: dict[tuple[str, str | None], PerToken | None] = {}

    def cost(self, usage: Usage, model: str) -> Decimal | None:
        """Return the price of the call by the tier that answered."""
        plan = self.plan_for(model, service_tier=usage.service_tier)
        return None if plan is None else plan.cost(usage, model)

    def plan_for(self, model: str, *, service_tier: str | None = None) -> PerToken | None:
        """Return the prices of a model; the first look-up of each takes milliseconds."""
        key = (model, service_tier)
        if key not in self._plans:
            found = find_rates(
                model, provider=self._provider, service_tier=service_tier, at=self._now()
            )
            if isinstance(found, str):
                logger.warning("%s Its calls count as unpriced (cost None).", found)
                self._plans[key] = None
            else:
                self._plans[key] = found
        return self._plans[key]


def find_rates(
    model: str,
    *,
    provider: str | None = None,
    service_tier: str | None = None,
    at: datetime | None = None,
) -> PerToken | str:
    """Return the list price of a model at a moment, or a sentence that says why there is none."""
    from genai_prices.data_snapshot import get_snapshot

    try:
        _, info = get_snapshot().find_provider_model(model, None, provider, None)
    except LookupError:
        where = f"of {provider} " if provider else ""
        return f"genai-prices knows no price for the model {model!r} {where}".rstrip() + "."
    context = {"service_tier": service_tier} if service_tier else None
    prices = info.get_prices(at or datetime.now(UTC), context)
    if prices.input_mtok is None or prices.output_mtok is None:
        return f"genai-prices has no price per token for the model {model!r}."
    return _translate(prices)


def _translate(prices: Any) -> PerToken:
    """Flatten prices that each have their own tiers into rates per tier."""
    kinds = (prices.input_mtok, prices.output_mtok, prices.cache_read_mtok, prices.cache_write_mtok)
    starts = sorted({tier.start for kind in kinds for tier in getattr(kind, "tiers", ())})
    base = _rates_at(kinds, 0)
    return PerToken.tiered(base, tuple((start, _rates_at(kinds, start + 1)) for start in starts))


def _rates_at(kinds: tuple[Any, ...], input_tokens: int) -> Rates:
    values = [_value_at(kind, input_tokens) for kind in kinds]
    fresh, output = values[0], values[1]
    assert fresh is not None
    assert output is not None
    # What has no price of its own is ordinary input.
    cached = fresh if values[2] is None else values[2]
    written = fresh if values[3] is None else values[3]
    return Rates(input=fresh, output=output, cached=cached, cache_write=written)


def _value_at(price: Any, input_tokens: int) -> Decimal | None:
    tiers = getattr(price, "tiers", None)
    if tiers is None:
        return price if price is None else Decimal(price)
    value = price.base
    for tier in tiers:
        if input_tokens > tier.start:
            value = tier.price
    return Decimal(value)
