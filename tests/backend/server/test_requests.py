"""Which request bodies are refused, and by which words; which are accepted though they say more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fullbore_backend import InvalidRequestError
from fullbore_backend.server.chat import read_chat
from fullbore_backend.server.completions import read_completion
from fullbore_backend.server.fields import parse_object

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> Any:
    body = {"model": "m", "messages": [USER], **fields}
    return read_chat(parse_object(json.dumps(body).encode()))


def completion(**fields: Any) -> Any:
    body = {"model": "m", "prompt": "hi", **fields}
    return read_completion(parse_object(json.dumps(body).encode()))


def messages(*items: Any) -> dict[str, Any]:
    return {"messages": list(items)}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b"", "valid JSON", id="empty"),
        pytest.param(b'{"model": ', "valid JSON", id="broken"),
        pytest.param(b'{"model": "\xff"}', "valid JSON", id="not UTF-8"),
        pytest.param(b'{"model": "\\ud800"}', "valid JSON", id="lone surrogate"),
        pytest.param(b'{"temperature": NaN}', "valid JSON", id="NaN"),
        pytest.param(b"[" * 100_000, "valid JSON", id="deep"),
        pytest.param(b"[1]", "JSON object", id="list"),
        pytest.param(b"null", "JSON object", id="null"),
    ],
)
def test_bodies_that_are_no_objects(body: bytes, reason: str) -> None:
    """What is not a JSON object in UTF-8 is refused."""
    with pytest.raises(InvalidRequestError, match=reason):
        parse_object(body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": "false"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**70}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
        ),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"user": 5}, "user"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"prediction": {}}, "prediction"),
        ({"nonsense": None}, "nonsense"),
        ({"echo": False}, "echo"),
        (messages(), "messages"),
        ({"messages": "hi"}, "messages"),
        (messages("hi"), "messages[0]"),
        (messages(USER, {"role": "tool", "content": "x"}), "messages[1].role"),
        (messages({"role": ["user"], "content": "x"}), "messages[0].role"),
        (messages({"role": "user"}), "messages[0].content"),
        (messages({"role": "user", "content": None}), "messages[0].content"),
        (messages({"role": "user", "content": []}), "messages[0].content"),
        (
            messages({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
            "messages[0].content[0].type",
        ),
        (messages({**USER, "weight": 1}), "messages[0].weight"),
        (messages({**USER, "tool_calls": [{}]}), "messages[0].tool_calls"),
    ],
    ids=str,
)
def test_refused_chat_fields(fields: dict[str, Any], param: str) -> None:
    """The error names the field, in its message and as ``param``."""
    with pytest.raises(InvalidRequestError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert param in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 16384}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"messages": [USER]}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
    ids=str,
)
def test_refused_completion_fields(fields: dict[str, Any], param: str) -> None:
    """The error names the field, in its message and as ``param``."""
    with pytest.raises(InvalidRequestError) as refused:
        completion(**fields)
    assert refused.value.param == param
    assert param in str(refused.value)


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    """SDKs and frameworks send defaults for what they do not use."""
    chat(
        n=1,
        tools=None,
        tool_choice="none",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        modalities=["text"],
        logprobs=False,
        top_logprobs=0,
        stream_options=None,
        store=False,
        service_tier="auto",
        user="someone",
        metadata={"run": "1"},
        seed=None,
    )
    completion(echo=False, suffix=None, best_of=1, logprobs=None)
    completion(n=3, best_of=3)


def test_a_reply_can_be_sent_back() -> None:
    """The SDK's dump of an answer is a valid message of the next request."""
    answer = {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    request = chat(messages=[USER, answer, USER])
    assert request.messages[1] == {"role": "assistant", "content": "yes"}


def test_text_parts_are_joined_and_developers_are_the_system() -> None:
    """Templates see plain text and the roles they know."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": parts}, USER])
    assert request.messages[0] == {"role": "system", "content": "ab"}


def test_long_values_are_cut_in_messages() -> None:
    """An error does not repeat a megabyte."""
    with pytest.raises(InvalidRequestError) as refused:
        chat(stream="x" * 10**6)
    assert len(str(refused.value)) < 300


def test_logprobs_zero_still_reports_the_token() -> None:
    """``logprobs: true`` without alternatives, and the older ``logprobs: 0``."""
    assert chat(logprobs=True).settings.params.logprobs == 0
    assert completion(logprobs=0).settings.params.logprobs == 0
    assert chat().settings.params.logprobs is None
