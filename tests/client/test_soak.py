"""Many of everything: memory stays flat, and cancelling leaves nothing, however it is timed.

The small versions run always; the large ones are ``bench/soak.py``, run here under ``slow``.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx2
import pytest

from fullbore import Client
from fullbore.testing import FaultServer, Visit, answer, chunk, sse

SOAK = Path(__file__).parents[2] / "bench" / "soak.py"


def rss_mb() -> float:
    """Resident memory now, in MB."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("reads resident memory from /proc")
    return int(statm.read_text().split()[1]) * 4096 / 1e6


class Trivial(httpx2.AsyncBaseTransport):
    """A scripted endpoint without a network."""

    CONTENT = b'{"choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}]}'

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await anyio.lowlevel.checkpoint()
        return httpx2.Response(200, content=self.CONTENT)


@pytest.mark.anyio
@pytest.mark.parametrize("ordered", [False, True], ids=["as finished", "ordered"])
async def test_twenty_thousand_lazy_inputs_in_flat_memory(ordered: bool) -> None:
    """Neither inputs nor results pile up."""
    pulled = 0

    async def prompts() -> AsyncIterator[str]:
        nonlocal pulled
        for number in range(20_000):
            pulled += 1
            yield f"item {number} " + "x" * 2_000

    done, start = 0, 0.0
    async with Client("http://x/v1", model="m", concurrency=32, transport=Trivial()) as client:
        async for result in client.map(prompts(), ordered=ordered, stream=False):
            assert result.ok
            assert pulled - done <= 32 + 64 + 1 + 1
            done += 1
            if done == 2_000:
                start = rss_mb()
    assert done == 20_000
    assert rss_mb() - start < 20  # all inputs together would be 40


@pytest.mark.anyio
@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
async def test_randomly_timed_cancellations_leave_nothing(http2: bool) -> None:
    """No permit, no stream, no running request at the server; the next call works."""
    rng = random.Random(7)

    async def slowly(visit: Visit) -> None:
        await visit.start(200, {"content-type": "text/event-stream"})
        for _ in range(20):
            await visit.send(sse(chunk("x")))
            await anyio.sleep(0.001)
        await visit.send(sse(chunk(None, finish_reason="stop"), "[DONE]"))
        await visit.end()

    server = FaultServer(slowly, http2=http2)
    async with server, Client(server.url, model="m", concurrency=16, http2=http2) as client:

        async def call() -> None:
            with anyio.move_on_after(rng.expovariate(1 / 0.02)):
                if rng.random() < 0.3:
                    async with client.stream("hi") as stream:
                        async for _ in stream:
                            pass
                elif rng.random() < 0.5:
                    await client.map(["a", "b"])
                else:
                    await client.complete("hi")

        async with anyio.create_task_group() as group:
            for _ in range(20):

                async def worker() -> None:
                    for _ in range(15):
                        await call()

                group.start_soon(worker)
        await server.until(lambda: server.in_progress == 0)
        assert client.limiter.in_flight == 0
        assert (await client.complete("hi")).text == "x" * 20
        assert client.ledger.totals().cancelled > 0
    await server.until(lambda: server.open_connections == 0)


@pytest.mark.anyio
async def test_hundreds_of_streams_at_once() -> None:
    """Over as few connections as HTTP/2 needs, none failed."""
    everyone = anyio.Event()

    async def together(visit: Visit) -> None:
        if server.in_progress == 350:
            everyone.set()
        await everyone.wait()
        await answer("one two three")(visit)

    server = FaultServer(together, http2=True)
    async with server, Client(server.url, model="m", concurrency=350, http2=True) as client:
        results = await client.map(["a"] * 350)
        assert all(result.text == "one two three" for result in results)
        assert server.peak == 350
        assert server.connections == 4  # of a hundred streams


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "arguments",
    [
        "streams",
        "map",
        "cancel",
        "cancel --http2",
        "cancel --backend trio",
        "cancel --backend trio --http2",
    ],
)
def test_soak(arguments: str) -> None:
    """As large as promised; the script holds the bounds."""
    done = subprocess.run(
        [sys.executable, str(SOAK), *arguments.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
