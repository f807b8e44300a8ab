"""The client itself: settings, keys, whose loop it lives in, what it sends through."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys

import anyio
import anyio.abc
import httpx
import httpx2
import pytest

from fullbore import (
    BadRequestError,
    Client,
    ClientClosedError,
    ConfigError,
    ConnectionLostError,
    Retry,
    WrongLoopError,
)
from fullbore.pricing import CatalogPlan
from fullbore.testing import FaultServer, answer, hold, reset, status, truncated
from fullbore.transport.connect import check_descriptors, environment_proxy

KEY = "sk-very-secret"


def test_openai_is_the_default_with_its_key_and_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the model is needed."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    client = Client(model="gpt-4o-mini")
    assert "api.openai.com" in repr(client)
    assert isinstance(client._settings.pricing, CatalogPlan)


def test_a_missing_key_names_the_variable() -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        Client("https://api.openai.com/v1", model="gpt-4o-mini")
    with pytest.raises(ConfigError, match="OXLO_API_KEY"):
        Client("https://api.oxlo.ai/v1", model="qwen-3-32b")


@pytest.mark.anyio
async def test_the_key_of_one_host_is_not_sent_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither OpenAI's to a local server, nor to any other name."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    async with FaultServer(answer("x")) as server:
        async with Client(server.url, model="m") as client:
            await client.complete("hi")
            await client.openai.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}]
            )
        assert not any("authorization" in request.headers for request in server.requests)
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        async with Client(model="m") as client:
            await client.complete("hi")
        assert server.requests[-1].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.anyio
async def test_the_key_is_in_no_repr_and_no_error() -> None:
    """Wherever a user might print it."""
    async with (
        FaultServer(status(401)) as server,
        Client(server.url, model="m", api_key=KEY, retry=Retry(attempts=1)) as client,
    ):
        result = await client.complete("hi", on_error="return")
        shown = f"{client!r} {client._governor!r} {result!r} {vars(result.error)!r}"
    assert KEY not in shown
    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("key", ["", "sk-1\n", "sk 1", "sk-ü"], ids=repr)
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    """Without showing it."""
    with pytest.raises(ConfigError, match="newline"):
        Client("http://localhost/v1", model="m", api_key=key)


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://x/v1", "/v1", "http://"], ids=repr)
def test_a_base_url_that_is_none_is_refused(url: str) -> None:
    """With an example of one."""
    with pytest.raises(ConfigError, match="base URL"):
        Client(url, model="m")


@pytest.mark.parametrize("concurrency", [0, -1, 2.5, "many", True], ids=repr)
def test_senseless_concurrency_is_refused(concurrency: object) -> None:
    """What is accepted is said."""
    with pytest.raises(ConfigError, match="'auto'"):
        Client("http://localhost/v1", model="m", concurrency=concurrency)  # type: ignore[arg-type]


def test_file_descriptors_are_checked_at_the_start() -> None:
    """Not found out in the middle of a run."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_descriptors(1)
    if hard != resource.RLIM_INFINITY:
        with pytest.raises(ConfigError, match="ulimit"):
            check_descriptors(hard)


def test_proxies_of_the_environment_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As httpx2 users expect, with NO_PROXY."""
    monkeypatch.setenv("http_proxy", "127.0.0.1:3128")
    monkeypatch.setenv("no_proxy", "internal.example")
    assert environment_proxy(httpx2.URL("http://api.example/v1")) == "http://127.0.0.1:3128"
    assert environment_proxy(httpx2.URL("https://api.example/v1")) is None
    assert environment_proxy(httpx2.URL("http://internal.example/v1")) is None


@pytest.mark.anyio
async def test_a_client_that_is_not_open_says_how_to_open_it() -> None:
    """Before and after."""
    client = Client("http://localhost/v1", model="m")
    with pytest.raises(ClientClosedError, match=r"not open yet.*async with"):
        client.map(["a"])
    async with client:
        pass
    with pytest.raises(ClientClosedError, match="closed"):
        await client.complete("a")
    with pytest.raises(ClientClosedError, match="once"):
        async with client:
            pass


def test_a_client_used_from_another_loop_says_so() -> None:
    """Instead of hanging."""
    client = Client("http://localhost/v1", model="m")
    caught: list[BaseException] = []

    async def use() -> None:
        try:
            await client.complete("a")
        except WrongLoopError as exc:
            caught.append(exc)

    async def main() -> None:
        async with client:
            await asyncio.to_thread(asyncio.run, use())

    asyncio.run(main())
    assert len(caught) == 1
    assert "one client per event loop" in str(caught[0])


def test_open_and_close_may_happen_in_different_tasks() -> None:
    """Test fixtures and web frameworks do that."""

    async def main() -> None:
        async with FaultServer(answer("x")) as server:
            client = Client(server.url, model="m")
            await asyncio.create_task(client.__aenter__())
            run = client.map(["a", "b"])
            assert len(await asyncio.create_task(run._collect())) == 2
            await asyncio.create_task(client.aclose())

    asyncio.run(main())


@pytest.mark.anyio
async def test_a_client_of_the_users_own_is_sent_through_and_left_open() -> None:
    """Its hooks apply."""
    seen = []

    async def note(request: httpx2.Request) -> None:
        seen.append(request.url.path)

    async with (
        FaultServer(answer("x")) as server,
        httpx2.AsyncClient(event_hooks={"request": [note]}) as mine,
    ):
        async with Client(server.url, model="m", http_client=mine) as client:
            assert (await client.complete("hi")).text == "x"
        assert not mine.is_closed
    assert seen == ["/v1/chat/completions"]


@pytest.mark.anyio
async def test_a_client_of_httpx_is_sent_through_too() -> None:
    """Its hooks apply, streams stream, and its errors are retried as httpx2's are."""
    seen = []

    async def note(request: httpx.Request) -> None:
        seen.append(request.url.path)

    async with (
        FaultServer(reset(), answer("one two"), status(400)) as server,
        httpx.AsyncClient(event_hooks={"request": [note]}) as mine,
    ):
        retry = Retry(base=0.001)
        async with Client(server.url, model="m", http_client=mine, retry=retry) as client:
            async with client.stream("hi") as stream:
                assert "".join([delta async for delta in stream]) == "one two"
            refused = await client.complete("hi", on_error="return")
            assert isinstance(refused.error, BadRequestError)
        assert not mine.is_closed
    assert seen == ["/v1/chat/completions"] * 3


