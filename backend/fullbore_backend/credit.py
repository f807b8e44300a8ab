"""How many more tokens each request may be given before its reader has to take some.

A window in the manner of HTTP/2 (RFC 9113, section 5.2), in tokens: generating one spends it,
reading grants it again. It does not know who generates or who reads, nor how to make either wait.
"""

from __future__ import annotations


class Credits:
    """Token credit by request id. A request that was never opened has no limit."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def open(self, request_id: str, num_tokens: int) -> None:
        """Let a new request be given this many tokens."""
        self._left[request_id] = num_tokens

    def close(self, request_id: str) -> None:
        """Forget a request, if it was opened."""
        self._left.pop(request_id, None)

    def spend(self, request_id: str, num_tokens: int) -> bool:
        """Count tokens that were generated; ``True`` if the request may be given no more."""
        left = self._left.get(request_id)
        if left is None:
            return False
        self._left[request_id] = left = left - num_tokens
        return left <= 0

    def grant(self, request_id: str, num_tokens: int) -> bool:
        """Count tokens that were read; ``True`` if the request may be given some again."""
        left = self._left.get(request_id)
        if left is None:
            return False
        self._left[request_id] = left + num_tokens
        return left <= 0 < left + num_tokens
