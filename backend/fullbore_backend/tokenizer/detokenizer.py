"""Token ids to text as they come, in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .vocabulary import Vocabulary

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of a growing sequence; control tokens leave no trace in it.

    It holds back only the bytes of a character whose end has not come yet: three at most. So the
    work per token does not depend on the length of the text. Everything pushed and flushed equals
    the text of the whole sequence decoded at once.
    """

    __slots__ = ("_at_start", "_decoder", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Begin an empty text."""
        self._vocabulary = vocabulary
        self._decoder = _UTF8("replace")
        self._at_start = vocabulary.strips_blank

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the characters that they complete, often none."""
        special, bytes_of = self._vocabulary.special_ids, self._vocabulary.bytes_of
        data = b"".join([bytes_of(token) for token in token_ids if token not in special])
        return self._decode(data, final=False)

    def flush(self) -> str:
        """End the text; a character that stayed incomplete becomes U+FFFD."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        return text
