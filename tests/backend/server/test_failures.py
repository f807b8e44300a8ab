"""How failures are told, and that requests are cancelled whoever gives up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fullbore_backend import (
    EngineStoppedError,
    InvalidRequestError,
    StepFailedError,
)

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], **fields}


@pytest.mark.parametrize(
    ("prepare", "status", "code"),
    [
        pytest.param({"failure": StepFailedError("boom")}, 500, "step_failed", id="step"),
        pytest.param({"failure": EngineStoppedError("gone")}, 503, "engine_stopped", id="stopped"),
        pytest.param({"healthy": False}, 503, "engine_stopped", id="draining"),
        pytest.param({"queue_limit": 0}, 429, "queue_full", id="full"),
        pytest.param({"max_model_len": 2}, 400, "context_length_exceeded", id="too long"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_failures_before_the_first_token_have_a_status(
    call: Any,
    engine: Any,
    prepare: Mapping[str, Any],
    status: int,
    code: str,
    stream: bool,
) -> None:
    for name, value in prepare.items():
        setattr(engine, name, value)
    got = await call(CHAT, chat(stream=stream))
    assert got.status == status
    assert got.json["error"]["code"] == code
    assert set(got.json["error"]) == {"message", "type", "param", "code"}
    assert not engine.live


async def test_full_queue_says_when_to_retry(call: Any, engine: Any) -> None:
    engine.queue_limit = 0
    assert (await call(CHAT, chat())).headers["retry-after"] == "2"


async def test_failure_on_the_way_ends_the_stream_with_an_error_event(
    call: Any, engine: Any
) -> None:
    engine.failure, engine.fail_after = StepFailedError("boom"), 2
    got = await call(CHAT, chat("abcd", stream=True, n=2))
    assert got.status == 200
    last = json.loads(got.events[-1])
    assert last["error"]["code"] == "step_failed"
    assert "[DONE]" not in got.events
    assert not engine.live


async def test_what_was_submitted_is_cancelled_when_the_queue_fills_halfway(
    call: Any, engine: Any
) -> None:
    engine.queue_limit = 2
    assert (await call(CHAT, chat(n=3))).status == 429
    assert not engine.live
    assert len(engine.cancelled) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_peer_that_leaves_before_the_first_token_ends_its_requests(
    call: Any, engine: Any, stream: bool, n: int
) -> None:
    engine.go.clear()
    left = asyncio.Event()
    task = asyncio.create_task(call(CHAT, chat(stream=stream, n=n), left=left))
    await engine.until_live(n)
    left.set()
    got = await task
    assert got.status == 0
    assert not engine.live
    assert len(engine.cancelled) == n


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_cancelled_handler_ends_its_requests(call: Any, engine: Any, stream: bool) -> None:
    engine.go.clear()
    task = asyncio.create_task(call(CHAT, chat(stream=stream, n=2)))
    await engine.until_live(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.live


async def test_a_finished_request_is_not_cancelled(call: Any, engine: Any) -> None:
    await call(CHAT, chat(n=2, stream=True))
    assert not engine.cancelled


async def test_a_fault_of_ours_is_a_500_that_tells_nothing(
    call: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "stats", lambda: 1 / 0)
    got: Any = SimpleNamespace(status=0, headers={}, parts=[])
    with pytest.raises(ZeroDivisionError):  # for the server's log
        await call("/metrics", got=got)
    assert got.status == 500
    assert json.loads(got.parts[0])["error"]["type"] == "server_error"
    assert b"division" not in got.parts[0]


async def test_template_refusal_is_a_400(call: Any, engine: Any) -> None:
    def refuse(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        raise InvalidRequestError("System role not supported", param="messages")

    engine.tokenizer.encode_chat = refuse  # type: ignore[method-assign]
    got = await call(CHAT, chat())
    assert got.status == 400
    assert got.json["error"] == {
        "message": "System role not supported",
        "type": "invalid_request_error",
        "param": "messages",
        "code": None,
    }
