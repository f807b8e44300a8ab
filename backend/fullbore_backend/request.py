"""What a caller asks of the engine, and what comes back: plain values, no torch, no I/O.

Owns the sampling parameters and their ranges, the token-level outputs and the text-level deltas.
It does not know how a request is scheduled (:mod:`fullbore_backend.scheduler`) or spoken over HTTP
(:mod:`fullbore_backend.server`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .errors import InvalidRequestError

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""Why a request ended. ``stop``: an end token, a stop id or a stop string. ``length``:
``max_tokens`` or the context limit. ``cancelled``: the caller left. ``error``: the step that
carried it raised.
"""

MAX_LOGPROBS = 20
"""The most alternatives a token may list (OpenAI's limit for ``top_logprobs``)."""

MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Defaults follow OpenAI's API: temperature 1, everything else off.

    :param max_tokens: the most tokens to generate; ``None`` means up to the context limit.
    :param min_tokens: end tokens, stop ids and stop strings are ignored before this many tokens.
    :param temperature: 0 is greedy; otherwise logits are divided by it. Range [0, 2].
    :param top_p: nucleus sampling, the smallest set with this much probability. Range (0, 1].
    :param top_k: keep the k likeliest tokens; 0 keeps all.
    :param min_p: drop tokens less likely than this share of the likeliest. Range [0, 1].
    :param seed: makes the sampled tokens reproducible; ``None`` takes a fresh one.
    :param stop: strings that end the text; none of a match is ever emitted.
    :param stop_token_ids: ids that end the output, on top of the model's end tokens.
    :param ignore_eos: go on after an end token.
    :param presence_penalty: subtracted once from the logit of each generated token. Range [-2, 2].
    :param frequency_penalty: subtracted per occurrence in the output. Range [-2, 2].
    :param repetition_penalty: logits of tokens in prompt or output are divided by it when positive,
        multiplied when negative (Keskar et al., CTRL, 2019). Range (0, 10]; 1 is off.
    :param logit_bias: added to the logits of these ids before sampling. Range [-100, 100].
    :param logprobs: report each token's log-probability under the raw distribution (before
        temperature, penalties and bias) and this many of the likeliest; ``None`` reports none.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def validate(self, *, vocab_size: int) -> None:
        """Check every range.

        :raises InvalidRequestError: naming the field, its value and the allowed range.
        """
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._validate_stops(vocab_size)
        self._validate_bias(vocab_size)

    def _validate_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed.",
                param="stop",
            )
        stops: tuple[object, ...] = self.stop
        for text in stops:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(
                    f"stop holds {text!r}; each must be a non-empty string.", param="stop"
                )
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, vocab_size - 1)

    def _validate_bias(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} "
                "are allowed.",
                param="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, 0, vocab_size - 1)
            _check_range("logit_bias", bias, -100.0, 100.0)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one generated token, and the likeliest alternatives.

    ``top`` holds (token id, log-probability) pairs, likeliest first; values are finite.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a request gained since the last delta.

    ``text`` holds whole characters only and none of a stop string, so it may lag ``token_ids``.
    ``finish_reason`` is ``None`` until the last delta. ``num_generated`` and ``num_cached`` (prompt
    tokens served by the prefix cache) are totals so far. ``stop_reason`` is the stop string or stop
    token id that ended it, if one did. ``error`` is set with the finish reason ``error``.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_generated: int
    num_cached: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request: the whole of what its deltas said."""

    text: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_cached: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    stop_reason: str | int | None = None


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} is {value!r}; it must be an integer.", param=name)
    if not low <= value <= high:
        raise InvalidRequestError(
            f"{name} is {value}; it must be between {low} and {high}.", param=name
        )


def _check_range(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} is {value!r}; it must be a finite number.", param=name)
    below = value <= low if open_low else value < low
    if below or value > high:
        bracket = "(" if open_low else "["
        raise InvalidRequestError(
            f"{name} is {value}; it must be in {bracket}{low:g}, {high:g}].", param=name
        )
