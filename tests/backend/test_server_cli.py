"""``fullbore serve``: flags, sizes, errors on one line, and an import order that starts fast."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fullbore_backend import ConfigError, EngineConfig
from fullbore_backend.cli import build_parser, configs_from, main, parse_size, try_it
from fullbore_backend.server import ServerConfig


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1073741824", 2**30),
        ("2GiB", 2**31),
        ("2gib", 2**31),
        ("1.5 MiB", 3 * 2**19),
        ("500MB", 500 * 10**6),
        ("4k", 4000),
        ("4Ki", 4096),
        ("10B", 10),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """Powers of 1024 with an i, of 1000 without."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 XB", "1e9", "2GiBs"])
def test_what_is_no_size(text: str) -> None:
    """The error shows how to write one."""
    with pytest.raises(argparse.ArgumentTypeError, match="2GiB"):
        parse_size(text)


def test_no_flags_are_the_defaults_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line has no defaults of its own."""
    monkeypatch.delenv("FULLBORE_API_KEY", raising=False)
    assert configs_from(build_parser().parse_args(["serve"])) == (EngineConfig(), ServerConfig())


def test_every_flag_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag sets its own setting."""
    monkeypatch.setenv("FULLBORE_API_KEY", "from the environment")
    flags = (
        "serve --host ::1 --port 0 --model m.gguf --served-name m --precision bf16 --device cpu "
        "--kv-cache-memory 1GiB --block-size 32 --max-model-len 100 --max-num-seqs 4 "
        "--max-num-batched-tokens 64 --max-waiting 8 --no-prefix-caching --cache-dir c "
        "--threads 2 --tls-cert a --tls-key b --shutdown-timeout 1.5"
    )
    engine, server = configs_from(build_parser().parse_args(flags.split()))
    assert engine == EngineConfig(
        model="m.gguf",
        served_name="m",
        precision="bf16",
        device="cpu",
        kv_cache_bytes=2**30,
        block_size=32,
        max_model_len=100,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_waiting=8,
        prefix_caching=False,
        cache_dir=Path("c"),
        num_threads=2,
    )
    assert server == ServerConfig(
        host="::1",
        port=0,
        api_key="from the environment",
        tls_cert=Path("a"),
        tls_key=Path("b"),
        shutdown_timeout=1.5,
    )


def test_a_key_is_never_shown() -> None:
    """Settings may be logged."""
    assert "sesame" not in repr(ServerConfig(api_key="sesame"))
    assert "sesame" not in try_it("http://x", "m", ServerConfig(api_key="sesame"))


def test_help_does_not_wait_for_torch() -> None:
    """Asking for help imports neither the engine nor the server's libraries."""
    script = (
        "import sys\n"
        "from fullbore_backend.cli import main\n"
        "try:\n    main(['serve', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "loaded = {'torch', 'transformers', 'granian', 'starlette'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--block-size", "3"], "block_size"),
        (["--tls-cert", "missing.pem"], "tls_key"),
        (["--port", "70000"], "port"),
        (["--api-key", ""], "api_key"),
    ],
)
def test_settings_that_cannot_work_end_with_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], word: str
) -> None:
    """Exit code 2, no traceback, and the setting's name."""
    assert main(["serve", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "ERROR" in line
    assert word in line


def test_a_port_in_use_is_an_error_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two servers never share a port; the second says so at once."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert "another process uses it" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("host", "key", "expected"),
    [
        ("127.0.0.1", None, False),
        ("::1", None, False),
        ("localhost", None, False),
        ("0.0.0.0", None, True),
        ("0.0.0.0", "k", False),
        ("example.org", None, True),
    ],
)
def test_open_to_others(host: str, key: str | None, expected: bool) -> None:
    """A server that others reach without a key is warned about."""
    assert ServerConfig(host=host, api_key=key).open_to_others is expected


def test_validation_names_the_setting() -> None:
    """Limits below 1 are refused by name."""
    with pytest.raises(ConfigError, match="max_choices"):
        ServerConfig(max_choices=0).validate()
