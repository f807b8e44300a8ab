"""The request fields that both generating endpoints share: JSON in, plain values out.

Owns the names on the wire, the ranges the engine does not check, and the fields that are refused
unless they ask for nothing. What only chat or only completions know is in :mod:`.chat` and
:mod:`.completions`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..errors import InvalidRequestError
from ..request import MAX_LOGPROBS, Delta, SamplingParams, TokenLogprobs
from ..tokenizer import Tokenizer
from .fields import Fields

MAX_N = 128
"""The most choices a prompt may ask for (OpenAI's limit)."""

MAX_TOKENS = 2**31 - 1

_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a request asks for beside its prompt."""

    model: str
    params: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    cache_salt: str | None
    priority: int

    def params_of(self, choice: int) -> SamplingParams:
        """The parameters of one of a prompt's ``n`` choices.

        A seed makes all of them reproducible, and each a different one.
        """
        seed = self.params.seed
        if seed is None or choice == 0:
            return self.params
        return replace(self.params, seed=(seed + choice + 2**63) % 2**64 - 2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every object of one response repeats. ``created`` is in seconds since the epoch."""

    id: str
    created: int
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request; ``cached`` of the prompt's were served by the prefix cache."""

    prompt: int
    completion: int
    cached: int

    def to_json(self) -> dict[str, object]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished choice."""

    text: str
    finish_reason: str
    stop_reason: str | int | None
    logprobs: Sequence[TokenLogprobs]


class Events(Protocol):
    """The server-sent events of one streamed response."""

    def first(self, index: int) -> bytes:
        """What opens a choice; may be empty."""

    def delta(self, index: int, delta: Delta) -> bytes:
        """The event for a delta; empty if there is nothing to tell."""

    def usage(self, usage: Usage) -> bytes:
        """The last event, with no choices."""


class GenerationRequest(Protocol):
    """A request of either endpoint, understood."""

    @property
    def settings(self) -> Settings:
        """What it asks for beside its prompt."""

    def encode(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The token ids of each prompt."""

    def events(self, head: Head, tokenizer: Tokenizer) -> Events:
        """The writer of the streamed response."""

    def reply(
        self, head: Head, choices: Sequence[Choice], usage: Usage, tokenizer: Tokenizer
    ) -> bytes:
        """The whole response, as JSON."""


def read_settings(fields: Fields, *, max_tokens: int | None, logprobs: int | None) -> Settings:
    """Read the shared fields.

    :param max_tokens: as the endpoint read it, or its default.
    :param logprobs: as the endpoint read it.
    :raises InvalidRequestError: naming the field.
    """
    model = fields.string("model")
    if not model:
        raise InvalidRequestError(
            "model is missing; name the model to use (GET /v1/models lists it).", param="model"
        )
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=fields.integer("min_tokens", 0) or 0,
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=_top_k(fields),
        min_p=fields.number("min_p", 0.0),
        seed=fields.integer("seed"),
        stop=fields.strings("stop"),
        stop_token_ids=fields.integers("stop_token_ids"),
        ignore_eos=fields.boolean("ignore_eos"),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        logit_bias=_logit_bias(fields),
        logprobs=logprobs,
    )
    stream = fields.boolean("stream")
    n = fields.integer("n", 1, low=1, high=MAX_N)
    assert n is not None
    settings = Settings(
        model=model,
        params=params,
        n=n,
        stream=stream,
        include_usage=_include_usage(fields, stream=stream),
        cache_salt=_cache_salt(fields),
        priority=fields.integer("priority", 0) or 0,
    )
    _read_labels(fields)
    return settings


def read_max_tokens(fields: Fields, name: str) -> int | None:
    """A limit on the output, at least 1."""
    return fields.integer(name, low=1, high=MAX_TOKENS)


def read_logprobs_count(fields: Fields, name: str) -> int | None:
    """How many of the likeliest tokens to list."""
    return fields.integer(name, low=0, high=MAX_LOGPROBS)


def _top_k(fields: Fields) -> int:
    value = fields.integer("top_k", 0, low=-1, high=MAX_TOKENS) or 0
    return max(value, 0)  # -1 means all, as 0 does


def _logit_bias(fields: Fields) -> Mapping[int, float]:
    bias: dict[int, float] = {}
    for key, value in (fields.mapping("logit_bias") or {}).items():
        if not _TOKEN_ID.fullmatch(key):
            raise fields.refuse("logit_bias", {key: value}, "keyed by token ids in decimal digits")
        bias[int(key)] = value
    return bias


def _include_usage(fields: Fields, *, stream: bool) -> bool:
    given = fields.mapping("stream_options")
    if given is None:
        return False
    if not stream:
        raise InvalidRequestError(
            "stream_options is set, but stream is not true; leave it out, or stream.",
            param="stream_options",
        )
    options = Fields(given, where="stream_options")
    include_usage = options.boolean("include_usage")
    options.only("include_obfuscation", False)
    options.done()
    return include_usage


def _cache_salt(fields: Fields) -> str | None:
    """``prompt_cache_key`` groups requests that share a cache, which is what a salt does."""
    salts = [fields.string(name) for name in ("cache_salt", "prompt_cache_key")]
    if "" in salts:
        raise fields.refuse("cache_salt", "", "a non-empty string, and prompt_cache_key too")
    return next((salt for salt in salts if salt is not None), None)


def _read_labels(fields: Fields) -> None:
    """Fields that label a request and by their definition change nothing about the answer."""
    fields.string("user")
    fields.string("safety_identifier")
    metadata = fields.mapping("metadata") or {}
    if not all(isinstance(value, str) for value in metadata.values()):
        raise fields.refuse("metadata", metadata, "an object of strings")
    fields.only("store", False)
    fields.only("service_tier", "auto", "default")
