"""Everything that needs a GPU to be tested: kernels against their twins, and the engine on them.

Each test file runs in a process of its own, several at once, as most of the time goes into
compiling kernels; a fault that takes the device's context along then spoils one file. Ends with
status 1 unless every file passed; what the time did not suffice for is listed. Needs pytest, and
none of the plugins that its configuration names.

    python bench/gpu_check.py --limit-s 460
    python bench/gpu_check.py --only rms_norm
    python bench/gpu_check.py --rehearse      # without a GPU: the engine's tests, on the CPU
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE_TESTS = ROOT / "tests" / "backend" / "test_gpu.py"
ENGINE_PARTS = (
    "likeliest and fp32",
    "likeliest and bf16",
    "graphs",
    "not likeliest and not graphs",
)
"""The engine's tests in parts, as they take the longest."""

ELSEWHERE = {"test_compile.py"}
"""Tests of kernels that need no device."""

PYTEST = """
import importlib.util, sys
import pytest

class Options:
    '''Lets the configuration name the options of a plugin that is not installed.'''

    @staticmethod
    def pytest_addoption(parser):
        if importlib.util.find_spec("pytest_timeout") is None:
            parser.addini("timeout", "read by pytest-timeout")

sys.exit(pytest.main(sys.argv[1:], plugins=[Options()]))
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A test file, or those of its tests that an expression selects."""

    path: Path
    selection: str = ""

    def __str__(self) -> str:
        name = str(self.path.relative_to(ROOT))
        return f"{name} -k '{self.selection}'" if self.selection else name

    def command(self) -> list[str]:
        """Run it without plugins."""
        # The engine's tests need no fixture of their folder, whose conftest wants more libraries.
        alone = ["--noconftest"] if self.path == ENGINE_TESTS else []
        selection = ["-k", self.selection] if self.selection else []
        # A newer library's warning is no fault of a kernel.
        quiet = ("-q", "-W", "default", "--tb=short", "-p", "no:cacheprovider")
        return [sys.executable, "-c", PYTEST, str(self.path), *alone, *selection, *quiet]


def parts(*, rehearse: bool) -> list[Part]:
    """All there is to run, in order."""
    engine = [Part(ENGINE_TESTS, selection) for selection in ENGINE_PARTS]
    if rehearse:
        return engine
    kernels = sorted((ROOT / "tests" / "kernels").glob("test_*.py"))
    return [*engine, *(Part(path) for path in kernels if path.name not in ELSEWHERE)]


class Running:
    """A part under way. Its output goes to a file, so that no pipe fills up."""

    def __init__(self, part: Part, log: Path, *, rehearse: bool, arguments: Sequence[str]) -> None:
        self.part, self._log, self._began = part, log, time.monotonic()
        sources = [str(ROOT / source) for source in ("client", "backend")]
        path = [*sources, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "TRITON_INTERPRET": "1" if rehearse else "0",
        }
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*part.command(), *arguments],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End it with all that it has started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def report(self, verdict: str) -> None:
        """Print a line, and the end of the log of what did not pass."""
        lines = self._log.read_text(errors="replace").splitlines() or ["no output"]
        seconds = time.monotonic() - self._began
        print(f"{verdict:6} {seconds:5.0f} s  {self.part}: {lines[-1]}", flush=True)
        if verdict != "passed":
            print("\n".join(f"    {line[:300]}" for line in lines[-60:]), flush=True)


def check(
    waiting: list[Part], *, jobs: int, limit_s: float, rehearse: bool, arguments: Sequence[str]
) -> bool:
    """Run them, ``jobs`` at once; true if all passed within the time."""
    deadline = time.monotonic() + limit_s
    running, passed = list[Running](), True
    with tempfile.TemporaryDirectory() as folder:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < jobs:
                log = Path(folder, f"{len(waiting)}.log")
                part = waiting.pop(0)
                running.append(Running(part, log, rehearse=rehearse, arguments=arguments))
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                each.report("passed" if each.process.returncode == 0 else "FAILED")
                passed &= each.process.returncode == 0
            time.sleep(0.1)
        for each in running:
            each.kill()
            each.report("cut")
    for part in waiting:
        print(f"not run, for want of time: {part}")
    return passed and not running and not waiting


def main() -> None:
    """Check, and end with the verdict as status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-s", type=float, default=460.0, help="seconds in all")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--only", default="", help="part of the names of the files to run")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    options = parser.parse_args()
    if not options.rehearse:
        import torch

        if not torch.cuda.is_available():
            parser.error("torch finds no CUDA device here; --rehearse runs what can run without.")
    wanted = [part for part in parts(rehearse=options.rehearse) if options.only in str(part)]
    if not wanted:
        parser.error(f"no test file has {options.only!r} in its name.")
    ok = check(
        wanted,
        jobs=options.jobs,
        limit_s=options.limit_s,
        rehearse=options.rehearse,
        arguments=options.arguments,
    )
    print("everything passed" if ok else "NOT everything passed")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
