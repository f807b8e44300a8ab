"""Token ids to text: whole characters only, and nothing of a stop string.

Knows nothing of scheduling: it is told tokens, and answers with text and whether the text ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import Detokenizer


class StopMatcher:
    """Finds the first of several strings in a text that arrives in pieces.

    Text is released as soon as it cannot be part of a match: only a tail that begins a stop string
    is held back. Work is linear in the text: each piece is searched together with the held tail
    alone.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take a piece; returns what can be released, and the stop string found, if any.

        When two match, the one that begins first wins; at the same place, the one listed first.
        """
        text = self._held + text
        found = min(
            ((at, index) for index, stop in enumerate(self._stops) if (at := text.find(stop)) >= 0),
            default=None,
        )
        if found is not None:
            self._held = ""
            return text[: found[0]], self._stops[found[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The held tail: the text ended, so it begins no stop string."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """The text of one request's output as its tokens arrive.

    :param min_tokens: stop strings are looked for only in text of the tokens after this many.
    """

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_num_tokens")

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Take a token; returns new text, and the stop string that ended it, if one did."""
        self._num_tokens += 1
        text = self._detokenizer.push((token_id,))
        if self._matcher is None or self._num_tokens <= self._min_tokens:
            return text, None
        return self._matcher.push(text) if text else ("", None)

    def flush(self) -> tuple[str, str | None]:
        """What was held back when the tokens ended; it may complete a stop string."""
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text, None
        released, stop = self._matcher.push(text)
        return released if stop else released + self._matcher.flush(), stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
