"""Hedging: a second try at a request whose first token is late, and a bound on how often.

Owns when a hedge may start. Sends nothing: see ``_attempt``. The idea, and the rule that a hedge
waits for a high quantile of the usual time, are from J. Dean and L. A. Barroso, "The Tail at Scale"
(2013).
"""

from __future__ import annotations

from dataclasses import dataclass

from ._stats import Quantiles
from .errors import ConfigError

LEAST_SAMPLES = 20
"""First tokens that must have been seen before a quantile of them means anything."""
_REFRESH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Hedge:
    """Send a streamed request a second time when its first token is late; take the first to come.

    The loser is cut off, at the server too. Both are on the ledger, the loser as cancelled and
    perhaps billed. A hedge needs a permit of its own and is not sent if the limiter has none free.

    :param after: seconds without a first token; give either this or ``quantile``.
    :param quantile: the same as a quantile (0 to 1) of the times to first token seen so far. No
        hedge is sent before 20 of them have been seen.
    :param at_most: hedges per request sent, at any time.
    :raises ConfigError: a value that cannot work.
    """

    after: float | None = None
    quantile: float | None = None
    at_most: float = 0.05

    def __post_init__(self) -> None:
        if (self.after is None) == (self.quantile is None):
            raise ConfigError(
                "Hedge needs either after=… (seconds) or quantile=… (such as 0.95), and not both."
            )
        if self.after is not None and self.after <= 0:
            raise ConfigError(f"Hedge.after is {self.after} s; it must be above 0.")
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise ConfigError(f"Hedge.quantile is {self.quantile}; it must be between 0 and 1.")
        if not 0 < self.at_most <= 1:
            raise ConfigError(f"Hedge.at_most is {self.at_most}; it must be above 0 and at most 1.")


class Hedging:
    """What one client knows for its hedges.

    :ivar requests: streamed requests sent, hedges not counted.
    :ivar hedges: hedges sent.
    """

    def __init__(self, hedge: Hedge) -> None:
        self._hedge = hedge
        self._seen = Quantiles()
        self._delay: float | None = hedge.after
        self.requests = 0
        self.hedges = 0

    def begin(self) -> float | None:
        """Count a request; return the seconds after which to hedge it, ``None`` for never."""
        self.requests += 1
        return self._delay

    def saw(self, first_token: float) -> None:
        """Learn from a first token that came after that many seconds."""
        if self._hedge.quantile is None:
            return
        self._seen.add(first_token)
        if self._seen.count >= LEAST_SAMPLES and self._seen.count % _REFRESH == 0:
            self._delay = self._seen.quantile(self._hedge.quantile)

    def may_start(self) -> bool:
        """Whether one more keeps within ``at_most``."""
        return self.hedges + 1 <= self._hedge.at_most * self.requests
