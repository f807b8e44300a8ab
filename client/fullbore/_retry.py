"""When to try again: a pure function of what went wrong, how often, and how much time is left.

Owns the delay policy. Sleeps nowhere, sends nothing; ``transport.headers`` reads ``Retry-After``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .errors import (
    ConfigError,
    ConnectionLostError,
    RateLimitError,
    RequestError,
    RetryAfterTooLongError,
    StatusError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How failed requests are tried again: exponential back-off with full jitter.

    :param attempts: the most attempts at one request, the first included; 1 never retries.
    :param base: ceiling of the first delay, in seconds; each further ceiling doubles.
    :param cap: the greatest ceiling, in seconds. A ``Retry-After`` may ask for more.
    :param within: seconds from the first sending after which no further attempt starts.
    :param partial: also retry an answer that broke after some text had arrived. Only where none
        of it was handed out (``map``, ``complete``); the broken attempt may be billed.

    The jitter is "full jitter" (M. Brooker, "Exponential Backoff And Jitter", AWS, 2015).
    """

    attempts: int = 5
    base: float = 0.5
    cap: float = 30.0
    within: float = 600.0
    partial: bool = True

    def validate(self) -> None:
        """Check the values.

        :raises ConfigError: naming the field, its value and what is allowed.
        """
        if self.attempts < 1:
            raise ConfigError(f"Retry.attempts is {self.attempts}; it must be at least 1.")
        for name in ("base", "cap", "within"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"Retry.{name} is {value} s; it cannot be negative.")

    def decide(
        self,
        error: RequestError,
        *,
        attempt: int,
        elapsed: float,
        remaining: float | None,
        rng: random.Random,
    ) -> float | RequestError:
        """Return the seconds to wait before the next attempt, or the error to end with.

        :param attempt: attempts made so far, at least 1.
        :param elapsed: seconds since the first attempt was sent.
        :param remaining: seconds until the request's total time is over; ``None`` if unlimited.
        """
        if not error.retryable or attempt >= self.attempts:
            return error
        if error.partial and not self.partial:
            return error
        left = self.within - elapsed
        if remaining is not None:
            left = min(left, remaining)
        asked = error.retry_after if isinstance(error, StatusError) else None
        if asked is not None:
            if asked >= left:
                return _too_long(error, asked, left)
            # Everyone was told the same moment: spread out a little behind it.
            return min(asked + rng.uniform(0, min(1.0, 0.1 * asked)), left)
        if attempt == 1 and isinstance(error, ConnectionLostError) and not error.answered:
            # The server closed an idle connection just as it was picked: a fresh one will do.
            delay = 0.0
        else:
            delay = rng.uniform(0, min(self.cap, self.base * 2.0 ** (attempt - 1)))
        return delay if delay < left else error


def _too_long(error: RequestError, asked: float, left: float) -> RequestError:
    assert isinstance(error, StatusError)
    message = (
        f"{error} It asks to wait {asked:g} s, but this request has only {max(left, 0):.0f} s left "
        "(Timeouts.total and Retry.within): not waited for. Raise them, or lower the load."
    )
    if not isinstance(error, RateLimitError):
        error.args = (message,)
        return error
    return RetryAfterTooLongError(
        message,
        status=error.status,
        code=error.code,
        type=error.type,
        param=error.param,
        body=error.body,
        request_id=error.request_id,
        retry_after=asked,
    )
