"""The incremental detokenizer: whole characters, nothing lost, nothing doubled."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbore_backend.tokenizer import Tokenizer

SPLIT_POINTS = st.lists(st.integers(0, 200), max_size=20)

# The model's vocabulary lacks a token for some bytes: it cannot spell these characters.
WITHOUT_TOKEN = "\x04\x06\x13\x14\x16\x1d"
SPELLABLE = st.characters(
    exclude_categories=["Cs"], exclude_characters=WITHOUT_TOKEN, max_codepoint=0x3FFFF
)


def pushed(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """The texts that come out when the ids go in cut at these places."""
    detokenizer = tokenizer.detokenizer()
    bounds = [0, *sorted({cut for cut in cuts if cut < len(ids)}), len(ids)]
    texts = [detokenizer.push(ids[start:stop]) for start, stop in itertools.pairwise(bounds)]
    return [*texts, detokenizer.flush()]


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, 49151), max_size=60), cuts=SPLIT_POINTS)
def test_random_tokens_join_to_the_whole_decoded_text(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    """Random ids are mostly invalid UTF-8: replaced exactly as Python replaces the whole."""
    expected = b"".join(tokenizer.token_bytes(i) for i in ids if i > 16).decode("utf-8", "replace")
    assert "".join(pushed(tokenizer, ids, cuts)) == expected == tokenizer.decode(ids)


@settings(deadline=None, max_examples=300)
@given(text=st.text(SPELLABLE, max_size=60), cuts=SPLIT_POINTS)
def test_text_never_gains_a_replacement_character(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    """Wherever characters are split between tokens and pushes."""
    ids = tokenizer.encode(text)
    texts = pushed(tokenizer, ids, cuts)
    assert "".join(texts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in texts)
    assert texts[-1] == ""


@pytest.mark.parametrize("emoji", ["🙂", "👩‍👩‍👧‍👦", "𠮷野家"], ids=["one", "joined", "rare CJK"])
def test_characters_come_as_soon_as_they_are_whole(tokenizer: Tokenizer, emoji: str) -> None:
    """One token at a time: what has come is always all the whole characters so far."""
    detokenizer, seen, data = tokenizer.detokenizer(), "", b""
    for token in tokenizer.encode(emoji):
        data += tokenizer.token_bytes(token)
        seen += detokenizer.push([token])
        assert seen == data.decode("utf-8", "ignore")
    assert seen == emoji


def test_an_unfinished_character_is_replaced_once_at_the_end(tokenizer: Tokenizer) -> None:
    """It appears only when nothing can complete it any more."""
    first = tokenizer.encode("🙂")[:1]
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(first) == ""
    assert detokenizer.flush() == "\ufffd"


def test_control_tokens_leave_no_trace(tokenizer: Tokenizer) -> None:
    """Not even between the halves of a character."""
    half, rest = (ids := tokenizer.encode("🙂"))[:1], ids[1:]
    end = tokenizer.encode("<|im_end|>", parse_special=True)
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push([*half, *end]) == ""
    assert detokenizer.push([*rest, *end]) == "🙂"
    assert tokenizer.decode([*half, *end, *rest]) == "🙂"


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer) -> None:
    """Bytes per token, as log-probabilities report them."""
    text = "naïve 🙂 text\x00" + "".join(random.Random(1).choices("aé🙂 \n", k=50))
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
