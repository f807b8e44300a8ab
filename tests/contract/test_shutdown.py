"""``fullbore serve`` as a process: it announces itself, drains on SIGTERM, and ends with code 0."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from fullbore_backend import BackendError
from fullbore_backend.server import BackgroundServer

CHAT = "/v1/chat/completions"
FLAGS = ["--kv-cache-memory", "64MiB", "--max-model-len", "1024"]


def events(response: httpx2.Response) -> Iterator[str]:
    """The data of each event of a stream, as they come."""
    for line in response.iter_lines():
        if line:
            yield line.removeprefix("data: ")


def story(tokens: int) -> dict[str, object]:
    return {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Tell a story."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }


def test_sigterm_lets_a_running_stream_finish() -> None:
    """Meanwhile health says no, and new requests are refused; then the process ends well."""
    lines: list[str] = []
    with (
        BackgroundServer([*FLAGS, "--shutdown-timeout", "600"], on_line=lines.append) as server,
        httpx2.Client(base_url=server.url, timeout=120) as client,
    ):
        assert client.get("/health").status_code == 200
        with client.stream("POST", CHAT, json=story(80)) as response:
            stream = events(response)
            next(stream)
            server.terminate()
            health = client.get("/health")
            while health.status_code == 200:  # the signal is on its way
                health = client.get("/health")
            assert health.status_code == 503
            assert "shutting down" in health.json()["reason"]
            assert client.post(CHAT, json=story(1)).status_code == 503
            *_, last, done = stream
        assert done == "[DONE]", lines
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
    assert any("try it" in line for line in lines)
    assert not any("Traceback" in line for line in lines)


def test_what_does_not_finish_in_time_is_told_so() -> None:
    """With no time to finish, a running stream ends with an error event, and the exit code is 0."""
    lines: list[str] = []
    with (
        BackgroundServer([*FLAGS, "--shutdown-timeout", "0"], on_line=lines.append) as server,
        httpx2.Client(base_url=server.url, timeout=120) as client,
    ):
        with client.stream("POST", CHAT, json=story(900)) as response:
            stream = events(response)
            next(stream)
            server.terminate()
            *_, last = stream
        assert json.loads(last)["error"]["code"] == "engine_stopped"
        assert server.wait() == 0
    assert not any("Traceback" in line for line in lines)


def test_a_server_that_cannot_start_says_why() -> None:
    """The error carries what the process printed; nothing is left running."""
    with (
        pytest.raises(BackendError, match="block_size"),
        BackgroundServer(["--block-size", "3"]),
    ):
        pass


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the process in /proc")
def test_it_ends_with_the_program_that_started_it() -> None:
    """Even with one that is killed and can clean nothing up."""
    program = (
        "from fullbore_backend.server import BackgroundServer\n"
        f"server = BackgroundServer({FLAGS}, on_line=lambda line: print(server.pid, flush=True))\n"
        "server.__enter__()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and not _is_zombie(child):
        assert time.monotonic() < deadline, "the server outlives its parent"
        time.sleep(0.05)


def _is_zombie(pid: int) -> bool:
    """Whether it has ended, and nobody asked how: its new parent may be slow to."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
