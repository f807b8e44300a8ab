"""The benchmark of GPUs runs whole, tiny and interpreted, and survives what it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
PACKAGES = (ROOT / "client", ROOT / "backend")


def run(*arguments: str, path: tuple[Path, ...] = (), timeout: float = 170.0) -> str:
    """Run Python on ``arguments``; what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, *PACKAGES, BENCH)))},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_case_runs(tmp_path: Path) -> None:
    """Each is right, timed and put beside its ceiling, or says why it cannot be."""
    pytest.importorskip("triton")
    out = tmp_path / "gpu.json"
    printed = run(str(BENCH / "gpu.py"), "--tiny", "--limit-s", "160", "--out", str(out))
    result = json.loads(out.read_text())
    assert result["not_run"] == []
    assert result["tiny"] is True
    assert result["commit"]
    rows = {row["name"]: row for row in result["rows"]}
    assert {name.split("/")[0] for name in rows} >= {"ceilings", "attention", "linear", "engine"}
    assert [row for row in rows.values() if "failed" in row] == []
    for name, row in rows.items():
        assert f"| {name} |" in printed
        if row.get("checked"):
            assert 0 <= row["share"] < 10, name
            assert row["bound"] in ("memory", "bf16", "fp8", "int8")
        assert "skipped" in row or {"us", "wall_us", "seconds"} & row.keys(), name
    assert rows["engine/greedy"]["output_tokens_per_s"] > 0


FAULTY_WORKER = """
import os, time

def serve(pipe, *, tiny, only, done):
    pipe.send(("device", {"name": "faulty"}))
    names = ["good", "dies", "hangs", "good again", "never"]
    pipe.send(("plan", names))
    for name in names:
        if name in done:
            continue
        pipe.send(("begin", name, 1.0 if name == "hangs" else 60.0))
        if name == "dies":
            os._exit(9)
        if name in ("hangs", "never"):
            time.sleep(60)
        pipe.send(("row", name, {"us": 1.0}))
    pipe.send(("end",))
"""
SUPERVISE = """
import sys, time
from pathlib import Path
import gpu

if __name__ == "__main__":
    results = gpu.Results(path=Path(sys.argv[1]), header={})
    gpu.measure(results, tiny=True, only="", deadline=time.monotonic() + 6)
    results.save()
"""


def test_a_case_that_dies_or_hangs_costs_no_other(tmp_path: Path) -> None:
    """And when the time is up, what was measured is kept and the rest is listed."""
    (tmp_path / "gpu_worker.py").write_text(FAULTY_WORKER)
    script = tmp_path / "supervise.py"
    script.write_text(SUPERVISE)
    run(str(script), str(tmp_path / "out.json"), path=(tmp_path,))
    result = json.loads((tmp_path / "out.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["good"]["us"] == rows["good again"]["us"] == 1.0
    assert "ended with 9" in rows["dies"]["failed"]
    assert "no answer within 1 s" in rows["hangs"]["failed"]
    assert result["not_run"] == ["never"]


BLOCKED = """
import importlib, importlib.abc, pkgutil, runpy, sys

blocked = {"starlette", "granian", "openai", "httpx2", "gguf", "msgspec", "llguidance", "nox",
           "aiohttp", "genai_prices", "rich"}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked by the test", name=name)

sys.meta_path.insert(0, Blocker())
import fullbore_backend
from fullbore_backend import engine, kernels, layers, loading, models

for package in (kernels, layers, models):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
import gpu, gpu_check, gpu_worker
blocked -= {"httpx2"}  # transformers', which the tests take as their oracle, may want it
for path in sys.argv[1:]:
    runpy.run_path(path)
"""


def test_all_of_it_imports_where_only_torch_is_installed() -> None:
    """As on a GPU box with torch, triton, transformers and pytest: kernels, and their tests too."""
    files = [*sorted((ROOT / "tests" / "kernels").glob("*.py")), ROOT / "tests/backend/test_gpu.py"]
    run("-c", BLOCKED, *map(str, files))


def test_the_engines_tests_run_without_plugins_or_a_gpu() -> None:
    """The way in which they run on a GPU, one of them on the CPU."""
    script = str(BENCH / "gpu_check.py")
    selected = ("--rehearse", "--only", "not likeliest", "--", "-k", "bits and qwen3")
    assert "everything passed" in run(script, *selected)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that turns rows into shares."""
    monkeypatch.syspath_prepend(BENCH)
    import gpu_report

    return gpu_report


def test_shares_are_of_the_nearer_ceiling(report: Any) -> None:
    rows = {
        "ceilings/copy": {"us": 1.0, "ceiling": 3e12, "of": "memory"},
        "ceilings/read": {"us": 1.0, "ceiling": 4e12, "of": "memory"},
        "ceilings/bf16": {"us": 1.0, "ceiling": 8e14, "of": "bf16"},
        "decode": {"us": 2.0, "bytes": 4e6, "operations": 8e6, "rate": "bf16"},
        "prefill": {"us": 4.0, "bytes": 4, "operations": 8e8, "rate": "bf16"},
        "wrong": {"us": 4.0, "bytes": 4e6, "operations": 0, "failed": "differs"},
    }
    shares = report.add_shares(rows)
    assert (shares["decode"]["bound"], shares["decode"]["share"]) == ("memory", 0.5)
    assert (shares["prefill"]["bound"], shares["prefill"]["share"]) == ("bf16", 0.25)
    assert "share" not in shares["wrong"]
    text = report.table(shares, ["late"])
    assert "| decode | 2.0 | memory | 50.0% |" in text
    assert "FAILED: differs" in text
    assert "Not run, for want of time: late." in text


def test_what_a_step_must_move_and_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the published sizes: 8.2 billion weights; 30.5 billion, of which 3.3 are used."""
    monkeypatch.syspath_prepend(BENCH)
    from gpu_models import resident_bytes, shape, step_bytes, step_operations

    dense, sparse = (shape(name, tiny=False) for name in ("Qwen3-8B", "Qwen3-30B-A3B"))
    assert resident_bytes(dense, 0) / 2 == pytest.approx(8.19e9, rel=0.01)
    assert resident_bytes(sparse, 0) / 2 == pytest.approx(30.5e9, rel=0.01)
    embedding = 151_936 * 2048
    assert step_operations(sparse, 1, 0) / 2 + embedding == pytest.approx(3.3e9, rel=0.02)
    assert step_bytes(sparse, 1, 0) / 2 + embedding == pytest.approx(3.3e9, rel=0.02)
    per_token = 2 * 36 * 8 * 128 * 2
    assert step_bytes(dense, 4, 1000) - step_bytes(dense, 4, 0) == 4000 * per_token
    assert resident_bytes(dense, 1000) - resident_bytes(dense, 0) == 1000 * per_token


def test_a_union_of_spans_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    from gpu_engine import covered

    assert covered([(0, 10), (2, 5), (8, 12), (20, 21)]) == 13
