"""Lanes and slots of the HTTP/2 transport: opening, filling, draining, replaying, closing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import anyio
import httpx2
import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from fullbore._h2_server import H2Exchange, H2Peer, Handler, ScriptedH2Server
from fullbore.transport.http2 import HTTP2Config, HTTP2Transport

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def session(
    handler: Handler,
    *,
    config: HTTP2Config | None = None,
    settings: Mapping[int, int] | None = None,
    on_connect: Callable[[H2Peer], Awaitable[None]] | None = None,
) -> AsyncIterator[tuple[httpx2.AsyncClient, ScriptedH2Server]]:
    """A server and a client of it; at the end the client has kept to the protocol."""
    server = ScriptedH2Server(handler, settings=settings, on_connect=on_connect)
    transport = HTTP2Transport(prior_knowledge=True, config=config)
    with anyio.fail_after(60):
        async with server:
            client = httpx2.AsyncClient(transport=transport, base_url=server.url, timeout=30)
            async with client:
                yield client, server
            assert server.errors == []


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until a condition holds (the session's guard ends a vain wait)."""
    while not condition():
        await anyio.sleep(0.001)


async def ok(exchange: H2Exchange) -> None:
    await exchange.complete.wait()
    await exchange.respond(b"ok")


async def forever(exchange: H2Exchange) -> None:
    await exchange.start()
    await anyio.sleep_forever()


class Gate:
    """A handler that holds every response until it is opened."""

    def __init__(self) -> None:
        self.opened = anyio.Event()
        self.most = 0

    async def __call__(self, exchange: H2Exchange) -> None:
        self.most = max(self.most, exchange.peer.open_streams)
        await self.opened.wait()
        await exchange.respond(b"ok")


async def get_ok(client: httpx2.AsyncClient, path: str = "/") -> None:
    assert (await client.get(path)).text == "ok"


# Lanes


