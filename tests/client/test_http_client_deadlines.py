"""The client's limits on time where somebody else reads the answer: SDK streams, `http_client`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import openai
import pytest

from fullbore import Retry, Timeouts, http_client
from fullbore.errors import FirstTokenTimeoutError, StallTimeoutError, TotalTimeoutError
from fullbore.testing import EVENT_STREAM, FaultServer, Reply, Visit, chunk, hold, pieces, sse

pytestmark = [
    pytest.mark.anyio,
    # The SDK leaves its own async generators half read, which trio points out.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HELLO = sse(chunk("hello"))


@asynccontextmanager
async def opened(
    *replies: Reply, timeout: Timeouts, http2: bool = False, attempts: int = 1
) -> AsyncIterator[tuple[openai.AsyncOpenAI, FaultServer, Any]]:
    """The real SDK on a governed client with these limits."""
    with anyio.fail_after(20):
        async with FaultServer(*replies, http2=http2) as server:
            governed = http_client(
                timeout=timeout, http2=http2, retry=Retry(attempts=attempts, base=0)
            )
            async with openai.AsyncOpenAI(
                base_url=server.url, api_key="k", http_client=governed, max_retries=0
            ) as client:
                yield client, server, governed


async def trickling(visit: Visit) -> None:
    """Text without an end, never late."""
    await visit.start(200, EVENT_STREAM)
    while True:
        await visit.send(HELLO)
        await anyio.sleep(0.02)


async def commenting(visit: Visit) -> None:
    """One event, then nothing but signs of life."""
    await visit.start(200, EVENT_STREAM)
    await visit.send(HELLO)
    while True:
        await visit.send(": keep-alive\n\n")
        await anyio.sleep(0.02)


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
@pytest.mark.parametrize(
    ("reply", "limits", "kind"),
    [
        pytest.param(trickling, Timeouts(total=0.3), TotalTimeoutError, id="total"),
        pytest.param(commenting, Timeouts(stall=0.2), StallTimeoutError, id="stall"),
        pytest.param(
            pieces(HELLO, then="hold"), Timeouts(stall=0.1), StallTimeoutError, id="silence"
        ),
        pytest.param(hold(), Timeouts(first_token=0.1), FirstTokenTimeoutError, id="no headers"),
        pytest.param(
            pieces(": soon\n\n", then="hold"),
            Timeouts(first_token=0.1),
            FirstTokenTimeoutError,
            id="no event",
        ),
    ],
)
async def test_a_streamed_answer_that_is_overdue_ends(
    reply: Reply, limits: Timeouts, kind: type[Exception], http2: bool
) -> None:
    """With a timeout the SDK knows, the request gone from the server, and no permit kept."""
    async with opened(reply, timeout=limits, http2=http2) as (client, server, governed):
        with pytest.raises((httpx2.ReadTimeout, openai.APITimeoutError)) as caught:
            stream = await client.chat.completions.create(**CHAT, stream=True)
            async for _ in stream:
                pass
        causes = [caught.value, caught.value.__cause__, getattr(caught.value.__cause__, "error", 0)]
        assert any(isinstance(each, kind) for each in causes)
        await server.until(lambda: server.in_progress == 0)
        totals = governed.ledger.totals()
        assert (totals.ok, totals.failed) == (0, 1)
        assert governed.limiter(server.url).in_flight == 0


async def test_the_total_holds_for_an_answer_that_does_not_stream() -> None:
    """And the next attempt, within the same total, finds no time left."""
    async with opened(hold(), timeout=Timeouts(total=0.2), attempts=3) as (client, server, _):
        with pytest.raises(openai.APITimeoutError, match="timed out"):
            await client.chat.completions.create(**CHAT)
        assert len(server.requests) == 1


async def test_a_late_first_event_is_tried_again() -> None:
    """Nothing has been read, so nothing is delivered twice."""
    limits = Timeouts(first_token=0.2)
    good = pieces(HELLO, sse("[DONE]"))
    async with opened(hold(), good, timeout=limits, attempts=2) as (client, _, governed):
        stream = await client.chat.completions.create(**CHAT, stream=True)
        texts = [each.choices[0].delta.content async for each in stream]
    assert texts == ["hello"]
    assert (governed.ledger.totals().ok, governed.ledger.totals().failed) == (1, 1)


async def test_a_reader_that_is_away_spends_its_own_time() -> None:
    """Neither limit counts it."""
    limits = Timeouts(total=1.0, stall=0.5)
    async with opened(pieces(HELLO, HELLO, sse("[DONE]")), timeout=limits) as (
        client,
        _,
        _governed,
    ):
        stream = await client.chat.completions.create(**CHAT, stream=True)
        texts = []
        async for each in stream:
            texts.append(each.choices[0].delta.content)
            await anyio.sleep(0.7)
    assert texts == ["hello", "hello"]
