"""The direction of imports, read from the source: who may import whom, and that nothing goes round.

Every import counts, also inside functions and under ``TYPE_CHECKING``; only the search for cycles
looks at module level alone, because only there can a cycle break an import.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"fullbore": ROOT / "client", "fullbore_backend": ROOT / "backend"}

# Each room with the rooms it may import from, beside itself; a room above may import all that the
# rooms below it may. A room is a module or a folder directly below the package. `""` is the
# package's own `__init__`, which collects the public names; the rooms above it are its users.
CLIENT = {
    "errors": set(),
    "_clock": set(),
    "_types": {"errors"},
    "_prompt": {"_types"},
    "_retry": {"_types"},
    "limits": {"_types", "_clock"},
    "pricing": {"_types"},
    "journal": {"_types"},
    "transport": {"_types", "_clock"},
    "_moves": {"limits"},
    "_hedge": {"_stats"},
    "_governor": {"_retry", "_moves", "_hedge", "pricing", "journal", "transport"},
    "_race": {"transport"},
    "_attempt": {"_governor", "_race"},
    "_background": {"errors"},
    "_stats": {"_types", "_clock"},
    "_map": {"_attempt", "_background", "_stats"},
    "_stream": {"_attempt"},
    "_deadlines": {"_types", "_clock"},
    "_governed": {"_governor", "_deadlines"},
    "progress": {"_stats"},  # it watches: it cannot even name what does the work
    "_opening": {"_governor"},
    "_http_client": {"_governed", "_opening"},
    "_client": {"_map", "_stream", "_governed", "_opening", "_prompt", "progress"},
    "": {"_client", "_http_client"},
    "loadtest": {""},
    "integrations": {""},
    "_h2_server": set(),
    "testing": {"", "_h2_server"},
    "cli": {"loadtest", "integrations", "testing"},
}
BACKEND = {
    "errors": set(),
    "config": {"errors"},
    "request": {"errors"},
    "scheduler": {"config", "request"},
    "kernels": {"config", "request"},
    "layers": {"kernels"},
    "models": {"layers"},
    "weights": {"layers"},
    "tokenizer": {"weights", "request"},
    "sampling": {"kernels"},
    "grammar": {"tokenizer"},
    "graphs": {"models"},
    "runner": {"graphs", "weights", "scheduler", "sampling"},
    "memory": {"config"},
    "output": {"tokenizer"},
    "loading": {"runner", "tokenizer", "memory"},
    "engine": {"loading", "output", "grammar"},
    "credit": set(),
    "retry_after": set(),
    "request_stream": {"request"},
    "async_engine": {"engine", "credit", "request_stream", "retry_after"},
    "": {"async_engine"},
    "server": {""},
    "evaluate": {""},
    "simulate": {"scheduler"},
    "cli": {"server", "evaluate", "simulate"},
}
ROOMS: Mapping[str, Mapping[str, set[str]]] = {"fullbore": CLIENT, "fullbore_backend": BACKEND}


@dataclass(frozen=True, slots=True)
class Import:
    """One import in one module: what it names, where, and whether it runs when the module loads."""

    importer: str
    target: str
    line: int
    at_module_level: bool


@cache
def modules(package: str) -> dict[str, Path]:
    """Dotted name → file, for every module of `package`."""
    found = {}
    for path in sorted((SOURCES[package] / package).rglob("*.py")):
        parts = path.relative_to(SOURCES[package]).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(package: str) -> tuple[Import, ...]:
    """Every import statement of `package`, relative ones resolved to absolute names."""
    return tuple(
        found
        for name, path in modules(package).items()
        for found in _imports_of(name, path, frozenset(modules(package)))
    )


def _imports_of(name: str, path: Path, known: frozenset[str]) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    runs_at_import = set(_statements_run_at_import(tree.body))
    here = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(here, node)
            # `from . import x` names the module x if there is one, else the package itself.
            names = [f"{base}.{alias.name}" for alias in node.names]
            targets = sorted({full if full in known else base for full in names})
        else:
            continue
        for target in targets:
            yield Import(name, target, node.lineno, node in runs_at_import)


def _absolute(here: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parent = here.split(".")
    parent = parent[: len(parent) - node.level + 1]
    return ".".join([*parent, node.module] if node.module else parent)


def _statements_run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module loads: not in functions, not under TYPE_CHECKING."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements_run_at_import(node.orelse)
            continue
        for block in ("body", "orelse", "finalbody"):
            yield from _statements_run_at_import(getattr(node, block, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements_run_at_import(handler.body)


def room_of(module: str) -> str:
    """The part of a dotted name that says which room it is in; ``""`` for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def below(rooms: Mapping[str, set[str]], room: str) -> set[str]:
    """Every room that `room` may import from, directly or through others."""
    reached: set[str] = set()
    waiting = [room]
    while waiting:
        for lower in rooms[waiting.pop()]:
            if lower not in reached:
                reached.add(lower)
                waiting.append(lower)
    return reached


