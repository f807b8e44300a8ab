"""Prices against hand-computed values and genai-prices; the ledger against the sum of its parts."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullbore import ConfigError, Ledger, PerRequest, PerToken, Usage, oxlo
from fullbore.pricing import CatalogPlan

MILLION = Usage(input_tokens=1_000_000, cached_tokens=250_000, output_tokens=1_000_000)


def test_per_request_is_flat() -> None:
    """Tokens do not matter."""
    assert PerRequest("0.002").cost(MILLION, "any") == Decimal("0.002")


def test_per_token_charges_each_token_once() -> None:
    """750k fresh at 2.50, 250k cached at 1.25, a million out at 10."""
    plan = PerToken(input="2.50", cached="1.25", output="10")
    assert plan.cost(MILLION, "any") == Decimal("1.875") + Decimal("0.3125") + Decimal(10)


def test_reasoning_is_output_already() -> None:
    """It is a part of the output tokens, not more of them."""
    plan = PerToken(input=0, output=10)
    thinking = Usage(output_tokens=100, reasoning_tokens=90)
    assert plan.cost(thinking, "any") == plan.cost(Usage(output_tokens=100), "any")


def test_cache_writes_have_their_own_price() -> None:
    """1 token fresh, 2 written, 4 read."""
    plan = PerToken(input="1000000", cache_write="2000000", cached="100000", output=0)
    usage = Usage(input_tokens=7, cache_write_tokens=2, cached_tokens=4)
    assert plan.cost(usage, "any") == Decimal("5.4")


def test_floats_are_refused() -> None:
    """0.002 is not what was written."""
    with pytest.raises(ConfigError, match=r"'0\.002'"):
        PerRequest(0.002)  # type: ignore[arg-type]


def test_negative_prices_are_refused() -> None:
    """The field is named."""
    with pytest.raises(ConfigError, match="output"):
        PerToken(input="1", output="-1")


def test_oxlo_pro() -> None:
    """$80 a month for 1,000 requests a day: nothing more a call, $0.0027 at full use."""
    plan = oxlo("pro")
    assert plan.cost(MILLION, "any") == 0
    assert plan.least_cost is not None
    assert round(plan.least_cost, 4) == Decimal("0.0027")
    assert plan.effective_cost(8_000) == Decimal("0.01")
    assert plan.effective_cost(0) is None
    assert (plan.requests_per_minute, plan.max_output_tokens, plan.as_of) == (30, 4096, "2026")


def test_oxlo_has_three_plans() -> None:
    """Anything else is named as unknown."""
    assert oxlo("free").monthly_fee == 0
    with pytest.raises(ConfigError, match="free, premium, pro"):
        oxlo("gold")  # type: ignore[arg-type]


AT = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.mark.parametrize("model", ["gpt-4o", "gpt-4o-mini", "gpt-5", "gpt-5.5", "o3"])
@pytest.mark.parametrize("tier", [None, "default", "priority", "flex"])
@pytest.mark.parametrize("tokens", [(1000, 0, 7), (500_000, 300_000, 12_345)], ids=["small", "big"])
def test_the_catalogue_agrees_with_genai_prices(
    model: str, tier: str | None, tokens: tuple[int, int, int]
) -> None:
    """Rates resolved once give what the library computes call by call."""
    import genai_prices

    given_in, cached, out = tokens
    expected = genai_prices.calc_price(
        genai_prices.Usage(input_tokens=given_in, cache_read_tokens=cached, output_tokens=out),
        model,
        provider_id="openai",
        genai_request_timestamp=AT,
        price_context={"service_tier": tier} if tier else None,
    )
    usage = Usage(input_tokens=given_in, cached_tokens=cached, output_tokens=out, service_tier=tier)
    assert CatalogPlan("openai", now=lambda: AT).cost(usage, model) == expected.total_price


def test_an_unknown_model_costs_nothing_known(caplog: pytest.LogCaptureFixture) -> None:
    """None, not zero; said once."""
    plan = CatalogPlan("openai")
    with caplog.at_level(logging.WARNING):
        assert plan.cost(MILLION, "no-such-model") is None
        assert plan.cost(MILLION, "no-such-model") is None
    assert len(caplog.records) == 1
    assert "no-such-model" in caplog.text


def test_for_model_looks_the_price_up() -> None:
    """A plan of its own, to compare endpoints by."""
    assert PerToken.for_model("gpt-4o-mini", provider="openai").rates.output == Decimal("0.6")
    with pytest.raises(ConfigError, match="PerToken"):
        PerToken.for_model("no-such-model", provider="openai")


costs = st.one_of(st.none(), st.decimals(0, 10, places=9))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.sampled_from([None, "x", "y"]),
            st.booleans(),
            st.integers(0, 1000),
            costs,
        ),
        max_size=30,
    )
)
def test_the_whole_is_the_sum_of_its_parts(
    calls: list[tuple[str, str | None, bool, int, Decimal | None]],
) -> None:
    """To the last digit, by model, by label and in all."""
    ledger = Ledger(keep_entries=True)
    for model, label, ok, tokens, cost in calls:
        usage = Usage(input_tokens=tokens, output_tokens=tokens)
        if ok:
            ledger.record(model=model, label=label, usage=usage, cost=cost)
        else:
            ledger.record_failure(
                model=model, label=label, usage=usage, cost=cost, billed="maybe", cancelled=False
            )
    assert ledger.entries is not None
    whole = ledger.totals()
    answered = [entry for entry in ledger.entries if entry.status == "ok"]
    assert whole.calls == len(calls)
    assert whole.cost == sum((entry.cost or Decimal(0) for entry in answered), Decimal(0))
    assert whole.cost == sum(ledger.totals(model=model).cost for model in ("a", "b"))
    assert whole.input_tokens == sum(entry.usage.input_tokens for entry in answered)
    assert whole.unpriced == sum(entry.cost is None for entry in answered)
    assert whole.maybe_billed == len(calls) - len(answered)


def test_the_summary_reads_well() -> None:
    """What a user sees."""
    ledger = Ledger()
    assert ledger.summary() == "No calls yet."
    ledger.record(model="m", label=None, usage=MILLION, cost=Decimal("0.002"))
    ledger.record_failure(
        model="m",
        label=None,
        usage=Usage(),
        cost=Decimal("0.002"),
        billed="maybe",
        cancelled=True,
    )
    assert ledger.summary() == (
        "m: 1 answered, 1,000,000 tokens in (250,000 cached), 1,000,000 out, $0.002000; "
        "0 failed attempts, 1 cancelled, 1 of them perhaps billed (about $0.002000)"
    )


def test_memory_does_not_grow_with_calls() -> None:
    """Entries are kept only when asked for."""
    ledger = Ledger()
    for _ in range(1000):
        ledger.record(model="m", label=None, usage=Usage(), cost=None)
    assert ledger.entries is None
    assert len(ledger.parts()) == 1
    assert "no price known" in ledger.summary()
