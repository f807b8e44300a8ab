"""The JSON of answers: usage partitioned once, chunks joined, errors understood."""

from __future__ import annotations

import json
import pickle
from typing import Any

import msgspec
import pytest

from fullbore import (
    AnswerFailedError,
    AuthenticationError,
    BadRequestError,
    FullboreError,
    MalformedAnswerError,
    NotFoundError,
    OverloadedError,
    QuotaExceededError,
    RateLimitError,
    ServerError,
    StatusError,
    ToolCall,
    Usage,
    errors,
)
from fullbore.transport.wire import Answer, WireUsage, read_status_error, read_usage


def usage(**fields: Any) -> Usage:
    """Read usage as an endpoint would send it."""
    return read_usage(msgspec.json.decode(json.dumps(fields).encode(), type=WireUsage))


def grown(*chunks: dict[str, Any]) -> Answer:
    """Grow an answer from these chunks."""
    answer = Answer()
    for chunk in chunks:
        answer.add(json.dumps(chunk).encode())
    return answer


def delta(index: int = 0, finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return a chunk with one delta."""
    return {"choices": [{"index": index, "delta": fields, "finish_reason": finish_reason}]}


def test_cached_and_reasoning_tokens_are_parts_not_additions() -> None:
    """OpenAI's prompt_tokens includes the cached, completion_tokens the reasoning."""
    assert usage(
        prompt_tokens=100,
        completion_tokens=50,
        prompt_tokens_details={"cached_tokens": 60},
        completion_tokens_details={"reasoning_tokens": 40},
    ) == Usage(input_tokens=100, cached_tokens=60, output_tokens=50, reasoning_tokens=40)


def test_more_cached_than_input_is_cut_and_flagged() -> None:
    """A report that does not add up never makes a negative price."""
    found = usage(
        prompt_tokens=10, completion_tokens=1, prompt_tokens_details={"cached_tokens": 99}
    )
    assert found == Usage(input_tokens=10, cached_tokens=10, output_tokens=1, clamped=True)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"prompt_tokens": 9, "prompt_cache_hit_tokens": 4}, id="deepseek"),
        pytest.param(
            {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, id="responses"
        ),
        pytest.param(
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0}},
            id="openai",
        ),
    ],
)
def test_other_names_for_the_same(fields: dict[str, Any]) -> None:
    """Providers differ in names, not in meaning."""
    found = usage(**fields)
    assert (found.input_tokens, found.cached_tokens, found.clamped) == (9, 4, False)


def test_null_usage_details_are_zero() -> None:
    """Some servers send null where there is nothing."""
    assert usage(prompt_tokens=3, completion_tokens=2, prompt_tokens_details=None) == Usage(
        input_tokens=3, output_tokens=2
    )


def test_text_reasoning_and_choices_are_joined() -> None:
    """Each choice grows on its own."""
    answer = grown(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="a"),
        delta(1, content="x"),
        delta(content="b", finish_reason="stop"),
        delta(1, "length"),
    )
    first, second = answer.choices()
    assert (first.text, first.reasoning, first.finish_reason) == ("ab", "hm", "stop")
    assert (second.text, second.finish_reason) == ("x", "length")
    assert answer.pieces == 4
    assert answer.complete


def test_an_empty_finish_reason_is_none_yet() -> None:
    """Some servers send "" until the last chunk."""
    answer = grown(delta(content="a", finish_reason=""))
    assert not answer.complete


def test_tool_calls_are_joined_by_index() -> None:
    """Arguments come in pieces."""
    answer = grown(
        delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "f", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}]),
        delta(tool_calls=[{"index": 1, "id": "c2", "function": {"name": "g", "arguments": "{}"}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
    )
    assert answer.choices()[0].tool_calls == (
        ToolCall(id="c1", name="f", arguments='{"a": 1}'),
        ToolCall(id="c2", name="g", arguments="{}"),
    )


def test_logprobs_of_chunks_are_one_list() -> None:
    """As if the answer had not been streamed."""
    chunk = {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [{"token": "a"}]}}]}
    none = {"choices": [{"delta": {"content": "b"}, "logprobs": None}]}
    answer = grown(chunk, none, chunk)
    assert answer.choices()[0].logprobs == {"content": [{"token": "a"}, {"token": "a"}]}


def test_an_error_object_is_an_error() -> None:
    """Also inside a 200 answer."""
    with pytest.raises(AnswerFailedError, match="out of memory") as caught:
        grown(delta(content="a"), {"error": {"message": "out of memory", "code": 500}})
    assert (caught.value.code, caught.value.partial) == ("500", "a")


@pytest.mark.parametrize("data", [b"<html>", b"[1]", b'{"choices": 3}', b"\xff"], ids=repr)
def test_what_is_no_answer_is_malformed(data: bytes) -> None:
    """With the start of it in the message."""
    with pytest.raises(MalformedAnswerError):
        Answer().add(data)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, None, BadRequestError),
        (401, None, AuthenticationError),
        (404, None, NotFoundError),
        (422, None, BadRequestError),
        (429, None, RateLimitError),
        (429, "insufficient_quota", QuotaExceededError),
        (500, None, ServerError),
        (503, None, OverloadedError),
        (418, None, StatusError),
    ],
)
def test_statuses_have_classes(status: int, code: str | None, kind: type[StatusError]) -> None:
    """And keep OpenAI's fields."""
    body = json.dumps({"error": {"message": "no", "code": code, "param": "n"}}).encode()
    error = read_status_error(status, {"x-request-id": "r-1"}, body, retry_after=None)
    assert type(error) is kind
    assert (error.status, error.param, error.request_id) == (status, "n", "r-1")
    assert "no" in str(error)


@pytest.mark.parametrize(
    "body",
    [b'{"detail": "gone"}', b'{"message": "gone"}', b'{"error": "gone"}', b"gone"],
    ids=["fastapi", "flat", "string", "plain text"],
)
def test_other_error_bodies_are_read_too(body: bytes) -> None:
    """Not everyone speaks OpenAI's shape."""
    assert "gone" in str(read_status_error(500, {}, body, retry_after=None))


def all_errors() -> list[type[FullboreError]]:
    """Every class of the tree."""
    found, waiting = [], [FullboreError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    return [kind for kind in found if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_errors_can_be_pickled_and_are_in_the_tree(kind: type[FullboreError]) -> None:
    """Workers in other processes send them home; the docstring draws every one."""
    error = kind("what happened")
    if hasattr(error, "partial"):
        error.partial = "some text"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), vars(again)) == (str(error), vars(error))
    assert kind.__name__ in (errors.__doc__ or "")
