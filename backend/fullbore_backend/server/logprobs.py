"""Log-probabilities in OpenAI's two shapes: chat's list of entries, and the older parallel lists.

Values come from the engine, under the raw distribution and finite. A token that is part of a
character has text with U+FFFD in the chat shape (its ``bytes`` say what it is), and the text
``bytes:\\xNN`` in the older one, so that two such tokens stay apart.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..request import TokenLogprobs
from ..tokenizer import Tokenizer


def chat_logprobs(entries: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, object]:
    """The ``logprobs`` object of a chat choice."""
    content = []
    for entry in entries:
        shown = _chat_entry(entry.token_id, entry.logprob, tokenizer)
        shown["top_logprobs"] = [_chat_entry(*pair, tokenizer) for pair in entry.top]
        content.append(shown)
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, object]:
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": logprob,
        "bytes": list(data),
    }


class CompletionLogprobs:
    """The ``logprobs`` objects of one completion choice; it counts the text offset as it goes.

    Offsets are in characters of the output; a token that continues a character has the offset of
    the next one.
    """

    __slots__ = ("_offset", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def take(self, entries: Iterable[TokenLogprobs]) -> dict[str, object]:
        """The object for the next tokens."""
        tokens: list[str] = []
        values: list[float] = []
        top: list[dict[str, float]] = []
        offsets: list[int] = []
        for entry in entries:
            data = self._tokenizer.token_bytes(entry.token_id)
            tokens.append(_legacy_text(data))
            values.append(entry.logprob)
            # Different ids may share a text: the likeliest stands for it.
            alternatives: dict[str, float] = {}
            for token_id, logprob in entry.top:
                text = _legacy_text(self._tokenizer.token_bytes(token_id))
                alternatives.setdefault(text, logprob)
            top.append(alternatives)
            offsets.append(self._offset)
            self._offset += sum(byte & 0xC0 != 0x80 for byte in data)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _legacy_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
