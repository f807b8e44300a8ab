"""What response headers ask for."""

from __future__ import annotations

import email.utils
from collections.abc import Mapping


def retry_after(headers: Mapping[str, str], *, now: float) -> float | None:
    """Read the seconds to wait from response headers, ``None`` if they ask for none.

    ``retry-after-ms`` (milliseconds) wins over ``Retry-After`` (RFC 9110, section 10.2.3:
    seconds or an HTTP date). A date is taken against the response's own ``Date``, so that the
    two clocks need not agree, or else against ``now``, in seconds since 1970.
    """
    millis = _number(headers.get("retry-after-ms"))
    if millis is not None:
        return millis / 1000.0
    value = headers.get("retry-after")
    if value is None:
        return None
    seconds = _number(value)
    if seconds is not None:
        return seconds
    until = _date(value)
    if until is None:
        return None
    sent = _date(headers.get("date", ""))
    return max(0.0, until - (now if sent is None else sent))


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


def _date(text: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