def where(found: Import) -> str:
    return f"{found.importer}, line {found.line}: imports {found.target}"


@pytest.mark.parametrize("package", SOURCES)
def test_every_room_has_a_place(package: str) -> None:
    """A new room says in the table above what it may import."""
    assert {room_of(name) for name in modules(package)} <= set(ROOMS[package])


@pytest.mark.parametrize("package", SOURCES)
def test_imports_go_one_way(package: str) -> None:
    """No room imports a room that is not below it."""
    wrong = [
        where(found)
        for found in imports(package)
        if found.target.partition(".")[0] == package
        and room_of(found.target) != room_of(found.importer)
        and room_of(found.target) not in below(ROOMS[package], room_of(found.importer))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", SOURCES)
def test_no_cycle_between_modules(package: str) -> None:
    """Modules of a package never import each other in a circle when they load."""
    graph: dict[str, set[str]] = {name: set() for name in modules(package)}
    for found in imports(package):
        if found.at_module_level and found.target in graph and found.target != found.importer:
            graph[found.importer].add(found.target)
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"in a cycle, or above one: {sorted(graph)}"


def test_the_packages_share_nothing_but_the_wire() -> None:
    """Neither package imports the other; `fullbore serve` looks the backend up by name."""
    other = {"fullbore": "fullbore_backend", "fullbore_backend": "fullbore"}
    wrong = [
        where(found)
        for package in SOURCES
        for found in imports(package)
        if found.target.partition(".")[0] == other[package]
    ]
    assert not wrong, "\n".join(wrong)


def importers_of(package: str, *libraries: str) -> list[Import]:
    return [found for found in imports(package) if found.target.partition(".")[0] in libraries]


def test_only_kernels_import_triton() -> None:
    """Everything above the kernels is plain torch."""
    wrong = [
        f for f in importers_of("fullbore_backend", "triton") if room_of(f.importer) != "kernels"
    ]
    assert not wrong, "\n".join(map(where, wrong))


def test_the_scheduler_is_pure_python() -> None:
    """The scheduler and all it imports do without torch, numpy, and every other library."""
    rooms = {"scheduler", *below(BACKEND, "scheduler")}
    wrong = [
        found
        for found in imports("fullbore_backend")
        if room_of(found.importer) in rooms
        and found.target.partition(".")[0] not in {*sys.stdlib_module_names, "fullbore_backend"}
    ]
    assert not wrong, "\n".join(map(where, wrong))


def test_the_client_has_no_machine_learning_library() -> None:
    """The client runs where only its own five libraries are installed."""
    wrong = importers_of("fullbore", "torch", "triton", "transformers", "tokenizers", "gguf")
    assert not wrong, "\n".join(map(where, wrong))


def test_only_the_server_speaks_http() -> None:
    """Starlette and granian stay in the server; the engine does without."""
    wrong = [
        found
        for found in importers_of("fullbore_backend", "starlette", "granian")
        if room_of(found.importer) != "server"
    ]
    assert not wrong, "\n".join(map(where, wrong))


BLOCKER = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked by the test", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter in which both packages can be imported."""
    # sys.path rather than the environment: the child sees what this interpreter sees, and no more.
    prelude = f"import sys; sys.path[:0] = {[str(path) for path in SOURCES.values()]!r}\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + code], capture_output=True, text=True, check=False
    )


def test_import_fullbore_is_light() -> None:
    """``import fullbore`` loads neither torch nor transformers nor the backend."""
    done = run_python(
        "import fullbore\n"
        "heavy = {'torch', 'transformers', 'numpy', 'starlette', 'granian', 'fullbore_backend'}\n"
        "loaded = heavy & sys.modules.keys()\n"
        "sys.exit(f'loaded: {sorted(loaded)}' if loaded else 0)"
    )
    assert done.returncode == 0, done.stderr


def test_the_scheduler_loads_without_torch() -> None:
    """It can be tested and simulated where torch is not even installed."""
    blocked = {"torch", "numpy", "transformers"}
    wanted = "import fullbore_backend.scheduler, fullbore_backend.request"
    done = run_python(BLOCKER.format(blocked=blocked) + wanted)
    assert done.returncode == 0, done.stderr


ENGINE_ROOMS = sorted(
    {"engine", *below(BACKEND, "engine")} & {room_of(name) for name in modules("fullbore_backend")}
)


def test_the_engine_imports_where_only_torch_is_installed() -> None:
    """A GPU box may have torch, triton and transformers, and nothing for HTTP or GGUF."""
    blocked = {"starlette", "granian", "openai", "httpx2", "gguf", "msgspec", "llguidance"}
    wanted = ["fullbore_backend", *(f"fullbore_backend.{room}" for room in ENGINE_ROOMS)]
    done = run_python(BLOCKER.format(blocked=blocked) + "".join(f"import {m}\n" for m in wanted))
    assert done.returncode == 0, done.stderr
