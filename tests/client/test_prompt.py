"""What a prompt may be, and the request it becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fullbore import PromptError
from fullbore._prompt import render


def sent(prompt: Any, **fields: Any) -> dict[str, Any]:
    """Return the JSON that would be sent, unstreamed."""
    body: dict[str, Any] = json.loads(
        render(prompt, {"model": "m", **fields}, stream=False).content
    )
    return body


def test_a_string_is_one_user_message() -> None:
    """The simplest prompt."""
    assert sent("hi") == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_a_list_is_the_messages() -> None:
    """Chat messages pass as they are."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert sent(messages)["messages"] == messages
    assert sent(tuple(messages))["messages"] == messages


def test_fields_of_the_prompt_win_over_those_of_the_call() -> None:
    """Per-item overrides; unknown fields, such as vLLM's, pass through."""
    prompt = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "top_k": 3}
    body = sent(prompt, max_tokens=100, seed=1)
    assert (body["max_tokens"], body["seed"], body["top_k"]) == (5, 1, 3)


def test_a_prompt_field_asks_for_a_plain_completion() -> None:
    """``prompt`` and ``messages`` go to different paths."""
    assert render({"prompt": "Once"}, {}).path == "completions"
    assert render({"messages": [{"role": "user", "content": "hi"}]}, {}).path == "chat/completions"


def test_custom_id_is_ours_and_not_sent() -> None:
    """It comes back with the result."""
    request = render({"prompt": "Once", "custom_id": 7}, {})
    assert request.id == "7"
    assert b"custom_id" not in request.content


def test_a_streamed_request_asks_for_usage() -> None:
    """Otherwise reasoning tokens go uncounted."""
    body = json.loads(render("hi", {}).content)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert "stream" not in json.loads(render("hi", {}, stream=False).content)


def test_a_prompt_may_choose_not_to_stream() -> None:
    """The field wins over the call here too."""
    request = render({"prompt": "Once", "stream": False}, {}, stream=True)
    assert not request.stream
    assert b"stream" not in request.content


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        7,
        [],
        ["hi"],
        b"hi",
        {},
        {"max_tokens": 3},
        {"prompt": "a", "messages": []},
        {"prompt": int},
    ],
    ids=repr,
)
def test_anything_else_is_refused_with_a_reason(prompt: Any) -> None:
    """The message says what is accepted."""
    with pytest.raises(PromptError, match=r"string|'messages'|JSON"):
        render(prompt, {})
