"""The README does what it says: its Python and curl run, its commands and links exist.

Wherever it names a local server it says ``http://127.0.0.1:8000``; the tests run the same text
against a live server on another port.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LOCAL = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    """The fenced blocks of this language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """Every command line in the README that starts with this program, split into words."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    return [
        words[index:]
        for line in text.splitlines()
        for part in re.split(r"&&|\|", line)
        if program in (words := shlex.split(part, comments=True))
        for index in [words.index(program)]
    ]


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.split("\n", 1)[0])
def test_python_runs(code: str, server_url: str) -> None:
    """Each Python block is a whole script."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code.replace(LOCAL, server_url)],
        env={**os.environ, "OPENAI_API_KEY": "none", "OXLO_API_KEY": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout


def test_the_client_example_has_ten_lines() -> None:
    """The first Python block is the promise of the front page."""
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 10


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
@pytest.mark.parametrize("words", commands("curl"), ids=lambda words: words[-1][:40])
def test_curl_runs(words: list[str], server_url: str) -> None:
    """Each curl command is answered without an error."""
    command = [word.replace(LOCAL, server_url) for word in words]
    done = subprocess.run([*command, "--fail"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout


def test_nox_sessions_exist() -> None:
    """Each ``nox -s NAME`` names a session of the noxfile."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    sessions = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("nox.session" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    named = set(re.findall(r"nox -s (\w+)", README))
    assert named
    assert named <= sessions


def test_serve_flags_exist() -> None:
    """Each flag given to ``fullbore serve`` is in its help text."""
    flags = {
        word.partition("=")[0]
        for words in commands("fullbore")
        if words[1:2] == ["serve"]
        for word in words
        if word.startswith("--")
    } | set(re.findall(r"`(--[a-z-]+)", README))
    done = subprocess.run(
        [sys.executable, "-m", "fullbore_backend.cli", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert flags <= set(re.findall(r"--[a-z][a-z-]*", done.stdout))


def test_links_lead_somewhere() -> None:
    """Each relative link, and each path of the folder map, exists."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    paths = re.findall(r"^\| `([^`]+/)` \|", README, flags=re.MULTILINE)
    missing = [path for path in [*links, *paths] if not (ROOT / path).exists()]
    assert not missing


def test_it_stays_short() -> None:
    """A front page, not a manual."""
    assert len(README.splitlines()) <= 150
