"""What a prompt may be, and the request it becomes.

A prompt is

- a string: one user message;
- a list of messages, each a mapping with at least ``role``;
- a mapping of request fields with ``messages`` (chat) or ``prompt`` (plain completion). Its fields
  win over those of the call, which win over the client's. Fields that OpenAI's API does not know
  (vLLM's ``top_k``, say) pass through. One key is ours: ``custom_id``, which is not sent and comes
  back as ``Result.id``.

Knows nothing of how a request is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ._types import Request
from .errors import PromptError

Prompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, chat messages, or a mapping of request fields."""

CHAT_PATH = "chat/completions"
TEXT_PATH = "completions"

_encode = msgspec.json.Encoder(enc_hook=lambda value: _plain(value)).encode


def render(
    prompt: Prompt | Any,
    fields: Mapping[str, Any],
    *,
    index: int = 0,
    stream: bool = True,
    label: str | None = None,
) -> Request:
    """Turn a prompt and the fields that hold for all of them into a request.

    A streamed request asks for usage (``stream_options.include_usage``), unless the prompt or the
    fields set ``stream_options`` themselves.

    :raises PromptError: saying what was given and what is accepted.
    """
    body: dict[str, Any] = dict(fields)
    path = CHAT_PATH
    identity: str | None = None
    if isinstance(prompt, str):
        body["messages"] = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, Mapping):
        body.update(prompt)
        custom_id = body.pop("custom_id", None)
        identity = None if custom_id is None else str(custom_id)
        if ("messages" in prompt) == ("prompt" in prompt):
            raise PromptError(
                "A prompt that is a mapping needs either 'messages' (chat) or 'prompt' (plain "
                f"completion); this one has the keys {sorted(map(str, prompt))}."
            )
        path = CHAT_PATH if "messages" in prompt else TEXT_PATH
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) for m in prompt):
        body["messages"] = prompt
    else:
        raise PromptError(
            "A prompt is a string, a non-empty list of chat messages, or a mapping of request "
            f"fields; got {type(prompt).__name__}: {_short(prompt)}."
        )
    stream = bool(body.pop("stream", stream))
    if stream:
        body["stream"] = True
        body.setdefault("stream_options", {"include_usage": True})
    try:
        content = _encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise PromptError(
            f"The request cannot be written as JSON: {exc}. Use plain dicts, lists, strings, "
            "numbers, booleans and None."
        ) from exc
    return Request(
        index=index,
        input=prompt,
        path=path,
        body=body,
        content=content,
        stream=stream,
        id=identity,
        label=label,
    )


def _plain(value: Any) -> Any:
    """Reduce what msgspec does not know: any mapping, any sequence, a pydantic model."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json", exclude_none=True)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
