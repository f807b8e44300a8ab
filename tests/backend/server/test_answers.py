"""What is answered, whole and streamed, by both generating endpoints."""

from __future__ import annotations

from typing import Any

import pytest

from fullbore_backend import (
    SamplingParams,
)

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], **fields}


def completion(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": prompt, **fields}


async def test_chat_reply_has_openais_shape(call: Any) -> None:
    got = await call(CHAT, chat("hé!"))
    assert got.status == 200
    reply = got.json
    assert reply.pop("id").startswith("chatcmpl-")
    assert reply.pop("system_fingerprint").startswith("fp_")
    assert reply == {
        "object": "chat.completion",
        "created": 1000,
        "model": "echo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hé!", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


async def test_streamed_chat_opens_with_the_role_and_ends_with_the_reason(call: Any) -> None:
    got = await call(CHAT, chat("abc", stream=True))
    assert got.headers["content-type"].startswith("text/event-stream")
    choices = [chunk["choices"][0] for chunk in got.chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {"content": "c"},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
    assert all("usage" not in chunk for chunk in got.chunks)


async def test_role_and_first_text_leave_in_one_send(call: Any) -> None:
    got = await call(CHAT, chat("ab", stream=True))
    assert [part.count(b"data: ") for part in got.parts] == [2, 1, 1]


async def test_include_usage_adds_one_chunk_without_choices(call: Any) -> None:
    got = await call(CHAT, chat("abc", stream=True, n=2, stream_options={"include_usage": True}))
    *others, last = got.chunks
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 3
    assert last["usage"]["completion_tokens"] == 6
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in others)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_choices_of_many_prompts_are_prompt_major(call: Any, stream: bool) -> None:
    got = await call(COMPLETIONS, completion(["ab", "xyz"], n=2, stream=stream))
    texts = {}
    for chunk in got.chunks if stream else [got.json]:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "ab", 1: "ab", 2: "xyz", 3: "xyz"}


async def test_usage_of_many_prompts_counts_each_prompt_once(call: Any) -> None:
    got = await call(COMPLETIONS, completion(["ab", "xyz"], n=2))
    assert got.json["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 10,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_completion_of_token_ids(call: Any) -> None:
    got = await call(COMPLETIONS, completion([[104, 105], [33]]))
    assert [choice["text"] for choice in got.json["choices"]] == ["hi", "!"]


async def test_completions_stop_at_sixteen_tokens_by_default(call: Any) -> None:
    got = await call(COMPLETIONS, completion("x" * 100))
    assert got.json["usage"]["completion_tokens"] == 16


async def test_chat_has_no_limit_by_default(call: Any, engine: Any) -> None:
    await call(CHAT, chat("x"))
    assert engine.params[-1].max_tokens is None


async def test_a_seed_makes_each_choice_its_own(call: Any, engine: Any) -> None:
    await call(CHAT, chat("x", n=3, seed=2**63 - 1))
    assert [params.seed for params in engine.params] == [2**63 - 1, -(2**63), -(2**63) + 1]


async def test_extensions_reach_the_engine(call: Any, engine: Any) -> None:
    body = chat(
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.5,
        ignore_eos=True,
        min_tokens=2,
        stop_token_ids=[7],
        stop="x",
        logit_bias={"5": -100},
        cache_salt="mine",
        max_completion_tokens=9,
    )
    assert (await call(CHAT, body)).status == 200
    assert engine.params[-1] == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        min_p=0.1,
        repetition_penalty=1.5,
        ignore_eos=True,
        stop_token_ids=(7,),
        stop=("x",),
        logit_bias={5: -100},
    )
    assert engine.salts == ["mine"]


async def test_chat_logprobs_carry_bytes(call: Any) -> None:
    got = await call(CHAT, chat("é", logprobs=True, top_logprobs=2))
    (entry,) = got.json["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "é"
    assert entry["bytes"] == [0xC3, 0xA9]
    assert [top["token"] for top in entry["top_logprobs"]] == ["é", "A"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_completion_logprobs_are_parallel_lists(call: Any, stream: bool) -> None:
    got = await call(COMPLETIONS, completion("aéb", logprobs=2, stream=stream))
    parts = [chunk["choices"][0]["logprobs"] for chunk in (got.chunks if stream else [got.json])]
    joined = {name: [x for part in parts for x in part[name]] for name in parts[0]}
    assert joined["tokens"] == ["a", "é", "b"]
    assert joined["text_offset"] == [0, 1, 2]
    assert joined["token_logprobs"] == [-0.5] * 3
    assert joined["top_logprobs"][1] == {"é": -0.5, "A": -2.0}


async def test_line_separators_do_not_break_an_event_for_any_client(call: Any) -> None:
    text = "a\u2028b\u2029c\u0085d\r\ne"
    got = await call(CHAT, chat(text, stream=True))
    assert (
        b"".join(got.parts).decode().splitlines() == b"".join(got.parts).decode().split("\n")[:-1]
    )
    assert "".join(c["choices"][0]["delta"]["content"] for c in got.chunks) == text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_only_a_streamed_request_is_paused_for_its_reader(
    call: Any, engine: Any, stream: bool
) -> None:
    """A whole answer is always read to its end."""
    await call(CHAT, chat(stream=stream))
    assert (engine.buffers[-1] is None) is not stream
