"""What an endpoint refuses: the number in flight above which it answers 429 or 503.

Owns the memory of refusals and the rare look above them. A refusal is followed down by not
replacing the refused requests, which for a hard limit ends exactly at it; there is nothing to
gain from a multiplicative cut, which would have to be climbed again. Knows nothing of latency.
"""

from __future__ import annotations

from typing import Literal

_STRAY = 0.02
"""Share of a round that may be refused at a proven load before the limit follows."""
_QUIET = 250
"""Answers without a refusal before one request is put above the ceiling: 0.4 % refused."""
_FIRST_QUIET = 31
"""The same for a ceiling met in fewer than `_CONFIRMED` rounds: it may have been chance."""
_CONFIRMED = 3


class Ceiling:
    """The most in flight that the endpoint accepted at the time it refused one more."""

    def __init__(self) -> None:
        self.level: int | None = None
        self._proven = 0  # the most in flight through a whole round without a refusal
        self._refused = 0  # in this round
        self._followed = False  # whether the ceiling came down in this round
        self._quiet = 0
        self._met = 0
        self._step = 1
        self._rising = False

    def accepted(self) -> None:
        """A request was answered."""
        self._quiet += 1

    def refused(self, others: int, *, limit: int, least: int, round_size: int) -> bool:
        """A request was refused with `others` in flight; False if that may have been chance."""
        self._refused += 1
        self._quiet = 0
        if others < self._proven and self._refused <= max(1, _STRAY * round_size):
            return False
        near = self.level is not None and others <= 1.1 * self.level
        if not near:
            self._met = 1
        elif not self._followed:  # what one round refuses is one meeting
            self._met += 1
        self._followed = True
        self._step = max(1, limit // 64)
        self._rising = False
        self.level = max(least, others)
        self._proven = min(self._proven, self.level)
        return True

    def raised(self, limit: int) -> Literal["ceiling_rose", "probe_ceiling"] | None:
        """Raise the ceiling if it is time to; call it when a round at the ceiling has ended.

        Returns the reason: `ceiling_rose` if the last step up was accepted for a whole round,
        `probe_ceiling` if all has been quiet for long; None if the ceiling stays.
        """
        assert self.level is not None
        if self._rising and not self._refused:
            self._met = 0  # what was refused before is accepted
            self._step *= 2
            self.level = limit + self._step
            return "ceiling_rose"
        quiet = max(limit, _FIRST_QUIET)
        if self._met >= _CONFIRMED:
            quiet = max(2 * limit, _QUIET * self._step)
        if self._quiet < quiet:
            return None
        self._rising = True
        self.level = limit + self._step
        return "probe_ceiling"

    def close_round(self, peak: int, *, bound: bool) -> None:
        """Forget the round's refusals; `peak` in flight is proven if there was none."""
        if not self._refused:
            self._proven = peak if bound else max(self._proven, peak)
        self._refused = 0
        self._followed = False
