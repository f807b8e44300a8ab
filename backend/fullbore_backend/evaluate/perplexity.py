"""Perplexity of a text by strided windows, as lm-evaluation-harness computes it for `wikitext`.

A text longer than the model's window is cut into windows that overlap, and each token is scored
once, in the first window that has it. Every token but the first window's then has at least
``window - stride`` tokens of context, at a cost of ``window / stride`` times the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .scoring import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """What a text's log-likelihood says, for texts of different tokenizers too.

    :param loglikelihood: natural logarithm, of all tokens.
    :param tokens: that were scored; words are separated by blanks, bytes are UTF-8's.
    """

    loglikelihood: float
    tokens: int
    words: int
    bytes: int

    @property
    def per_token(self) -> float:
        """The usual one; compare it between models of one tokenizer alone."""
        return math.exp(-self.loglikelihood / self.tokens)

    @property
    def per_word(self) -> float:
        """``word_perplexity`` of lm-evaluation-harness."""
        return math.exp(-self.loglikelihood / self.words)

    @property
    def bits_per_byte(self) -> float:
        """``bits_per_byte`` of lm-evaluation-harness."""
        return -self.loglikelihood / math.log(2) / self.bytes


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens ``begin`` to ``end`` of a text, of which those from ``score_from`` on are scored."""

    begin: int
    end: int
    score_from: int


def windows(length: int, *, window: int, stride: int) -> Iterator[Window]:
    """Cover ``length`` tokens; the first of them is context alone.

    :param window: tokens a window has, context included.
    :param stride: tokens that each window after the first scores, at most ``window - 1``.
    :raises ConfigError: the sizes cannot be.
    """
    if not window >= 2 or not 1 <= stride < window:
        raise ConfigError(
            f"windows of {window} tokens by strides of {stride}: a stride is at least 1, and below "
            "the window, which needs a token of context."
        )
    scored = min(window, length)
    if length > 1:
        yield Window(0, scored, 1)
    while scored < length:
        end = min(scored + stride, length)
        yield Window(max(0, end - window), end, scored)
        scored = end


def perplexity(
    scorer: Scorer,
    text: str,
    token_ids: Sequence[int],
    *,
    prefix: int,
    window: int,
    stride: int,
) -> Perplexity:
    """Score a text.

    :param token_ids: the text's.
    :param prefix: a token put before the first, so that it is scored too: the end of a text, as
        lm-evaluation-harness does.
    """
    ids = [prefix, *token_ids]
    total = 0.0
    for each in windows(len(ids), window=window, stride=stride):
        part = ids[each.begin : each.end]
        total += math.fsum(scorer.logprobs(part, each.score_from - each.begin))
    return Perplexity(
        loglikelihood=total,
        tokens=len(token_ids),
        words=len(text.split()),
        bytes=len(text.encode()),
    )
