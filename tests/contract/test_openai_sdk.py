"""The real ``openai`` SDK against a real server: what its users rely on."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from fullbore_backend.server.thread import ThreadServer

pytestmark = pytest.mark.anyio

MODEL = "smollm2-135m"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def test_chat(sdk: openai.AsyncOpenAI) -> None:
    """A whole answer with its usage."""
    reply = await sdk.chat.completions.create(
        messages=ask("Say hello."), max_completion_tokens=8, **GREEDY
    )
    (choice,) = reply.choices
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert 1 <= reply.usage.completion_tokens <= 8
    assert reply.system_fingerprint


def test_sync_client(server: ThreadServer) -> None:
    """The synchronous client works alike."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        reply = client.completions.create(prompt="One, two,", max_tokens=4, **GREEDY)
        assert reply.choices[0].text
        assert [model.id for model in client.models.list()] == [MODEL]


async def test_streamed_equals_whole(sdk: openai.AsyncOpenAI) -> None:
    """The concatenated stream is the unstreamed text, for both endpoints."""
    request: dict[str, Any] = {"messages": ask("Count to five: 1️⃣ 二"), "max_tokens": 24, **GREEDY}
    whole = await sdk.chat.completions.create(**request)
    text, reasons = "", []
    async for chunk in await sdk.chat.completions.create(stream=True, **request):
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
        assert chunk.usage is None
    assert text == whole.choices[0].message.content
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}

    plain = {"prompt": "The sea is", "max_tokens": 12, **GREEDY}
    expected = (await sdk.completions.create(**plain)).choices[0].text
    pieces = [c.choices[0].text async for c in await sdk.completions.create(stream=True, **plain)]
    assert "".join(pieces) == expected


async def test_include_usage(sdk: openai.AsyncOpenAI) -> None:
    """Exactly one chunk has usage, the last, and it has no choices."""
    stream = await sdk.chat.completions.create(
        messages=ask("Hi"),
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = [chunk async for chunk in stream]
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []


async def test_second_time_is_served_from_the_prefix_cache(sdk: openai.AsyncOpenAI) -> None:
    """``cached_tokens`` says so, and a salt of one's own keeps the cache apart."""
    request: dict[str, Any] = {"messages": ask("River " * 60), "max_tokens": 1, **GREEDY}
    await sdk.chat.completions.create(**request)
    again = await sdk.chat.completions.create(**request)
    salted = await sdk.chat.completions.create(extra_body={"cache_salt": "mine"}, **request)
    for reply, hit in ((again, True), (salted, False)):
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        assert bool(reply.usage.prompt_tokens_details.cached_tokens) is hit


async def test_choices_and_seeds(sdk: openai.AsyncOpenAI) -> None:
    """``n`` choices differ; the same seed gives the same ones, another seed others."""

    async def texts(seed: int) -> list[str | None]:
        reply = await sdk.chat.completions.create(
            model=MODEL, messages=ask("Invent a word."), max_tokens=10, n=3, seed=seed
        )
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        return [choice.message.content for choice in reply.choices]

    first, same, other = await texts(1), await texts(1), await texts(2)
    assert first == same
    assert first != other
    assert len(set(first)) > 1


async def test_chat_logprobs(sdk: openai.AsyncOpenAI) -> None:
    """Bytes join to the text; a greedy token is the likeliest; numbers are finite."""
    reply = await sdk.chat.completions.create(
        messages=ask("Hello"), max_tokens=6, logprobs=True, top_logprobs=3, **GREEDY
    )
    (choice,) = reply.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert reply.usage is not None
    assert len(entries) == reply.usage.completion_tokens
    joined = b"".join(bytes(entry.bytes or []) for entry in entries).decode("utf-8", "replace")
    assert joined.startswith(choice.message.content or "")
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert all(math.isfinite(top.logprob) for top in entry.top_logprobs)


async def test_completion_logprobs(sdk: openai.AsyncOpenAI) -> None:
    """The older shape: parallel lists, offsets into the text."""
    reply = await sdk.completions.create(prompt="The sea is", max_tokens=5, logprobs=2, **GREEDY)
    (choice,) = reply.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == choice.text
    for token, offset in zip(logprobs.tokens or [], logprobs.text_offset or [], strict=True):
        assert choice.text[offset:].startswith(token)


async def test_stop_string_is_never_emitted(sdk: openai.AsyncOpenAI) -> None:
    """The text ends before the stop string, streamed or not."""
    request: dict[str, Any] = {"prompt": "1, 2, 3, 4,", "max_tokens": 20, "stop": ["7"], **GREEDY}
    (choice,) = (await sdk.completions.create(**request)).choices
    assert choice.finish_reason == "stop"
    assert "6" in choice.text
    assert "7" not in choice.text
    pieces = [c.choices[0].text async for c in await sdk.completions.create(stream=True, **request)]
    assert "".join(pieces) == choice.text


async def test_extensions(sdk: openai.AsyncOpenAI) -> None:
    """vLLM's extensions through ``extra_body``: the end token is ignored, the length is exact."""
    reply = await sdk.chat.completions.create(
        messages=ask("Say hi."), max_tokens=40, extra_body={"ignore_eos": True}, **GREEDY
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 40
    assert reply.choices[0].finish_reason == "length"


async def test_many_prompts(sdk: openai.AsyncOpenAI) -> None:
    """Choices come prompt by prompt; token ids are prompts too."""
    both = await sdk.completions.create(prompt=["One, two,", "A, B,"], max_tokens=4, **GREEDY)
    alone = await sdk.completions.create(prompt="A, B,", max_tokens=4, **GREEDY)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[1].text == alone.choices[0].text
    ids = await sdk.completions.create(prompt=[[1, 2, 3], [4]], max_tokens=1, **GREEDY)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 4


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        pytest.param({"temperature": 9.0}, openai.BadRequestError, "temperature", id="range"),
        pytest.param({"top_p": -1}, openai.BadRequestError, "top_p", id="top_p"),
        pytest.param({"logit_bias": {"60000": 1}}, openai.BadRequestError, "logit_bias", id="bias"),
        pytest.param({"tools": [{}]}, openai.BadRequestError, "tools", id="unsupported"),
        pytest.param({"model": "gpt-9"}, openai.NotFoundError, "model", id="model"),
        pytest.param({"messages": []}, openai.BadRequestError, "messages", id="no messages"),
        pytest.param(
            {"messages": ask("word " * 2000)}, openai.BadRequestError, None, id="too long"
        ),
    ],
)
async def test_errors_are_the_sdks_own(
    sdk: openai.AsyncOpenAI,
    fields: dict[str, Any],
    error: type[openai.APIStatusError],
    param: str | None,
) -> None:
    """Each failure is the SDK's class for its status, with the field named."""
    request: dict[str, Any] = {"messages": ask("Hi"), "max_tokens": 1, **GREEDY, **fields}
    with pytest.raises(error) as raised:
        await sdk.chat.completions.create(**request)
    if param is None:
        assert raised.value.code == "context_length_exceeded"
    else:
        assert raised.value.param == param
        assert param in raised.value.message


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    """The list, and one by name."""
    assert (await sdk.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("other")
