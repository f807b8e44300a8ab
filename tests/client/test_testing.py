"""The fault server, by the eyes of a plain httpx2 client and of ours."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import httpx2
import pytest

from fullbore import AnswerFailedError, Client, ConnectionLostError, MalformedAnswerError, Retry
from fullbore.testing import (
    MALFORMED_STREAMS,
    FaultServer,
    ManualClock,
    Reply,
    answer,
    chunk,
    delayed,
    goaway,
    hang_up,
    pieces,
    rate_limits,
    reset,
    sse,
    status,
    trickle,
    truncated,
)

QUICK = Retry(base=0)
ONCE = Retry(attempts=1)

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_replies_are_taken_in_order_and_the_last_repeats() -> None:
    """And every request is on record."""
    async with FaultServer(status(429, retry_after=61), answer("hello")) as server:
        async with httpx2.AsyncClient() as client:
            got = [await client.post(f"{server.url}/chat/completions", json=CHAT) for _ in "abc"]
        assert [response.status_code for response in got] == [429, 200, 200]
        assert got[0].headers["retry-after"] == "61"
        assert got[1].json()["choices"][0]["message"]["content"] == "hello"
        assert [request.json for request in server.requests] == [CHAT] * 3
        assert server.connections == 1
        assert server.peak == 1


@pytest.mark.parametrize("fault", [reset(), hang_up(), pieces(b"data: x\n\n", then="hang_up")])
async def test_connections_that_break(fault: object) -> None:
    """Are broken for real."""
    async with FaultServer(fault) as server, httpx2.AsyncClient() as client:  # type: ignore[arg-type]
        with pytest.raises(httpx2.TransportError):
            await client.post(f"{server.url}/chat/completions", json=CHAT)
        await server.until(lambda: server.open_connections == 0)


async def test_raw_bytes_are_sent_as_they_are() -> None:
    """Past all of HTTP."""

    async def nonsense(visit: object) -> None:
        await visit.send_raw(b"HTTP/9.9 nonsense\r\n\r\n")  # type: ignore[attr-defined]
        await visit.hang_up()  # type: ignore[attr-defined]

    async with FaultServer(nonsense) as server, httpx2.AsyncClient() as client:
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.post(server.url, json=CHAT)


async def test_an_empty_script_is_refused() -> None:
    """With an example."""
    with pytest.raises(ValueError, match="answer"):
        FaultServer()


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
async def test_the_server_speaks_either_protocol(http2: bool) -> None:
    """The same replies over both; requests and peaks are counted alike."""
    server = FaultServer(answer("one"), status(503), answer("two"), http2=http2)
    async with server, Client(server.url, model="m", http2=http2, retry=QUICK) as client:
        assert (await client.complete("a")).text == "one"
        assert (await client.complete("b", stream=False)).text == "two"
    assert [request.method for request in server.requests] == ["POST"] * 3
    assert server.requests[0].headers["content-type"] == "application/json"
    assert server.connections == server.peak == 1


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
@pytest.mark.parametrize("fault", [truncated(b"data: {"), truncated(b"")], ids=["some", "nothing"])
async def test_a_truncated_piece_is_a_lost_connection(fault: Reply, http2: bool) -> None:
    """Never an answer."""
    server = FaultServer(fault, http2=http2)
    async with server, Client(server.url, model="m", http2=http2, retry=ONCE) as client:
        with pytest.raises(ConnectionLostError):
            await client.complete("a")


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
async def test_a_trickle_is_read_whole(http2: bool) -> None:
    """A byte at a time."""
    stream = sse(chunk("grüße"), chunk(None, finish_reason="stop"), "[DONE]")
    server = FaultServer(trickle(stream, every=0.0), http2=http2)
    async with server, Client(server.url, model="m", http2=http2) as client:
        assert (await client.complete("a")).text == "grüße"


@pytest.mark.parametrize("name", MALFORMED_STREAMS)
async def test_malformed_streams_are_errors(name: str) -> None:
    """Each of them, and once: trying again would not help."""
    server = FaultServer(pieces(MALFORMED_STREAMS[name]))
    async with server, Client(server.url, model="m", retry=QUICK) as client:
        with pytest.raises((MalformedAnswerError, AnswerFailedError)):
            await client.complete("a")
    assert len(server.requests) == 1


async def test_goaway_before_a_request_is_safe_to_repeat() -> None:
    """The transport does so by itself, on another connection: no attempt is lost."""
    server = FaultServer(goaway(), answer("ok"), http2=True)
    async with server, Client(server.url, model="m", http2=True, retry=ONCE) as client:
        result = await client.complete("a")
    assert result.text == "ok"
    assert len(result.attempts) == 1
    assert (len(server.requests), server.connections) == (2, 2)


async def test_goaway_after_a_request_lets_it_finish() -> None:
    """Whose stream is not above the last."""
    server = FaultServer(goaway(answer("ok")), http2=True)
    async with server, Client(server.url, model="m", http2=True, retry=ONCE) as client:
        assert (await client.complete("a")).text == "ok"


async def test_a_delay_may_go_by_a_clock_of_the_tests() -> None:
    """An hour passes when the test says so."""
    clock = ManualClock()
    server = FaultServer(delayed(3600, answer("late"), sleep=clock.sleep))
    async with server, Client(server.url, model="m") as client:
        results = []

        async def ask() -> None:
            results.append(await client.complete("a"))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await server.until(lambda: server.in_progress == 1)
            while not clock.sleeping:
                await anyio.lowlevel.checkpoint()
            clock.advance(3599)
            assert clock.sleeping == 1
            clock.advance(1)
    assert results[0].text == "late"


async def test_sleepers_wake_in_order_and_may_be_cancelled() -> None:
    """By the manual clock."""
    clock, woken = ManualClock(100.0), list[float]()

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    async with anyio.create_task_group() as group:
        for seconds in (3, 1, 2, 0):
            group.start_soon(sleep, seconds)
        with anyio.move_on_after(0.01):
            await clock.sleep(5)
        assert clock.sleeping == 3
        clock.advance(2)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        assert sorted(woken) == [0, 1, 2]
        clock.advance(2)
    assert clock() == 104.0


async def test_rate_limit_headers_are_openais() -> None:
    """Only what is given."""
    assert rate_limits(requests_left=3, tokens_reset="6m0s") == {
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-tokens": "6m0s",
    }
