"""The command line: finds the command, explains itself, names what is missing."""

from __future__ import annotations

import sys
import types

import pytest

import fullbore
from fullbore.cli import main


def test_help_and_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """Both say what there is."""
    assert main([]) == 0
    said = capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == said
    assert "serve" in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """One line."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fullbore {fullbore.__version__}\n"


def test_an_unknown_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, with what there is."""
    with pytest.raises(SystemExit) as ended:
        main(["dance"])
    assert ended.value.code == 2
    assert "serve" in capsys.readouterr().err


def test_serve_is_handed_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--help`` too: the backend knows its flags."""
    backend = types.ModuleType("fullbore_backend.cli")
    calls: list[list[str]] = []
    backend.main = lambda argv: calls.append(argv) or 7  # type: ignore[attr-defined,func-returns-value]
    monkeypatch.setitem(sys.modules, "fullbore_backend", types.ModuleType("fullbore_backend"))
    monkeypatch.setitem(sys.modules, "fullbore_backend.cli", backend)
    assert main(["serve", "--port", "0", "--help"]) == 7
    assert calls == [["serve", "--port", "0", "--help"]]


def test_serve_that_finds_no_torch_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The backend imports it late, after its flags are read."""

    def serve(argv: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    backend = types.ModuleType("fullbore_backend.cli")
    backend.main = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fullbore_backend", types.ModuleType("fullbore_backend"))
    monkeypatch.setitem(sys.modules, "fullbore_backend.cli", backend)
    assert main(["serve"]) == 1
    assert "'torch'" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["fullbore_backend", "torch"])
def test_a_missing_extra_is_named(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the command that installs it."""

    class Absent:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "fullbore_backend" or name.startswith("fullbore_backend."):
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    for name in [name for name in sys.modules if name.startswith("fullbore_backend")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    assert main(["serve"]) == 1
    assert "pip install 'fullbore[backend]'" in capsys.readouterr().err
