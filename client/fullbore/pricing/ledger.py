"""What has been spent: totals per model and label, equal to the sum of their calls to the digit.

Memory does not grow with the number of calls, unless the calls themselves are to be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from .._types import Usage


@dataclass(slots=True)
class Totals:
    """Sums over calls. Costs are US dollars.

    :ivar calls: everything recorded: ``ok`` + ``failed`` + ``cancelled``.
    :ivar ok: those answered in full; the tokens and ``cost`` are theirs alone.
    :ivar failed: attempts that failed; a call that was retried counts here once a failure.
    :ivar cancelled: attempts that were cut off on our side.
    :ivar unpriced: answered calls whose plan has no price.
    :ivar estimated: answered calls whose tokens are guesses.
    :ivar clamped: answered calls whose reported tokens did not add up.
    :ivar maybe_billed: failed and cancelled attempts that the endpoint may charge for;
        ``maybe_cost`` is what they would cost, guessed from what was sent and received.
    """

    calls: int = 0
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cost: Decimal = field(default_factory=Decimal)
    unpriced: int = 0
    estimated: int = 0
    clamped: int = 0
    maybe_billed: int = 0
    maybe_cost: Decimal = field(default_factory=Decimal)

    def add(self, other: Totals) -> None:
        """Add another's sums to these."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One call or failed attempt, as it was recorded."""

    model: str
    label: str | None
    status: Literal["ok", "failed", "cancelled"]
    usage: Usage
    cost: Decimal | None
    billed: Literal["yes", "no", "maybe"] = "yes"


class Ledger:
    """Live totals of one client's calls.

    :param keep_entries: also keep every entry, in ``entries``; memory then grows with the calls.
    """

    def __init__(self, *, keep_entries: bool = False) -> None:
        self.entries: list[Entry] | None = [] if keep_entries else None
        self._totals: dict[tuple[str, str | None], Totals] = {}

    def record(self, *, model: str, label: str | None, usage: Usage, cost: Decimal | None) -> None:
        """File one answered call."""
        totals = self._totals_of(model, label)
        totals.calls += 1
        totals.ok += 1
        totals.input_tokens += usage.input_tokens
        totals.cached_tokens += usage.cached_tokens
        totals.cache_write_tokens += usage.cache_write_tokens
        totals.output_tokens += usage.output_tokens
        totals.reasoning_tokens += usage.reasoning_tokens
        totals.estimated += usage.estimated
        totals.clamped += usage.clamped
        if cost is None:
            totals.unpriced += 1
        else:
            totals.cost += cost
        if self.entries is not None:
            self.entries.append(
                Entry(model=model, label=label, status="ok", usage=usage, cost=cost)
            )

    def record_failure(
        self,
        *,
        model: str,
        label: str | None,
        usage: Usage,
        cost: Decimal | None,
        billed: Literal["yes", "no", "maybe"],
        cancelled: bool,
    ) -> None:
        """File one attempt that failed or was cut off, apart from the calls that count.

        :param usage: what it is thought to have used, if it may be billed.
        """
        totals = self._totals_of(model, label)
        totals.calls += 1
        if cancelled:
            totals.cancelled += 1
        else:
            totals.failed += 1
        if billed != "no":
            totals.maybe_billed += 1
            totals.maybe_cost += cost or 0
        if self.entries is not None:
            self.entries.append(
                Entry(
                    model=model,
                    label=label,
                    status="cancelled" if cancelled else "failed",
                    usage=usage,
                    cost=cost,
                    billed=billed,
                )
            )

    def _totals_of(self, model: str, label: str | None) -> Totals:
        key = (model, label)
        totals = self._totals.get(key)
        if totals is None:
            totals = self._totals[key] = Totals()
        return totals

    def totals(self, *, model: str | None = None, label: str | None = None) -> Totals:
        """Return the sums of one model or label, or of everything."""
        sums = Totals()
        for (of_model, of_label), part in self._totals.items():
            if model in (None, of_model) and label in (None, of_label):
                sums.add(part)
        return sums

    def parts(self) -> Mapping[tuple[str, str | None], Totals]:
        """Return the sums by model and label; do not change them."""
        return self._totals

    @property
    def cost(self) -> Decimal:
        """Dollars spent on answered calls."""
        return sum((part.cost for part in self._totals.values()), Decimal(0))

    def summary(self) -> str:
        """Return a few lines of text: what was called, and what it cost."""
        if not self._totals:
            return "No calls yet."
        lines = [
            _line(model if label is None else f"{model} [{label}]", part)
            for (model, label), part in sorted(
                self._totals.items(), key=lambda item: (item[0][0], item[0][1] or "")
            )
        ]
        if len(lines) > 1:
            lines.append(_line("total", self.totals()))
        return "\n".join(lines)


def _line(name: str, part: Totals) -> str:
    text = (
        f"{name}: {part.ok:,} answered, {part.input_tokens:,} tokens in "
        f"({part.cached_tokens:,} cached), {part.output_tokens:,} out, {_dollars(part)}"
    )
    if part.failed or part.cancelled:
        text += f"; {part.failed:,} failed attempts, {part.cancelled:,} cancelled"
    if part.maybe_billed:
        text += f", {part.maybe_billed:,} of them perhaps billed (about ${part.maybe_cost:.6f})"
    for count, what in (
        (part.estimated, "with estimated tokens"),
        (part.clamped, "with token counts that did not add up"),
    ):
        if count:
            text += f"; {count:,} {what}"
    return text


def _dollars(part: Totals) -> str:
    if part.ok and part.unpriced == part.ok:
        return "no price known"
    text = f"${part.cost:.6f}"
    return f"{text} + {part.unpriced:,} calls without a price" if part.unpriced else text
