"""Each example runs against a live server and prints what its first line promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(script: str, *arguments: str) -> str:
    """Run an example as a user would; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_map(server_url: str) -> None:
    """Every prompt is answered."""
    printed = run("map.py", "Say yes.", "Say no.", "--base-url", f"{server_url}/v1")
    assert {"0", "1"} <= {line.split(" ", 1)[0] for line in printed.splitlines() if line}
    assert "failed" not in printed


def test_stream(server_url: str) -> None:
    """Text arrives."""
    assert run("stream.py", "Say yes.", "--base-url", f"{server_url}/v1").strip()


def test_openai_sdk(server_url: str) -> None:
    """The plain AsyncOpenAI pattern works unchanged, with fewer prompts than the script's 100."""
    printed = run("openai_sdk.py", "--prompts", "8", "--base-url", f"{server_url}/v1")
    assert "8 of 8 answered" in printed


def test_demo(server_url: str, tmp_path: Path) -> None:
    """The demo reports on a few prompts against a server that is already there."""
    few = tmp_path / "few.jsonl"
    lines = (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    few.write_text("\n".join(lines), encoding="utf-8")
    printed = run("demo.py", "--prompts", str(few), "--url", server_url, "--max-tokens", "8")
    assert "4 of 4" in printed
    assert "hypothetical" in printed


def test_demo_fails_when_a_prompt_does(server_url: str, tmp_path: Path) -> None:
    """One refused prompt out of two makes the demo exit with an error that says why."""
    two = tmp_path / "two.jsonl"
    prompts = [{"messages": [{"role": "user", "content": "Hi"}], "top_p": p} for p in (1, -1)]
    two.write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, str(EXAMPLES / "demo.py"), "--prompts", str(two)),
            *("--url", server_url, "--max-tokens", "8"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "top_p" in done.stdout + done.stderr


def test_prompts_are_requests() -> None:
    """Each line of the demo's prompts is a chat request that ends with a user's message."""
    for line in (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        assert set(prompt) == {"messages", "max_tokens"}
        assert prompt["messages"][-1]["role"] == "user"


def test_half_of_the_prompts_share_a_system_prompt() -> None:
    """Sixty-four prompts, and thirty-two of them begin alike, so that a prefix cache shows."""
    lines = (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    first = [json.loads(line)["messages"][0] for line in lines]
    system = [message["content"] for message in first if message["role"] == "system"]
    assert (len(lines), len(system), len(set(system))) == (64, 32, 1)
