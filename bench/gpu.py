"""What share of a GPU's speed does each kernel reach, and a decode step, and the whole engine?

First the ceilings of this very device are measured: bandwidth, matrix rates, launches. Then each
operation's time is compared with the least that its bytes and operations can take under them; by
which formulas, the docstrings of the cases say. Each case checks its result before it is timed.
The most important sections come first, and each row is written to the JSON file as it comes: what
the time did not suffice for is listed there.

    python bench/gpu.py --limit-s 460                  # everything there is time for
    python bench/gpu.py --only attention/              # the ceilings, and cases so named
    python bench/gpu.py --tiny --out /tmp/tiny.json    # on any CPU: shows that this file works
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_report import add_shares, table
from record import circumstances, save

PACKAGES = ("fullbore", "torch", "triton", "transformers")
START_PATIENCE = 120.0
"""Seconds for a worker to import and to find its device."""


@dataclass(kw_only=True)
class Results:
    """What is known so far, and where it is kept."""

    path: Path | None
    header: Mapping[str, Any]
    device: Mapping[str, Any] = field(default_factory=dict)
    planned: Sequence[str] = ()
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def not_run(self) -> list[str]:
        """Names of cases without a row."""
        return [name for name in self.planned if name not in self.rows]

    def save(self) -> Path:
        """Write everything."""
        rows = [{"name": name, **row} for name, row in add_shares(self.rows).items()]
        return save(
            "gpu",
            {**self.header, "device": self.device, "rows": rows, "not_run": self.not_run},
            self.path,
        )


class Worker:
    """A process that measures what has no row yet; see :mod:`gpu_worker`."""

    def __init__(self, *, tiny: bool, only: str, done: frozenset[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_work, args=(theirs,), kwargs={"tiny": tiny, "only": only, "done": done}
        )
        self._process.start()
        theirs.close()

    def messages(self, deadline: float) -> Iterator[tuple[Any, ...]]:
        """What it sends, until it ends.

        :param deadline: by ``time.monotonic``.
        :raises TimeoutError: when it is silent for longer than its case may take, or time is up.
        """
        patience = START_PATIENCE
        while True:
            if not self._pipe.poll(max(0.0, min(patience, deadline - time.monotonic()))):
                raise TimeoutError(f"no answer within {patience:.0f} s")
            try:
                message = self._pipe.recv()
            except EOFError:
                return
            patience = message[2] if message[0] == "begin" else START_PATIENCE
            yield message

    def end(self, *, patience: float) -> int | None:
        """End the process unless it does so itself; returns its status."""
        self._process.join(patience)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode


def _work(pipe: Any, **options: Any) -> None:
    import gpu_worker  # brings in torch, which only the worker needs

    gpu_worker.serve(pipe, **options)


def measure(results: Results, *, tiny: bool, only: str, deadline: float) -> None:
    """Let one worker after the other measure, until all is done or the time is up."""
    while True:
        worker = Worker(tiny=tiny, only=only, done=frozenset(results.rows))
        under_way, fault, before = None, "", len(results.rows)
        try:
            for kind, *content in worker.messages(deadline):
                if kind == "begin":
                    under_way = content[0]
                elif kind == "row":
                    results.rows[content[0]], under_way = content[1], None
                    print(f"{content[0]}: {_brief(content[1])}", file=sys.stderr, flush=True)
                    results.save()
                elif kind == "device":
                    results.device = {**content[0], **_nvidia_smi()}
                elif kind == "plan":
                    results.planned = content[0]
                else:
                    return
        except TimeoutError as error:
            fault = str(error)
        finally:
            status = worker.end(patience=0 if fault else 10)
        if time.monotonic() >= deadline:
            return
        if under_way is not None:
            results.rows[under_way] = {"failed": fault or f"the process ended with {status}"}
        elif len(results.rows) == before:
            raise SystemExit(fault or f"the measuring process ended with status {status}.")


def _brief(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("bytes", "rate"))


def _nvidia_smi() -> dict[str, str]:
    """Driver, power limit and clocks, as far as they can be asked for."""
    fields = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory")
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    found = done.stdout.splitlines()[0].split(", ")
    return dict(zip(fields, found, strict=False))


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-s", type=float, default=460.0, help="seconds in all")
    parser.add_argument("--only", default="", help="part of the names of the cases to measure")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, interpreted, tiny sizes")
    parser.add_argument("--out", type=Path, help="the JSON file; default: bench/results/")
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_s
    if options.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # read by the worker, when kernels are defined
        if options.out is None:
            parser.error("--tiny measures nothing worth keeping: name a file with --out.")
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    results = Results(
        path=options.out,
        header={**circumstances(PACKAGES), "tiny": options.tiny, "limit_s": options.limit_s},
    )
    measure(results, tiny=options.tiny, only=options.only, deadline=deadline)
    path = results.save()
    print(table(add_shares(results.rows), results.not_run))
    print(f"\n{results.device.get('name', 'no device')}; written to {path}")


if __name__ == "__main__":
    main()
