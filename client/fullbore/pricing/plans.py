"""How one call is priced: frozen values, ``Decimal`` US dollars, no I/O.

A plan prices what an endpoint reported. Whether a failed call is charged is not a plan's to say:
the ledger keeps those apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar, Literal, Protocol

from .._types import Usage
from ..errors import ConfigError

Money = Decimal | str | int
"""An amount of US dollars. Not a float: 0.1 has no exact one."""


class Plan(Protocol):
    """Prices calls. Write your own by writing this one method.

    If a plan charges for each request, or counts it, give it ``charges_per_request = True`` as
    well: then requests are never sent twice to be quick.
    """

    def cost(self, usage: Usage, model: str) -> Decimal | None:
        """Return the price of one answered call; ``None`` if there is no price for the model."""
        ...


def _money(value: Money, name: str) -> Decimal:
    if isinstance(value, float):
        raise ConfigError(
            f"{name} is the float {value!r}, which is not exactly what was written. Pass a string: "
            f"{name}='{value!r}'."
        )
    amount = Decimal(value)
    if not amount.is_finite() or amount < 0:
        raise ConfigError(f"{name} is {value!r}; a price is a finite amount of dollars, 0 or more.")
    return amount


@dataclass(frozen=True, slots=True)
class PerRequest:
    """A flat fee a call, whatever its tokens: ``PerRequest("0.002")``."""

    fee: Decimal
    charges_per_request: ClassVar[bool] = True

    def __init__(self, fee: Money) -> None:
        object.__setattr__(self, "fee", _money(fee, "fee"))

    def cost(self, usage: Usage, model: str) -> Decimal | None:
        """Return the fee."""
        return self.fee


@dataclass(frozen=True, slots=True)
class Rates:
    """Dollars per million tokens of each kind."""

    input: Decimal
    output: Decimal
    cached: Decimal
    cache_write: Decimal

    def cost(self, usage: Usage) -> Decimal:
        """Price each token once, by its kind. Reasoning tokens are output tokens."""
        fresh = usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens
        millionths = (
            self.input * fresh
            + self.cached * usage.cached_tokens
            + self.cache_write * usage.cache_write_tokens
            + self.output * usage.output_tokens
        )
        return millionths.scaleb(-6)


class PerToken:
    """Dollars per million tokens: ``PerToken(input="2.50", cached="1.25", output="10")``.

    :param input: of the prompt, as far as it was not read from or written to a cache.
    :param output: of everything generated, reasoning included.
    :param cached: of prompt tokens read from a cache; by default the same as ``input``.
    :param cache_write: of prompt tokens written to a cache; by default the same as ``input``.
    """

    __slots__ = ("_tiers", "rates")

    def __init__(
        self,
        *,
        input: Money,
        output: Money,
        cached: Money | None = None,
        cache_write: Money | None = None,
    ) -> None:
        base = _money(input, "input")
        self.rates = Rates(
            input=base,
            output=_money(output, "output"),
            cached=base if cached is None else _money(cached, "cached"),
            cache_write=base if cache_write is None else _money(cache_write, "cache_write"),
        )
        self._tiers: tuple[tuple[int, Rates], ...] = ()

    @classmethod
    def tiered(cls, base: Rates, tiers: tuple[tuple[int, Rates], ...]) -> PerToken:
        """Rates that depend on the size of the prompt.

        :param tiers: ``(start, rates)`` in ascending order; a prompt of more than ``start`` tokens
            pays those rates for all of its tokens.
        """
        plan = cls(input=base.input, output=base.output)
        plan.rates = base
        plan._tiers = tiers
        return plan

    @classmethod
    def for_model(cls, model: str, *, provider: str | None = None) -> PerToken:
        """Return today's list price of a model, from ``genai-prices``.

        :param provider: such as ``openai`` or ``deepseek``; found by the model's name if left out.
        :raises ConfigError: the catalogue has no price per token for it.
        """
        from .catalog import find_rates

        found = find_rates(model, provider=provider)
        if isinstance(found, str):
            raise ConfigError(f"{found} Give the prices yourself: PerToken(input=…, output=…).")
        return found

    def cost(self, usage: Usage, model: str) -> Decimal | None:
        """Return the price of the call."""
        rates = self.rates
        for start, tier in self._tiers:
            if usage.input_tokens > start:
                rates = tier
        return rates.cost(usage)

    def __repr__(self) -> str:
        tiers = f", tiers={self._tiers!r}" if self._tiers else ""
        return f"PerToken({self.rates!r}{tiers})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PerToken):
            return NotImplemented
        return (self.rates, self._tiers) == (other.rates, other._tiers)

    def __hash__(self) -> int:
        return hash((self.rates, self._tiers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A monthly fee with a quota of requests: one more call costs nothing until the quota is used.

    :param monthly_fee: dollars a month.
    :param requests_per_day: the quota; ``None`` is unlimited.
    :param requests_per_minute: the pace allowed; ``None`` is unlimited.
    :param max_input_tokens: the most a request's prompt may have; ``None`` is unlimited.
    :param max_output_tokens: the most an answer may have; ``None`` is unlimited.
    :param as_of: when these terms were read. Providers change them: build your own if they have.
    """

    name: str
    monthly_fee: Decimal
    requests_per_day: int | None = None
    requests_per_minute: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    as_of: str = ""

    def cost(self, usage: Usage, model: str) -> Decimal | None:
        """Return the marginal price of a call: zero."""
        return Decimal(0)

    @property
    def charges_per_request(self) -> bool:
        """Whether each request uses up some of a quota."""
        return self.requests_per_day is not None

    def effective_cost(self, calls: int) -> Decimal | None:
        """Return the fee divided by the calls made in a month; ``None`` for no calls."""
        return self.monthly_fee / calls if calls > 0 else None

    @property
    def least_cost(self) -> Decimal | None:
        """Dollars a call if the quota of a 30-day month is used up; ``None`` without a quota."""
        per_day = self.requests_per_day
        return None if per_day is None else self.effective_cost(30 * per_day)


_OXLO_AS_OF = "2026"
_OXLO = {
    # plan: dollars a month, requests a day and a minute, tokens in and out of one request
    "free": ("0", 60, 5, 8_192, 2_048),
    "pro": ("80", 1_000, 30, 16_384, 4_096),
    "premium": ("350", 5_000, 120, 32_768, 8_192),
}


def oxlo(plan: Literal["free", "pro", "premium"]) -> Subscription:
    """Return the terms of an Oxlo.ai plan, as published in 2026; they have changed before.

    :raises ConfigError: there is no such plan.
    """
    if plan not in _OXLO:
        raise ConfigError(f"Oxlo.ai has no plan {plan!r}; it has {', '.join(sorted(_OXLO))}.")
    fee, per_day, per_minute, most_in, most_out = _OXLO[plan]
    return Subscription(
        name=f"oxlo {plan}",
        monthly_fee=Decimal(fee),
        requests_per_day=per_day,
        requests_per_minute=per_minute,
        max_input_tokens=most_in,
        max_output_tokens=most_out,
        as_of=_OXLO_AS_OF,
    )
