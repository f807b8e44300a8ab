"""``/v1/chat/completions``: what its requests hold, and the shapes of its responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import InvalidRequestError
from ..request import Delta
from ..tokenizer import Tokenizer
from .fields import Fields, shown
from .logprobs import chat_logprobs
from .sse import Frame, json_text
from .wire import Choice, Head, Settings, Usage, read_logprobs_count, read_max_tokens, read_settings

ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to continue."""

    settings: Settings
    messages: Sequence[Mapping[str, Any]]

    def encode(self, tokenizer: Tokenizer) -> list[list[int]]:
        """One prompt, by the model's chat template.

        :raises InvalidRequestError: the template refuses the messages.
        """
        return [tokenizer.encode_chat(self.messages)]

    def events(self, head: Head, tokenizer: Tokenizer) -> ChatEvents:
        """The writer of the streamed response."""
        return ChatEvents(head, tokenizer, usage_asked=self.settings.include_usage)

    def reply(
        self, head: Head, choices: Sequence[Choice], usage: Usage, tokenizer: Tokenizer
    ) -> bytes:
        """The ``chat.completion`` object."""
        asked = self.settings.params.logprobs is not None
        return msgspec.json.encode(
            {
                "id": head.id,
                "object": "chat.completion",
                "created": head.created,
                "model": head.model,
                "system_fingerprint": head.fingerprint,
                "choices": [
                    {
                        "index": index,
                        "message": {
                            "role": "assistant",
                            "content": choice.text,
                            "refusal": None,
                        },
                        "logprobs": chat_logprobs(choice.logprobs, tokenizer) if asked else None,
                        "finish_reason": choice.finish_reason,
                        "stop_reason": choice.stop_reason,
                    }
                    for index, choice in enumerate(choices)
                ],
                "usage": usage.to_json(),
            }
        )


class ChatEvents:
    """The events of a streamed chat: the role, then text."""

    __slots__ = ("_frame", "_tokenizer")

    def __init__(self, head: Head, tokenizer: Tokenizer, *, usage_asked: bool) -> None:
        self._frame = Frame(head, "chat.completion.chunk", usage_asked=usage_asked)
        self._tokenizer = tokenizer

    def first(self, index: int) -> bytes:
        """The role, with empty content."""
        return self._frame.choice(index, b'"delta":{"role":"assistant","content":""}')

    def delta(self, index: int, delta: Delta) -> bytes:
        """New text; with the last of it, the finish reason."""
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return b""
        gained = b'{"content":' + json_text(delta.text) + b"}" if delta.text else b"{}"
        logprobs = b"null"
        if delta.logprobs:
            logprobs = json_text(chat_logprobs(delta.logprobs, self._tokenizer))
        return self._frame.choice(
            index,
            b'"delta":' + gained,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def usage(self, usage: Usage) -> bytes:
        """The last event."""
        return self._frame.usage(usage)


def read_chat(fields: Fields) -> ChatRequest:
    """Understand a request body.

    :raises InvalidRequestError: naming the field at fault.
    """
    messages = _messages(fields)
    settings = read_settings(fields, max_tokens=_max_tokens(fields), logprobs=_logprobs(fields))
    _refuse_unsupported(fields)
    fields.done()
    return ChatRequest(settings=settings, messages=messages)


def _max_tokens(fields: Fields) -> int | None:
    newer = read_max_tokens(fields, "max_completion_tokens")
    older = read_max_tokens(fields, "max_tokens")
    if newer is not None and older is not None:
        raise InvalidRequestError(
            f"max_tokens ({older}) and max_completion_tokens ({newer}) are both set; they mean the "
            "same, so send one.",
            param="max_tokens",
        )
    return older if newer is None else newer


def _logprobs(fields: Fields) -> int | None:
    asked = fields.boolean("logprobs")
    top = read_logprobs_count(fields, "top_logprobs")
    if asked:
        return top or 0
    if top:
        raise InvalidRequestError(
            f"top_logprobs is {top}, but logprobs is not true; set it, or leave top_logprobs out.",
            param="top_logprobs",
        )
    return None


def _refuse_unsupported(fields: Fields) -> None:
    fields.only("tools", [])
    fields.only("tool_choice", "none", "auto")
    fields.only("parallel_tool_calls", True, False)  # without tools, either asks for nothing
    fields.only("functions", [])
    fields.only("function_call", "none", "auto")
    fields.only("response_format", {"type": "text"})
    fields.only("modalities", ["text"])
    for name in ("audio", "prediction", "web_search_options", "reasoning_effort", "verbosity"):
        fields.only(name)


def _messages(fields: Fields) -> list[dict[str, Any]]:
    given = fields.take("messages")
    if not isinstance(given, list) or not given:
        raise fields.refuse("messages", given, "a list with at least one message")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(given)]


def _message(item: object, where: str) -> dict[str, Any]:
    """A message as templates read it; what they would not read is refused."""
    if not isinstance(item, dict):
        raise InvalidRequestError(f"{where} is {shown(item)}; it must be an object.", param=where)
    fields = Fields(item, where=where)
    role = fields.take("role")
    if role not in ROLES:
        raise fields.refuse("role", role, f"one of {', '.join(ROLES)}")
    content = _content(fields, role)
    name = fields.string("name")
    for neutral in ("refusal", "function_call", "audio", "reasoning_content", "reasoning"):
        fields.only(neutral)
    fields.only("tool_calls", [])
    fields.only("annotations", [])
    fields.done()
    # "developer" is the newer name of "system"; templates know the older one.
    message = {"role": "system" if role == "developer" else role, "content": content}
    return message if name is None else {**message, "name": name}


def _content(fields: Fields, role: str) -> str:
    content = fields.take("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise fields.refuse("content", content, "a string or a list of text parts")
    return "".join(_part(part, fields.path(f"content[{i}]")) for i, part in enumerate(content))


def _part(item: object, where: str) -> str:
    if not isinstance(item, dict):
        raise InvalidRequestError(f"{where} is {shown(item)}; it must be an object.", param=where)
    fields = Fields(item, where=where)
    kind = fields.take("type")
    if kind != "text":
        raise fields.refuse("type", kind, "'text'; this server reads no other parts")
    text = fields.take("text")
    if not isinstance(text, str):
        raise fields.refuse("text", text, "a string")
    fields.done()
    return text
