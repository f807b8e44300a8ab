"""The wire itself: both versions of HTTP on one port, TLS, errors, health, metrics, overload."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from fullbore_backend import AsyncEngine
from fullbore_backend.server import ServerConfig
from fullbore_backend.server.embedded import EmbeddedServer
from fullbore_backend.server.listener import bind
from fullbore_backend.server.thread import ThreadServer

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
VERSIONS = [
    pytest.param({"http1": True, "http2": False}, "HTTP/1.1", id="h1"),
    pytest.param({"http1": False, "http2": True}, "HTTP/2", id="h2c"),
]


def chat(**fields: Any) -> dict[str, Any]:
    return {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Count to ten."}],
        "max_tokens": 4,
        "temperature": 0,
        **fields,
    }


@pytest.mark.parametrize(("versions", "name"), VERSIONS)
async def test_both_versions_of_http_on_one_port(
    server: ThreadServer, versions: dict[str, bool], name: str
) -> None:
    """A whole answer, and a stream of events that ends properly."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=60, **versions) as client:
        whole = await client.post(CHAT, json=chat())
        assert whole.http_version == name
        assert whole.status_code == 200
        text = ""
        async with client.stream("POST", CHAT, json=chat(stream=True)) as response:
            assert response.http_version == name
            lines = [line async for line in response.aiter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            text += choice["delta"].get("content", "")
        assert text == whole.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(("versions", "name"), VERSIONS)
async def test_refusals_on_the_wire(
    server: ThreadServer, versions: dict[str, bool], name: str
) -> None:
    """Every refusal has OpenAI's shape and a request id."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=60, **versions) as client:
        kind = {"content-type": "application/json"}
        answers = {
            400: await client.post(CHAT, content=b'{"model": ', headers=kind),
            404: await client.get("/v1/nothing"),
            405: await client.get(CHAT),
            413: await client.post(CHAT, content=b" " * (17 * 2**20), headers=kind),
            415: await client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}),
        }
        for status, answer in answers.items():
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.headers["x-request-id"]
        assert (await client.get("/health")).status_code == 200


async def test_metrics_count_what_was_served(server: ThreadServer) -> None:
    """Counters go up by what a request used."""

    async def counters() -> dict[str, float]:
        text = (await client.get("/metrics")).text
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        return {name.split("{")[0]: float(value) for name, value in samples}

    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
        before = await counters()
        usage = (await client.post(CHAT, json=chat())).json()["usage"]
        after = await counters()
    for name, used in (
        ("fullbore:prompt_tokens_total", usage["prompt_tokens"]),
        ("fullbore:generation_tokens_total", usage["completion_tokens"]),
        ("fullbore:time_to_first_token_seconds_count", 1),
        ("fullbore:e2e_request_latency_seconds_count", 1),
    ):
        assert after[name] - before[name] == used


async def test_full_queue_is_429_with_retry_after(
    server: ThreadServer, assert_nothing_left: Callable[[], Awaitable[None]]
) -> None:
    """More choices than may run and wait are refused; those already queued do not leak."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
        body = {"model": "smollm2-135m", "prompt": ["a", "b"], "n": 128, "max_tokens": 200}
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "queue_full"
    await assert_nothing_left()


@pytest.fixture
async def flood() -> AsyncIterator[tuple[int, list[int], asyncio.Event]]:
    """A server that sends without end: its port, the sizes sent, and whether the peer left."""
    sent: list[int] = []
    left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()

        watcher = asyncio.create_task(watch())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not left.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            sent.append(65536)
            await asyncio.sleep(0)
        await watcher

    listener = bind("127.0.0.1", 0)
    listener.listen()
    port = listener.getsockname()[1]
    embedded = EmbeddedServer(app, ServerConfig(port=0), listener)
    serving = asyncio.create_task(embedded.serve())
    yield port, sent, left
    embedded.close()
    await serving


async def test_a_peer_that_does_not_read_stops_the_sender(
    flood: tuple[int, list[int], asyncio.Event],
) -> None:
    """``send`` waits for the peer; when the peer goes, the application is told."""
    port, sent, left = flood
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    size, still = -1, 0
    while still < 20:  # until nothing more goes out
        still, size = (still + 1, size) if size == len(sent) else (0, len(sent))
        await asyncio.sleep(0.02)
        assert size < 4096, "256 MiB were sent to a peer that reads nothing"
    assert not left.is_set()
    writer.transport.abort()
    await asyncio.wait_for(left.wait(), 60)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {key} "
        f"-out {cert} -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -days 2"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return cert, key


async def test_tls_negotiates_http2(certificate: tuple[Path, Path], server: ThreadServer) -> None:
    """With a certificate, HTTP/2 and HTTP/1.1 by ALPN."""
    cert, key = certificate
    config = ServerConfig(port=0, tls_cert=cert, tls_key=key)
    context = ssl.create_default_context(cafile=str(cert))
    with ThreadServer(AsyncEngine(server.engine.engine), config) as secure:
        assert secure.url.startswith("https://")
        for http2, name in ((True, "HTTP/2"), (False, "HTTP/1.1")):
            async with httpx2.AsyncClient(http2=http2, verify=context) as client:
                answer = await client.get(f"{secure.url}/health")
                assert (answer.status_code, answer.http_version) == (200, name)
