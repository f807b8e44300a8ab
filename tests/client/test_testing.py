"""The fault server, by the eyes of a plain httpx2 client."""

from __future__ import annotations

import httpx2
import pytest

from fullbore.testing import FaultServer, answer, hang_up, pieces, reset, status

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
