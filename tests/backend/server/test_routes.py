"""Paths, keys, sizes, and what the other endpoints answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fullbore_backend.server import ServerConfig

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], **fields}


def completion(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": prompt, **fields}


async def test_unknown_model_is_404(call: Any) -> None:
    got = await call(CHAT, {**chat(), "model": "gpt-9"})
    assert got.status == 404
    assert got.json["error"]["code"] == "model_not_found"
    assert "echo" in got.json["error"]["message"]


async def test_models(call: Any) -> None:
    (model,) = (await call("/v1/models")).json["data"]
    assert model["id"] == "echo"
    assert (await call("/v1/models/echo")).json == model
    assert (await call("/v1/models/other/name")).status == 404


async def test_unknown_path_and_method_have_openais_shape(call: Any) -> None:
    missing = await call("/v2/nothing")
    wrong = await call(CHAT, method="GET")
    assert (missing.status, wrong.status) == (404, 405)
    assert wrong.headers["allow"] == "POST"
    for got in (missing, wrong):
        assert set(got.json["error"]) == {"message", "type", "param", "code"}


async def test_health_tells_why_not(call: Any, engine: Any) -> None:
    assert (await call("/health")).status == 200
    engine.healthy = False
    engine.death = RuntimeError("out of memory")
    got = await call("/health")
    assert got.status == 503
    assert "out of memory" in got.json["reason"]


async def test_metrics_parse_as_prometheus_text(call: Any) -> None:
    await call(CHAT, chat("ab"))
    got = await call("/metrics")
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for line in b"".join(got.parts).decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            samples[name] = float(value)
    label = 'model_name="echo"'
    assert samples[f"fullbore:kv_cache_usage_perc{{{label}}}"] == 0.25
    assert samples[f'fullbore:request_success_total{{{label},finished_reason="stop"}}'] == 3
    assert samples[f"fullbore:time_to_first_token_seconds_count{{{label}}}"] == 1
    assert samples[f'fullbore:e2e_request_latency_seconds_bucket{{{label},le="+Inf"}}'] == 1


async def test_request_id_is_echoed_or_made(call: Any) -> None:
    assert (await call("/health", headers={"x-request-id": "mine-1"})).headers[
        "x-request-id"
    ] == "mine-1"
    made = [(await call("/nothing")).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    nasty = await call("/health", headers={"x-request-id": "a b"})
    assert nasty.headers["x-request-id"].startswith("req_")


async def test_key_is_asked_everywhere_but_health(call_with: Any) -> None:
    call = call_with(ServerConfig(api_key="sesame"))
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sesame"}):
        got = await call(CHAT, chat(), headers=headers)
        assert got.status == 401
        assert got.json["error"]["code"] == "invalid_api_key"
        assert "sesame" not in str(got.json)
    assert (await call("/metrics")).status == 401
    assert (await call("/health")).status == 200
    good = await call(CHAT, chat(), headers={"authorization": "bearer sesame"})
    assert good.status == 200


async def test_large_body_is_413(call_with: Any) -> None:
    call = call_with(ServerConfig(max_body_bytes=100))
    assert (await call(CHAT, chat("x" * 200))).status == 413


async def test_large_body_is_understood_off_the_loop_with_the_same_result(call: Any) -> None:
    got = await call(CHAT, chat("x" * 100_000))
    assert got.status == 400
    assert got.json["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
async def test_only_plain_json_is_read(call: Any, headers: Mapping[str, str], status: int) -> None:
    assert (await call(CHAT, chat(), headers=headers)).status == status


async def test_too_many_choices_are_refused(call_with: Any) -> None:
    call = call_with(ServerConfig(max_choices=3))
    got = await call(COMPLETIONS, completion(["a", "b"], n=2))
    assert got.status == 400
    assert got.json["error"]["param"] == "prompt"
