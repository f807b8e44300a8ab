"""Client CPU per streamed chunk and per unstreamed request: ours, `openai`, httpx2 and aiohttp.

All clients send the same requests to the same server (granian with `client_endpoint.py`, in a
process of its own) in turns, round after round. What is reported is this process's CPU time, which
other processes of the machine disturb little, and the lag of this process's event loop: a client
that keeps the loop busy is late for everything. Answers are checked before anything is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import httpx2
import openai
from client_endpoint import CHUNKS, WORD
from record import circumstances, save

import fullbore

PACKAGES = ("fullbore", "openai", "httpx2", "httpcore2", "h11", "h2", "aiohttp", "anyio", "granian")
TEXT = WORD * CHUNKS
LAG_INTERVAL = 0.05

Send = Callable[[int, bool, str], Awaitable[None]]
"""Sends that many requests, all at once, streamed or not, with that prompt; checks the answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One turn of one client; microseconds of CPU, milliseconds of lag."""

    client: str
    http: str
    streamed: bool
    cpu_us: float
    lag_p99_ms: float


@asynccontextmanager
async def open_openai(url: str, *, http2: bool) -> AsyncIterator[Send]:
    """The SDK as it is, on httpx2's own transport."""
    http = httpx2.AsyncClient(
        http1=not http2, http2=http2, limits=httpx2.Limits(max_connections=None), timeout=60
    )
    async with http, openai.AsyncOpenAI(base_url=url, api_key="k", http_client=http) as client:
        yield lambda count, stream, prompt: _gather(count, _ask_sdk, client, stream, prompt)


async def _ask_sdk(client: openai.AsyncOpenAI, stream: bool, prompt: str) -> None:
    messages = [{"role": "user", "content": prompt}]
    create = client.chat.completions.create
    if not stream:
        reply = await create(model="bench", messages=messages)
        check(reply.choices[0].message.content)
        return
    options = {"include_usage": True}
    answer = await create(model="bench", messages=messages, stream=True, stream_options=options)
    check("".join([c.choices[0].delta.content or "" async for c in answer if c.choices]))


@asynccontextmanager
async def open_ours(url: str, *, http2: bool) -> AsyncIterator[Send]:
    """`Client.map`, with limiter, retries and ledger, as users have it."""
    async with fullbore.Client(url, model="bench", concurrency=10_000, http2=http2) as client:

        async def send(count: int, stream: bool, prompt: str) -> None:
            async for result in client.map([prompt] * count, stream=stream):
                check(result.text)

        yield send


@asynccontextmanager
async def open_httpx2(url: str, *, http2: bool) -> AsyncIterator[Send]:
    """httpx2 and the least that reads an event stream: lines and `json.loads`."""
    async with httpx2.AsyncClient(
        http1=not http2, http2=http2, limits=httpx2.Limits(max_connections=None), timeout=60
    ) as client:

        async def ask(stream: bool, prompt: str) -> None:
            target, body = f"{url}/chat/completions", request_body(stream, prompt)
            if not stream:
                check_whole((await client.post(target, json=body)).content)
                return
            async with client.stream("POST", target, json=body) as response:
                check("".join([part async for part in _parts(response.aiter_lines())]))

        yield lambda count, stream, prompt: _gather(count, ask, stream, prompt)


