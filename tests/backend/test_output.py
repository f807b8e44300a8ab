"""Stop strings: none of a match is released, and no more is held back than could be one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullbore_backend.output import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher, out = StopMatcher(stops), ""
    for piece in pieces:
        released, found = matcher.push(piece)
        out += released
        if found is not None:
            return out, found
    return out + matcher.flush(), None


def truth(stops: list[str], text: str) -> tuple[str, str | None]:
    """The earliest match to *complete* ends a stream; of those, the one that begins first."""
    for end in range(len(text) + 1):
        found = [(text[:end].find(stop), i) for i, stop in enumerate(stops) if stop in text[:end]]
        if found:
            at, index = min(found)
            return text[:at], stops[index]
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.text("ab", max_size=30),
)
def test_letter_by_letter_equals_the_definition(stops: list[str], text: str) -> None:
    assert run(stops, list(text)) == truth(stops, text)


@given(
    st.text("abc", min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=10),
)
def test_one_stop_is_found_however_the_text_is_split(stop: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    at = text.find(stop)
    assert run([stop], pieces) == ((text[:at], stop) if at >= 0 else (text, None))


@pytest.mark.parametrize(
    ("text", "released"),
    [("hello", "hello"), ("hello <", "hello "), ("hello <|e", "hello "), ("a <b", "a <b")],
)
def test_only_a_real_partial_match_is_held(text: str, released: str) -> None:
    assert StopMatcher(["<|end|>"]).push(text) == (released, None)


def test_held_text_is_released_when_the_match_fails() -> None:
    matcher = StopMatcher(["<|end|>"])
    assert matcher.push("x<|en") == ("x", None)
    assert matcher.push("ough") == ("<|enough", None)
