"""Long and large runs of the client: 5,000 streams at once, a million inputs, 10,000 cancellations.

Each prints one line of JSON and ends with status 1 if it breaks its bound. The servers run in
processes of their own, so that memory and CPU time are the client's alone.

    python bench/soak.py streams      # RSS and cost per chunk of 5,000 concurrent HTTP/2 streams
    python bench/soak.py map          # RSS over a lazy million of inputs, iterated as finished
    python bench/soak.py cancel       # what 10,000 randomly timed cancellations leave behind
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio

import fullbore

HERE = Path(__file__).parent
CHUNKS = 64


@contextmanager
def served(*command: str) -> Iterator[int]:
    """Run a server in a process of its own; `{port}` in its command is filled in."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    process = subprocess.Popen([part.format(port=port) for part in command], cwd=HERE)
    try:
        give_up = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > give_up:
                    raise
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(10)


GRANIAN = (
    *(sys.executable, "-m", "granian", "--interface", "asginl", "--http", "auto", "--no-ws"),
    *("--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning"),
    *("--backpressure", "20000", "client_endpoint:app"),
)
RAW = (sys.executable, str(Path(__file__)), "serve", "--port", "{port}")


def rss_mb() -> float:
    """Resident memory now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def streams(url: str, count: int, pause: float) -> dict[str, Any]:
    """Hold `count` streams open at once, after a run of fifty; CPU per chunk of both."""
    async with fullbore.Client(url, model="bench", concurrency=count, http2=True) as client:

        async def wave(size: int) -> tuple[float, int, float]:
            peak, failed = 0.0, 0
            began = time.process_time()
            async for result in client.map([f"pause={pause}"] * size, buffer=size):
                failed += not result.ok
                peak = max(peak, rss_mb()) if result.index % 50 == 0 else peak
            return (time.process_time() - began) / (size * CHUNKS) * 1e6, failed, peak

        await wave(50)
        few, _, _ = await wave(50)
        many, failed, peak = await wave(count)
    ratio = many / few
    return {
        "streams": count,
        "failed": failed,
        "peak_rss_mb": round(peak, 1),
        "us_per_chunk_at_50": round(few, 1),
        "us_per_chunk": round(many, 1),
        "ratio": round(ratio, 2),
        "ok": failed == 0 and peak <= 300 and ratio <= 1.3,
    }


async def lazy_map(url: str, count: int) -> dict[str, Any]:
    """Map over `count` inputs that exist one at a time; RSS growth after the first hundredth."""
    prompts = (f"item {number}" for number in range(count))
    done, failed, first, peak = 0, 0, 0.0, 0.0
    began = time.monotonic()
    async with fullbore.Client(url, model="bench", concurrency=64) as client:
        async for result in client.map(prompts, stream=False):
            done += 1
            failed += not result.ok
            if done == max(count // 100, 1):
                first = rss_mb()
            if done % 1000 == 0:
                peak = max(peak, rss_mb())
    growth = peak - first
    return {
        "inputs": done,
        "failed": failed,
        "rss_growth_mb": round(growth, 1),
        "per_second": round(done / (time.monotonic() - began)),
        "ok": done == count and failed == 0 and growth < 50,
    }


async def cancel(url: str, count: int, *, http2: bool, seed: int) -> dict[str, Any]:
    """Cancel `count` calls at random moments under load; count what is left of them."""
    rng = random.Random(seed)
    descriptors = len(os.listdir("/proc/self/fd"))
    async with fullbore.Client(url, model="bench", concurrency=64, http2=http2) as client:

        async def one() -> None:
            with anyio.move_on_after(rng.expovariate(1 / 0.06)):
                if rng.random() < 0.5:
                    await client.complete("pause=0.002", on_error="return")
                else:
                    async with client.stream("pause=0.002") as stream:
                        async for _ in stream:
                            pass

        async def worker(share: int) -> None:
            for _ in range(share):
                await one()

        async with anyio.create_task_group() as group:
            for _ in range(100):
                group.start_soon(worker, count // 100)
        await anyio.sleep(0.3)  # resets are on their way
        governor = client._governor
        assert governor is not None
        response = await client.openai._client.get(url)
        running, permits = int(response.text), client.limiter.in_flight
        answered = client.ledger.totals().ok
        check = await client.complete("pause=0")
    await anyio.sleep(0.1)
    left = len(os.listdir("/proc/self/fd")) - descriptors
    ended = {"running_on_the_server": running, "permits": permits, "descriptors": left}
    return {
        "calls": count,
        "http2": http2,
        "answered": answered,
        **ended,
        "ok": check.ok and not any(ended.values()),
    }


def serve(port: int) -> None:
    """Answer every HTTP/1.1 request alike, as cheaply as Python can."""
    import asyncio

    body = json.dumps(
        {
            "choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1},
        }
    ).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
    answer = head + str(len(body)).encode() + b"\r\n\r\n" + body

    class Trivial(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self._transport = transport

        def data_received(self, data: bytes) -> None:
            if data.endswith(b"}"):  # our requests are small: each arrives in one piece or two
                self._transport.write(answer)

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Trivial, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(run())


def main() -> int:
    """Run one soak; 1 if it broke its bound."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("soak", choices=("streams", "map", "cancel", "serve"))
    parser.add_argument("--count", type=int, help="streams, inputs or cancellations")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between chunks")
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--http2", action="store_true", help="for cancel: over HTTP/2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=0, help="for serve")
    options = parser.parse_args()
    if options.soak == "serve":
        serve(options.port)
        return 0
    with served(*(RAW if options.soak == "map" else GRANIAN)) as port:
        url = f"http://127.0.0.1:{port}/v1"

        async def run() -> dict[str, Any]:
            if options.soak == "streams":
                return await streams(url, options.count or 5_000, options.pause)
            if options.soak == "map":
                return await lazy_map(url, options.count or 1_000_000)
            count = options.count or 10_000
            return await cancel(url, count, http2=options.http2, seed=options.seed)

        result = anyio.run(run, backend=options.backend)
    print(json.dumps({"soak": options.soak, "backend": options.backend, **result}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