async def test_lanes_open_as_streams_fill_up() -> None:
    """A connection is opened for what the others cannot take, and no more than that."""
    gate = Gate()
    settings = {SettingCodes.MAX_CONCURRENT_STREAMS: 3}
    async with session(gate, settings=settings) as (client, server):
        await until_idle(client, gate)
        async with anyio.create_task_group() as tasks:
            for count in range(1, 10):
                tasks.start_soon(get_ok, client)
                await until(lambda count=count: server.running == count)
                assert len(server.peers) == -(-count // 3)
            gate.opened.set()
        assert gate.most == 3


async def until_idle(client: httpx2.AsyncClient, gate: Gate) -> None:
    """Make the first connection, so that the server's limit is known."""
    gate.opened.set()
    await get_ok(client)
    gate.opened = anyio.Event()


async def test_own_cap_applies_below_the_server_limit() -> None:
    """`max_streams_per_lane` holds although the server would take more."""
    gate = Gate()
    async with session(gate, config=HTTP2Config(max_streams_per_lane=2)) as (client, server):
        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(get_ok, client)
            await until(lambda: server.running == 6)
            gate.opened.set()
        assert gate.most == 2
        assert len(server.peers) == 3


async def test_streams_go_to_the_least_loaded_lane() -> None:
    """When streams end, the next ones fill the emptier connections first."""
    hold: dict[str, anyio.Event] = {str(number): anyio.Event() for number in range(8)}

    async def handler(exchange: H2Exchange) -> None:
        await hold[exchange.path[1:]].wait()
        await exchange.respond(b"ok")

    config = HTTP2Config(max_streams_per_lane=3)
    async with (
        session(handler, config=config) as (client, server),
        anyio.create_task_group() as tasks,
    ):
        for number in range(6):
            tasks.start_soon(get_ok, client, f"/{number}")
        await until(lambda: server.running == 6)
        crowded, emptied = server.peers
        for exchange in list(emptied.exchanges.values())[:2]:
            hold[exchange.path[1:]].set()
        await until(lambda: server.running == 4)
        tasks.start_soon(get_ok, client, "/6")
        await until(lambda: server.running == 5)
        assert (crowded.open_streams, emptied.open_streams) == (3, 2)
        for event in hold.values():
            event.set()


async def test_more_requests_than_slots_wait_their_turn() -> None:
    """Beyond every lane's capacity requests queue, in order, and all are served."""
    served: list[str] = []

    async def handler(exchange: H2Exchange) -> None:
        served.append(exchange.path)
        await exchange.respond(b"ok")

    config = HTTP2Config(max_lanes=1, max_streams_per_lane=1)
    async with session(handler, config=config) as (client, server):
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(get_ok, client, f"/{number}")
                await anyio.lowlevel.checkpoint()
        assert sorted(served, key=lambda path: int(path[1:])) == served
        assert len(server.peers) == 1


async def test_pool_timeout() -> None:
    """A wait for a slot ends after the pool timeout, and only that request fails."""
    gate = Gate()
    config = HTTP2Config(max_lanes=1, max_streams_per_lane=1)
    async with session(gate, config=config) as (client, server):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(get_ok, client)
            await until(lambda: server.running == 1)
            with pytest.raises(httpx2.PoolTimeout, match="1 connections are full"):
                await client.get("/", timeout=httpx2.Timeout(30, pool=0.05))
            gate.opened.set()
        await get_ok(client)


async def test_server_lowers_its_stream_limit_in_mid_flight() -> None:
    """The open streams finish, no more than the new limit follow, and nobody hangs."""
    gate = Gate()
    config = HTTP2Config(max_lanes=1)
    async with session(gate, config=config) as (client, server):
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(get_ok, client)
            await until(lambda: server.running == 50)
            peer = server.peers[0]
            await peer.settings({SettingCodes.MAX_CONCURRENT_STREAMS: 2})
            await until(lambda: peer.h2.local_settings.max_concurrent_streams == 2)
            for _ in range(50):
                tasks.start_soon(get_ok, client)
            gate.most = 0
            gate.opened.set()
        assert gate.most <= 2


async def test_server_raises_its_stream_limit_from_nothing() -> None:
    """A server that takes no streams yet is waited for."""
    async with (
        session(ok, settings={SettingCodes.MAX_CONCURRENT_STREAMS: 0}) as (client, server),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(get_ok, client)
        await until(lambda: bool(server.peers))
        for peer in server.peers:
            await peer.settings({SettingCodes.MAX_CONCURRENT_STREAMS: 1})


async def test_resets_count_until_the_server_has_seen_them() -> None:
    """A closed stream's slot is free once a PING proves that its reset has arrived."""
    config = HTTP2Config(max_lanes=1, max_streams_per_lane=1)
    async with session(forever, config=config) as (client, server):
        async with client.stream("GET", "/"):
            server.peers[0].stop_reading()
        with pytest.raises(httpx2.PoolTimeout):
            await client.get("/", timeout=httpx2.Timeout(30, pool=0.05))
        server.peers[0].resume_reading()
        async with client.stream("GET", "/"):
            pass


# Failures to connect


async def test_refused_connections_fail_every_waiting_request() -> None:
    """Each request gets an error of its own, at once."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    errors: list[httpx2.ConnectError] = []
    async with httpx2.AsyncClient(transport=HTTP2Transport(prior_knowledge=True)) as client:

        async def one() -> None:
            with pytest.raises(httpx2.ConnectError, match=str(port)) as caught:
                await client.get(f"http://127.0.0.1:{port}/")
            errors.append(caught.value)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(one)
    assert len({id(error) for error in errors}) == 20


async def test_connect_timeout_and_its_slot() -> None:
    """A server that accepts and says nothing: timeout, and the slot is free for the next try."""
    config = HTTP2Config(max_lanes=1)
    transport = HTTP2Transport(prior_knowledge=True, config=config)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        async with httpx2.AsyncClient(transport=transport) as client:
            for _ in range(3):
                with pytest.raises(httpx2.ConnectTimeout):
                    await client.get(url, timeout=httpx2.Timeout(30, connect=0.05))


async def test_cancel_during_connect_gives_the_slot_back() -> None:
    """With one lane at most, a cancelled connect does not stand in the way of the next."""
    transport = HTTP2Transport(prior_knowledge=True, config=HTTP2Config(max_lanes=1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        async with httpx2.AsyncClient(transport=transport, timeout=None) as client:
            for _ in range(5):
                with anyio.move_on_after(0.02) as scope:
                    await client.get(url)
                assert scope.cancelled_caught
            (pool,) = transport._pools.values()
            await until(lambda: not pool.lanes)
            assert pool.waiting == 0


async def test_the_request_that_opened_a_connection_may_go() -> None:
    """Its cancellation leaves the requests that wait for the same connection alone."""
    go = anyio.Event()

    async def on_connect(peer: H2Peer) -> None:
        await go.wait()

    async with session(ok, on_connect=on_connect) as (client, server):
        async with anyio.create_task_group() as tasks:
            first = anyio.CancelScope()

            async def opener() -> None:
                with first:
                    await client.get("/")

            tasks.start_soon(opener)
            await until(lambda: bool(server.peers))
            tasks.start_soon(get_ok, client)
            await anyio.lowlevel.checkpoint()
            first.cancel()
            go.set()
        assert len(server.peers) == 1


async def test_a_further_lane_that_fails_to_open_harms_nobody() -> None:
    """A server that takes one connection only: the rest waits for slots on that one."""
    first: list[H2Peer] = []

    async def on_connect(peer: H2Peer) -> None:
        if first:
            await peer.close()
        first.append(peer)

    settings = {SettingCodes.MAX_CONCURRENT_STREAMS: 1}
    async with (
        session(ok, settings=settings, on_connect=on_connect) as (client, _),
        anyio.create_task_group() as tasks,
    ):
        for _ in range(20):
            tasks.start_soon(get_ok, client)


# Servers that go away


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_goaway_replays_what_was_not_processed_and_finishes_the_rest(method: str) -> None:
    """Streams above last_stream_id go to another lane, also POST; those below end here."""
    go = anyio.Event()

    async def handler(exchange: H2Exchange) -> None:
        if exchange.peer is not server.peers[0]:
            await exchange.respond(b"second")
            return
        await exchange.start()
        await exchange.send(b"fir")
        await go.wait()
        await exchange.send(b"st", end=True)

    async with session(handler) as (client, server):
        results: list[str] = []

        async def one() -> None:
            results.append((await client.request(method, "/", json={})).text)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            await until(lambda: server.running == 1)
            original = server.handler
            server.handler = lambda exchange: (
                anyio.sleep_forever() if exchange.peer is server.peers[0] else original(exchange)
            )
            tasks.start_soon(one)
            await until(lambda: server.running == 2)
            await server.peers[0].goaway_above(1)
            await until(lambda: results == ["second"])
            go.set()
        assert results == ["second", "first"]
        await server.peers[0].ended.wait()


async def test_goaway_does_not_replay_a_body_that_is_gone() -> None:
    """A large generator cannot be sent twice: the error says that it was not processed."""

    async def body() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 65_536

    async def handler(exchange: H2Exchange) -> None:
        await exchange.complete.wait()
        await exchange.peer.goaway_above(0)
        await anyio.sleep_forever()

    async with session(handler) as (client, server):
        with pytest.raises(httpx2.RemoteProtocolError, match="did not process"):
            await client.post("/", content=body())
        assert len(server.peers) == 1


async def test_a_small_generator_body_is_replayed() -> None:
    """What was sent is kept while it is small."""

    async def body() -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"

    async def handler(exchange: H2Exchange) -> None:
        await exchange.complete.wait()
        if exchange.stream_id == 1:
            await exchange.abort(ErrorCodes.REFUSED_STREAM)
        else:
            await exchange.respond(bytes(exchange.body))

    async with session(handler) as (client, _):
        assert (await client.post("/", content=body())).text == "ab"


async def test_refused_streams_are_retried_within_bounds() -> None:
    """REFUSED_STREAM is tried again `max_replays` times, then it is an error."""
    tries = 0

    async def handler(exchange: H2Exchange) -> None:
        nonlocal tries
        tries += 1
        if exchange.path == "/never" or tries < 3:
            await exchange.abort(ErrorCodes.REFUSED_STREAM)
        else:
            await exchange.respond(b"ok")

    async with session(handler, config=HTTP2Config(max_replays=2)) as (client, _):
        await get_ok(client)
        tries = 0
        with pytest.raises(httpx2.RemoteProtocolError, match="REFUSED_STREAM"):
            await client.post("/never", json={})
        assert tries == 3


@pytest.mark.parametrize("goodbye", ["goaway", "silent"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_server_closes_an_idle_connection_as_a_request_is_sent(
    method: str, goodbye: str
) -> None:
    """With a GOAWAY every method is sent again; without, only an idempotent one."""

    async def handler(exchange: H2Exchange) -> None:
        if exchange.stream_id == 1:
            await exchange.respond(b"ok")
        elif exchange.peer is server.peers[0]:
            if goodbye == "goaway":
                await exchange.peer.goaway_above(1)
            await exchange.peer.close()

    server: ScriptedH2Server
    async with session(handler) as (client, server):
        await get_ok(client)
        if (method, goodbye) == ("POST", "silent"):
            with pytest.raises(httpx2.RemoteProtocolError, match="closed the connection"):
                await client.post("/", json={})
        else:
            assert (await client.request(method, "/", json={})).text == "ok"


async def test_an_idle_connection_the_server_has_closed_is_not_used() -> None:
    """The close is noticed at once, so that the next request, of any kind, opens a new one."""
    async with session(ok) as (client, server):
        await get_ok(client)
        (pool,) = client._transport._pools.values()
        await server.peers[0].close()
        await until(lambda: not pool.lanes)
        assert (await client.post("/", json={})).text == "ok"


async def test_idle_connections_expire() -> None:
    """A connection without requests closes itself, with a GOAWAY."""
    async with session(ok, config=HTTP2Config(idle_expiry=0.02)) as (client, server):
        await get_ok(client)
        await server.peers[0].ended.wait()
        assert server.peers[0].goaway is not None
        await get_ok(client)
        assert len(server.peers) == 2


async def test_a_connection_in_use_does_not_expire() -> None:
    """A request that is silent for longer than the idle expiry keeps its connection."""

    async def handler(exchange: H2Exchange) -> None:
        await anyio.sleep(0.1)
        await exchange.respond(b"ok")

    async with session(handler, config=HTTP2Config(idle_expiry=0.01)) as (client, _):
        await get_ok(client)


async def test_a_silent_server_is_pinged_and_given_up() -> None:
    """Without any answer to a PING the connection's requests fail, although no timeout is set."""

    async def handler(exchange: H2Exchange) -> None:
        await exchange.start()
        exchange.peer.stop_reading()
        await anyio.sleep_forever()

    config = HTTP2Config(ping_interval=0.02, ping_timeout=0.02)
    async with session(handler, config=config) as (client, server):
        with pytest.raises(httpx2.ReadError, match="PING"):
            await client.get("/", timeout=None)
        server.peers[0].resume_reading()


async def test_a_quiet_server_that_answers_pings_is_kept() -> None:
    """A long silence before the first token is no reason to give up."""

    async def handler(exchange: H2Exchange) -> None:
        await until(lambda: exchange.peer.pings >= 5)
        await exchange.respond(b"ok")

    async with session(handler, config=HTTP2Config(ping_interval=0.01)) as (client, _):
        await get_ok(client)


# The transport's own end


@pytest.mark.parametrize("headers_sent", [True, False])
async def test_close_with_requests_in_flight(headers_sent: bool) -> None:
    """Readers get an error, waiting requests too, and the server sees its connection go."""
    config = HTTP2Config(max_lanes=1, max_streams_per_lane=1)
    failed: list[httpx2.NetworkError] = []

    async def handler(exchange: H2Exchange) -> None:
        if headers_sent:
            await exchange.start()
        await anyio.sleep_forever()

    async with ScriptedH2Server(handler) as server:
        transport = HTTP2Transport(prior_knowledge=True, config=config)
        client = httpx2.AsyncClient(transport=transport, base_url=server.url, timeout=None)

        async def one() -> None:
            with pytest.raises(
                (httpx2.ReadError, httpx2.ConnectError), match="was closed"
            ) as error:
                await client.get("/")
            failed.append(error.value)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one)
                tasks.start_soon(one)
                (pool,) = await pools(transport)
                await until(lambda: server.running == 1 and pool.waiting == 1)
                await transport.aclose()
                assert pool.lanes == ()
            await server.peers[0].ended.wait()
        assert len(failed) == 2
        with pytest.raises(RuntimeError, match="closed"):
            await client.get("/")


async def pools(transport: HTTP2Transport) -> list[object]:
    await until(lambda: bool(transport._pools))
    return list(transport._pools.values())


async def test_close_while_cancelled_still_closes() -> None:
    """`aclose` in a cancelled task leaves nothing open."""
    async with ScriptedH2Server(ok) as server:
        transport = HTTP2Transport(prior_knowledge=True)
        await httpx2.AsyncClient(transport=transport, base_url=server.url).get("/")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await transport.aclose()
        with anyio.fail_after(30):
            await server.peers[0].ended.wait()


def test_use_from_two_event_loops_is_refused() -> None:
    """The second loop gets a clear error instead of another loop's sockets."""
    transport = HTTP2Transport(prior_knowledge=True)

    async def first() -> None:
        async with ScriptedH2Server(ok) as server:
            await httpx2.AsyncClient(transport=transport, base_url=server.url).get("/")
            await transport.aclose()
        transport._closed = False

    async def second() -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            await httpx2.AsyncClient(transport=transport).get("http://127.0.0.1:1/")

    asyncio.run(first())
    asyncio.run(second())


def test_a_client_that_is_never_closed_ends_with_its_loop() -> None:
    """`asyncio.run` and `trio.run` return, without a warning, when nobody calls `aclose`."""

    async def main() -> None:
        async with ScriptedH2Server(ok) as server:
            transport = HTTP2Transport(prior_knowledge=True)
            await httpx2.AsyncClient(transport=transport, base_url=server.url).get("/")

    anyio.run(main, backend="asyncio")
    anyio.run(main, backend="trio")
