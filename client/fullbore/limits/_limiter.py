"""What a limiter is: the words the rest of the client speaks to it in.

Owns the protocol (`Limiter`, `Permit`) and the report a caller hands back (`Outcome`). Knows
nothing of how a limit is chosen, of HTTP, or of retries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

OutcomeKind = Literal["ok", "overloaded", "failed", "cancelled"]
"""`ok`: answered. `overloaded`: 429 or 503, the endpoint asks for less. `failed`: any other error.
`cancelled`: the caller gave up, which says nothing about the endpoint."""

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one attempt ended, as far as limits care.

    Attributes:
        kind: See `OutcomeKind`.
        total: Seconds from sending the request to its end.
        first_token: Seconds from sending to the first token, if one arrived.
        output_tokens: Tokens generated; 0 when unknown.
        input_tokens: Tokens of the prompt; 0 when unknown.
        retry_after: Seconds the endpoint asked to wait, from `Retry-After`.
        headers: Response headers with lower-case names; rate-limit headers are read.
    """

    kind: OutcomeKind
    total: float
    first_token: float | None = None
    output_tokens: int = 0
    input_tokens: int = 0
    retry_after: float | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: _NO_HEADERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """How long the pace keeps a request from being sent, and what sets that pace.

    Attributes:
        seconds: 0 when it may be sent at once, as far as the pace goes.
        quota: Such as `1000 requests a day`; empty when `seconds` is 0.
    """

    seconds: float = 0.0
    quota: str = ""


NO_WAIT = Wait()


class Permit(Protocol):
    """The right to have one request in flight; held from `acquire` to `release`."""

    @property
    def waited(self) -> float:
        """Seconds spent waiting for this permit."""
        ...

    def release(self, outcome: Outcome) -> None:
        """Give the permit back with a report. Synchronous; call it exactly once."""
        ...


class Limiter(Protocol):
    """Decides when the next request may be sent to one endpoint. One event loop uses it."""

    async def acquire(self, *, flow: object, tokens: int = 0) -> Permit:
        """Wait for a permit.

        Args:
            flow: Who asks; one hashable object for each `map` call. Flows take turns; within
                one flow, permits are given in order of asking.
            tokens: Estimate of the tokens (prompt and answer) that the request will be charged.

        A cancelled call leaks no permit and loses nobody's turn.
        """
        ...

    @property
    def in_flight(self) -> int:
        """Permits held now."""
        ...

    @property
    def limit(self) -> int:
        """The most permits that may be held now; it may be below `in_flight` after a decrease."""
        ...

    def headroom(self) -> int:
        """How many more `acquire` calls would be answered at once."""
        ...

    def pace(self, *, tokens: int = 0) -> Wait:
        """How long quotas alone would keep a request of that size from being sent now.

        A daily quota that is used up shows here, before anybody waits for hours.
        """
        ...