@pytest.mark.anyio
async def test_a_broken_answer_of_httpx_is_a_typed_error_with_its_text() -> None:
    """Errors within the body are translated like those before it."""
    half = 'data: {"choices": [{"delta": {"content": "one"}}]}\n\n'
    async with FaultServer(truncated(half)) as server, httpx.AsyncClient() as mine:
        once = Retry(attempts=1)
        async with Client(server.url, model="m", http_client=mine, retry=once) as client:
            result = await client.complete("hi", on_error="return")
    assert isinstance(result.error, ConnectionLostError)
    assert result.text == "one"


def test_a_client_of_another_library_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is a builtins\.object; it must be an httpx2"):
        Client("http://x/v1", model="m", http_client=object())  # type: ignore[arg-type]


def test_httpx_is_not_imported_without_need() -> None:
    """It is an extra."""
    code = "import sys, fullbore; print('httpx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.anyio
async def test_a_transport_of_the_users_own() -> None:
    """Tests without a network, say."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json={"choices": [{"message": {"content": "mocked"}}]})

    async with Client("http://x/v1", model="m", transport=httpx2.MockTransport(handle)) as client:
        assert (await client.complete("hi")).text == "mocked"
    with pytest.raises(ConfigError, match="not both"):
        Client(
            "http://x/v1",
            model="m",
            transport=httpx2.MockTransport(handle),
            http_client=httpx2.AsyncClient(),
        )


@pytest.mark.anyio
async def test_more_requests_than_any_default_pool_are_in_flight_at_once() -> None:
    """No hidden limit of 100 connections under ours."""
    everyone = anyio.Event()

    async with FaultServer(lambda visit: reply(visit)) as server:

        async def reply(visit: object) -> None:
            if server.in_progress == 150:
                everyone.set()
            await everyone.wait()
            await answer("x")(visit)  # type: ignore[arg-type]

        async with Client(server.url, model="m", concurrency=150) as client:
            results = await client.map(["a"] * 150)
    assert all(result.ok for result in results)
    assert server.peak == 150


@pytest.mark.parametrize("module", ["openai", "rich", "genai_prices", "torch", "transformers"])
def test_importing_is_light(module: str) -> None:
    """What is heavy is loaded when it is first needed."""
    code = f"import sys, fullbore; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_plain_asyncio_tools_work() -> None:
    """``gather`` and ``wait_for`` cancel natively, not through anyio."""

    async def main() -> None:
        async with (
            FaultServer(answer("x"), answer("x"), hold()) as server,
            Client(server.url, model="m", concurrency=4) as client,
        ):
            both = await asyncio.gather(client.map(["a"]), client.complete("b"))
            assert both[0][0].text == both[1].text == "x"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.map(["a"] * 3), 0.1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.complete("a"), 0.1)
            await server.until(lambda: server.in_progress == 0)
            assert client.limiter.in_flight == 0

    asyncio.run(main())


@pytest.mark.anyio
async def test_http2_over_cleartext_is_spoken_outright() -> None:
    """The flag means what it says, where nobody can be asked."""
    preface = b""

    async def handle(stream: anyio.abc.SocketStream) -> None:
        nonlocal preface
        async with stream:
            preface = await stream.receive()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, handle)
        url = f"http://127.0.0.1:{port}/v1"
        async with Client(url, model="m", http2=True, retry=Retry(attempts=1)) as client:
            assert not (await client.complete("hi", on_error="return")).ok
        group.cancel_scope.cancel()
    assert preface.startswith(b"PRI * HTTP/2.0")
