"""Why an adaptive limit moved: the events that progress and logs show.

Owns the vocabulary. Knows nothing of how a move is decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal[
    "slow_start",
    "throughput_rises",
    "endpoint_full",
    "probe_up",
    "probe_down",
    "overloaded",
    "probe_ceiling",
    "ceiling_rose",
    "endpoint_changed",
    "failures",
]
"""Why the limit moved.

- `slow_start`: the first requests were answered; one doubling before anything is known.
- `throughput_rises`: no sign that the endpoint is full; more in flight gives more throughput.
- `endpoint_full`: beyond the new limit requests would only queue.
- `probe_up`, `probe_down`: a look at a neighbouring limit, because what is known of it is little
  or old.
- `overloaded`: 429 or 503; the endpoint accepts no more than the new limit.
- `probe_ceiling`: a few requests more than were once refused, to see whether that still holds.
- `ceiling_rose`: they were accepted, so a few more again.
- `endpoint_changed`: latency contradicts what was measured before; that is forgotten.
- `failures`: most requests failed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One change of the limit.

    Attributes:
        reason: Why; see `Reason`.
        old: The limit before.
        new: The limit to come: at once if lower, by a few for each answer if higher.
        detail: The numbers behind it, as a sentence for people.
        at: The limiter's clock, in seconds.
    """

    reason: Reason
    old: int
    new: int
    detail: str
    at: float
