"""Does every kernel compile for every architecture, without spilling, with the cores it should use?

Builds each ``compile_cases`` of `fullbore_backend.kernels` for sm_80, sm_90 and sm_100, reads
registers, stack and shared memory and the tensor-core instructions out of the cubin, and fails when
a kernel spills that may not, asks for more shared memory than the chip has, or multiplies without
tensor cores. Needs Triton, and no GPU. Triton caches what it compiles: a second run takes seconds.

    python bench/compile_table.py                        # all of it, and the table in docs/
    python bench/compile_table.py --match paged --capability 90
"""

from __future__ import annotations

import os

os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are defined, at the imports below

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
import triton.backends.nvidia
from record import circumstances, save
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import fullbore_backend.kernels as kernels
from fullbore_backend.kernels._triton import CAPABILITIES, CompileCase

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes one program may have (CUDA C++ programming guide, technical specifications)."""

CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
TENSOR_CORES = re.compile(r"\b(HMMA|IMMA|QMMA|HGMMA|IGMMA|QGMMA|UTC[A-Z]*MMA)\b")
WARP_GROUP = {"HGMMA", "IGMMA", "QGMMA"}
TABLE = Path(__file__).parents[1] / "docs" / "compile-table.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one kernel at one configuration became on one architecture.

    ``stack`` and ``shared`` are bytes, of a thread and of a program; ``tensor_cores`` names their
    instructions in the SASS; ``faults`` says what must not be so.
    """

    module: str
    name: str
    capability: int
    registers: int
    stack: int
    shared: int
    num_warps: int
    num_stages: int
    tensor_cores: tuple[str, ...]
    faults: tuple[str, ...]


def cases(capability: int) -> Iterator[tuple[str, CompileCase]]:
    """(module, case) of every kernel, in a fixed order.

    :raises RuntimeError: when two cases share a name.
    """
    seen = set()
    for info in sorted(pkgutil.iter_modules(kernels.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        for case in getattr(module, "compile_cases", lambda capability: ())(capability):
            if case.name in seen:
                raise RuntimeError(f"{info.name} has two compile cases called {case.name}.")
            seen.add(case.name)
            yield info.name, case


def build(capability: int, index: int) -> Row:
    """Compile one case, and read the cubin."""
    module, case = next(each for at, each in enumerate(cases(capability)) if at == index)
    try:
        compiled = triton.compile(
            _source(case),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": case.num_warps, "num_stages": case.num_stages},
        )
    except Exception as error:  # whatever the compiler raises is the result of this row
        return _row(module, case, capability, faults=(f"does not compile: {error}",))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _dump("-res-usage", file.name)
        sass = _dump("-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    cores = tuple(sorted(set(TENSOR_CORES.findall(sass))))
    shared = compiled.metadata.shared
    faults = []
    if stack + local and not case.may_spill:
        faults.append(f"spills {stack + local} bytes a thread")
    if shared > SHARED_MEMORY[capability]:
        faults.append(f"takes {shared} bytes of shared memory of {SHARED_MEMORY[capability]}")
    if case.tensor_cores and not cores:
        faults.append("no tensor-core instruction")
    if case.warp_group and capability == 90 and not WARP_GROUP.intersection(cores):
        faults.append("no wgmma")
    return _row(
        module,
        case,
        capability,
        registers=registers,
        stack=stack + local,
        shared=shared,
        tensor_cores=cores,
        faults=tuple(faults),
    )


def _source(case: CompileCase) -> ASTSource:
    signature, attributes = {}, {}
    for position, name in enumerate(case.kernel.arg_names):
        if name in case.constants:
            signature[name] = "constexpr"
            continue
        kind = case.arguments[name]
        if kind.endswith(":16"):
            attributes[(position,)] = [["tt.divisibility", 16]]
        signature[name] = kind.removesuffix(":16")
    return ASTSource(case.kernel, signature, dict(case.constants), attributes)


def _row(
    module: str,
    case: CompileCase,
    capability: int,
    *,
    registers: int = 0,
    stack: int = 0,
    shared: int = 0,
    tensor_cores: tuple[str, ...] = (),
    faults: tuple[str, ...] = (),
) -> Row:
    return Row(
        module=module,
        name=case.name,
        capability=capability,
        registers=registers,
        stack=stack,
        shared=shared,
        num_warps=case.num_warps,
        num_stages=case.num_stages,
        tensor_cores=tensor_cores,
        faults=faults,
    )


def _dump(flag: str, path: str) -> str:
    done = subprocess.run([CUOBJDUMP, flag, path], capture_output=True, text=True, timeout=60)
    done.check_returncode()
    return done.stdout


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/, one line a kernel and configuration, the architectures side by side."""
    lines = [
        "# What the kernels compile to",
        "",
        "Written by `python bench/compile_table.py`. For each architecture: registers a thread, "
        "bytes of stack a thread (spills), KiB of shared memory a program, and the tensor-core "
        "instruction found in the SASS.",
    ]
    by_module: dict[str, dict[str, dict[int, Row]]] = {}
    for row in rows:
        by_module.setdefault(row.module, {}).setdefault(row.name, {})[row.capability] = row
    for module, named in by_module.items():
        lines += ["", f"## {module}", ""]
        titles = [f"sm_{each}" for each in sorted({row.capability for row in rows})]
        lines.append("| kernel | " + " | ".join(titles) + " |")
        lines.append("|---" * (len(titles) + 1) + "|")
        for name, found in named.items():
            cells = [_cell(found.get(int(title[3:]))) for title in titles]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    cores = " ".join(row.tensor_cores) or "none"
    text = f"{row.registers} · {row.stack} · {row.shared / 1024:.0f} · {cores}"
    return f"{text} **{'; '.join(row.faults)}**" if row.faults else text


def main() -> int:
    """Run; 1 when something is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--capability", type=int, nargs="+", default=list(CAPABILITIES))
    parser.add_argument("--limit", type=int, help="at most so many cases an architecture")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--save", action="store_true", help="write the JSON and docs/ (all cases)")
    options = parser.parse_args()
    if options.save and (options.match or options.limit):
        parser.error("--save records everything: leave --match and --limit out.")
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    work = []
    for capability in options.capability:
        wanted = [
            (capability, index)
            for index, (_, case) in enumerate(cases(capability))
            if options.match in case.name
        ]
        work += wanted[: options.limit]
    started = time.perf_counter()
    rows = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for row in pool.map(build, *zip(*work, strict=True)):
            rows.append(row)
            print(f"{len(rows):4}/{len(work)}  sm_{row.capability:<3} {row.name:48} {_cell(row)}")
    faults = [row for row in rows if row.faults]
    print(f"{len(rows)} built in {time.perf_counter() - started:.0f} s, {len(faults)} at fault")
    if options.save:
        TABLE.write_text(markdown(rows))
        save(
            "compile",
            {**circumstances(("triton", "torch")), "rows": [asdict(row) for row in rows]},
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
