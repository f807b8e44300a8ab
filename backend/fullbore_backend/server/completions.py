"""``/v1/completions``: what its requests hold, and the shapes of its responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import InvalidRequestError
from ..request import Delta
from ..tokenizer import Tokenizer
from .fields import Fields, is_token_ids
from .logprobs import CompletionLogprobs
from .sse import Frame, json_text
from .wire import Choice, Head, Settings, Usage, read_logprobs_count, read_max_tokens, read_settings

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Prompts to continue, each a text or token ids."""

    settings: Settings
    prompts: Sequence[str | list[int]]

    def encode(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The token ids of each prompt; ids are taken as they are."""
        return [
            tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
            for prompt in self.prompts
        ]

    def events(self, head: Head, tokenizer: Tokenizer) -> CompletionEvents:
        """The writer of the streamed response."""
        return CompletionEvents(head, tokenizer, usage_asked=self.settings.include_usage)

    def reply(
        self, head: Head, choices: Sequence[Choice], usage: Usage, tokenizer: Tokenizer
    ) -> bytes:
        """The ``text_completion`` object; choices of the first prompt come first."""
        asked = self.settings.params.logprobs is not None
        return msgspec.json.encode(
            {
                "id": head.id,
                "object": "text_completion",
                "created": head.created,
                "model": head.model,
                "system_fingerprint": head.fingerprint,
                "choices": [
                    {
                        "index": index,
                        "text": choice.text,
                        "logprobs": CompletionLogprobs(tokenizer).take(choice.logprobs)
                        if asked
                        else None,
                        "finish_reason": choice.finish_reason,
                        "stop_reason": choice.stop_reason,
                    }
                    for index, choice in enumerate(choices)
                ],
                "usage": usage.to_json(),
            }
        )


class CompletionEvents:
    """The events of a streamed completion."""

    __slots__ = ("_frame", "_logprobs", "_tokenizer")

    def __init__(self, head: Head, tokenizer: Tokenizer, *, usage_asked: bool) -> None:
        self._frame = Frame(head, "text_completion", usage_asked=usage_asked)
        self._tokenizer = tokenizer
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def first(self, index: int) -> bytes:
        """Nothing: a completion has no role to announce."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """New text; with the last of it, the finish reason."""
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return b""
        logprobs = b"null"
        if delta.logprobs:
            writer = self._logprobs.setdefault(index, CompletionLogprobs(self._tokenizer))
            logprobs = json_text(writer.take(delta.logprobs))
        return self._frame.choice(
            index,
            b'"text":' + json_text(delta.text),
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def usage(self, usage: Usage) -> bytes:
        """The last event."""
        return self._frame.usage(usage)


def read_completion(fields: Fields) -> CompletionRequest:
    """Understand a request body.

    :raises InvalidRequestError: naming the field at fault.
    """
    prompts = _prompts(fields)
    max_tokens = read_max_tokens(fields, "max_tokens")
    settings = read_settings(
        fields,
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        logprobs=read_logprobs_count(fields, "logprobs"),
    )
    fields.only("echo", False)
    fields.only("suffix", "")
    fields.only("best_of", settings.n)  # the best n of n: all of them
    fields.done()
    return CompletionRequest(settings=settings, prompts=prompts)


def _prompts(fields: Fields) -> list[str | list[int]]:
    """A string, token ids, or a list of either; never empty, nor a list of both kinds."""
    given: Any = fields.take("prompt")
    prompts: list[Any]
    if isinstance(given, str) or (given and is_token_ids(given)):
        prompts = [given]
    elif isinstance(given, list) and given and _alike(given):
        prompts = given
    else:
        raise fields.refuse(
            "prompt", given, "a string, a list of strings, a list of token ids, or a list of those"
        )
    for index, prompt in enumerate(prompts):
        if not prompt:
            where = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            raise InvalidRequestError(
                f"{where} is empty; it must hold at least one token.", param="prompt"
            )
    return prompts


def _alike(items: list[Any]) -> bool:
    return all(isinstance(item, str) for item in items) or all(map(is_token_ids, items))