@asynccontextmanager
async def open_aiohttp(url: str) -> AsyncIterator[Send]:
    """aiohttp, whose HTTP parser is C, and the same lines."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(stream: bool, prompt: str) -> None:
            target, body = f"{url}/chat/completions", request_body(stream, prompt)
            async with session.post(target, json=body) as response:
                if not stream:
                    check_whole(await response.read())
                    return
                lines = (line.decode().rstrip("\n") async for line in response.content)
                check("".join([part async for part in _parts(lines)]))

        yield lambda count, stream, prompt: _gather(count, ask, stream, prompt)


def request_body(stream: bool, prompt: str) -> dict[str, object]:
    """The request that every client sends."""
    body: dict[str, object] = {"model": "bench", "messages": [{"role": "user", "content": prompt}]}
    return body | {"stream": True, "stream_options": {"include_usage": True}} if stream else body


async def _parts(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    async for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            for choice in json.loads(line[6:])["choices"]:
                yield choice["delta"].get("content", "")


async def _gather(count: int, ask: Callable[..., Awaitable[None]], *arguments: object) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(ask(*arguments))  # type: ignore[arg-type]


def check(text: str | None) -> None:
    """Fail loudly on a wrong answer: a fast wrong client is not fast."""
    if text != TEXT:
        raise RuntimeError(f"a wrong answer: {text!r}")


def check_whole(body: bytes) -> None:
    """Check an unstreamed answer."""
    check(json.loads(body)["choices"][0]["message"]["content"])


CONTENDERS = {
    ("AsyncOpenAI", "1.1"): lambda url: open_openai(url, http2=False),
    ("AsyncOpenAI", "2"): lambda url: open_openai(url, http2=True),
    ("fullbore", "1.1"): lambda url: open_ours(url, http2=False),
    ("fullbore", "2"): lambda url: open_ours(url, http2=True),
    ("httpx2 + lines", "1.1"): lambda url: open_httpx2(url, http2=False),
    ("httpx2 + lines", "2"): lambda url: open_httpx2(url, http2=True),
    ("aiohttp + lines", "1.1"): open_aiohttp,
}


async def measure(url: str, options: argparse.Namespace) -> list[Sample]:
    """Let every client take its turns."""
    async with AsyncExitStack() as stack:
        senders: dict[tuple[str, str], Send] = {
            key: await stack.enter_async_context(opener(url))
            for key, opener in CONTENDERS.items()
            if not options.only or key[0] in options.only
        }
        for send in senders.values():  # warm: connections, imports, caches
            await send(options.concurrency, True, "pause=0.001")
            await send(options.concurrency, False, "hi")
        gc.collect()
        gc.freeze()  # what the imports left; else it is scanned in somebody's turn
        samples = []
        for _ in range(options.rounds):
            for (name, http), send in senders.items():
                samples.append(await _streamed(name, http, send, options))
                samples.append(await _unstreamed(name, http, send, options))
    return samples


async def _streamed(name: str, http: str, send: Send, options: argparse.Namespace) -> Sample:
    async def work() -> None:
        for _ in range(options.waves):
            await send(options.concurrency, True, f"pause={options.pause}")

    cpu, lag = await timed(work)
    chunks = options.waves * options.concurrency * CHUNKS
    return Sample(client=name, http=http, streamed=True, cpu_us=cpu / chunks * 1e6, lag_p99_ms=lag)


async def _unstreamed(name: str, http: str, send: Send, options: argparse.Namespace) -> Sample:
    async def work() -> None:
        for _ in range(options.requests // options.concurrency):
            await send(options.concurrency, False, "hi")

    cpu, lag = await timed(work)
    requests = options.requests // options.concurrency * options.concurrency
    return Sample(
        client=name, http=http, streamed=False, cpu_us=cpu / requests * 1e6, lag_p99_ms=lag
    )


async def timed(work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Run it; return its CPU seconds and the loop's p99 lag in milliseconds meanwhile."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            due = time.perf_counter() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            lags.append(max(0.0, time.perf_counter() - due))

    watcher = asyncio.create_task(watch())
    began = time.process_time()
    await work()
    cpu = time.process_time() - began
    watcher.cancel()
    lags.append(0.0)
    return cpu, sorted(lags)[int(0.99 * (len(lags) - 1))] * 1000


@contextmanager
def served() -> Iterator[str]:
    """Run the endpoint in a process of its own; yields its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "granian", "--interface", "asginl", "--http", "auto"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--no-ws", "--log-level", "warning"]
    command += ["--backpressure", "10000", "client_endpoint:app"]
    process = subprocess.Popen(command, cwd=Path(__file__).parent)
    try:
        _until_up(f"http://127.0.0.1:{port}/", process)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(10)


def _until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > give_up:
                raise
            time.sleep(0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: medians, and for chunks how often they fit into AsyncOpenAI's."""

    client: str
    http: str
    chunk_us: float
    chunk_ratio: float | None
    request_us: float
    request_ratio: float | None
    stream_lag_p99_ms: float
    request_lag_p99_ms: float


def tabulate(samples: Sequence[Sample]) -> list[Row]:
    """Medians over the rounds; ratios are AsyncOpenAI's figure over the same HTTP ÷ this one's."""

    def median(client: str, http: str, streamed: bool, field: str) -> float | None:
        values = [
            getattr(s, field)
            for s in samples
            if (s.client, s.http, s.streamed) == (client, http, streamed)
        ]
        return statistics.median(values) if values else None

    rows = []
    for client, http in dict.fromkeys((s.client, s.http) for s in samples):
        chunk = median(client, http, True, "cpu_us")
        request = median(client, http, False, "cpu_us")
        base_chunk = median("AsyncOpenAI", http, True, "cpu_us")
        base_request = median("AsyncOpenAI", http, False, "cpu_us")
        rows.append(
            Row(
                client=client,
                http=http,
                chunk_us=round(chunk, 1),
                chunk_ratio=base_chunk and round(base_chunk / chunk, 1),
                request_us=round(request, 0),
                request_ratio=base_request and round(base_request / request, 1),
                stream_lag_p99_ms=round(median(client, http, True, "lag_p99_ms"), 1),
                request_lag_p99_ms=round(median(client, http, False, "lag_p99_ms"), 1),
            )
        )
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    print(f"{'client':<16} HTTP  µs/chunk  ratio  µs/request  ratio  lag p99, ms: streamed, not")
    for row in rows:
        print(
            f"{row.client:<16} {row.http:<4} {row.chunk_us:>9.1f} {row.chunk_ratio or 0:>5.1f}x "
            f"{row.request_us:>11.0f} {row.request_ratio or 0:>5.1f}x "
            f"{row.stream_lag_p99_ms:>14.1f} {row.request_lag_p99_ms:>9.1f}"
        )


def main() -> None:
    """Run, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waves", type=int, default=2, help="waves of streams a turn")
    parser.add_argument("--requests", type=int, default=512, help="unstreamed requests a turn")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between chunks")
    parser.add_argument("--only", nargs="*", help="measure only these clients")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    options = parser.parse_args()
    with served() as url:
        samples = asyncio.run(measure(url, options))
    rows = tabulate(samples)
    show(rows)
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "only")}
    result = circumstances(PACKAGES) | {
        "settings": settings | {"chunks": CHUNKS},
        "rows": [asdict(row) for row in rows],
        "samples": [asdict(sample) for sample in samples],
    }
    if not options.only:
        print(f"written to {save('client', result, options.out)}")
    print(json.dumps({"rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
