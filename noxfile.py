"""The project's commands, on plain venv and pip: `nox -l` lists them.

The sessions that need torch share one virtual environment, `.nox/fullbore`, because torch is large:
`demo` puts the backend into it, `tests` and `types` add the tools. Versions are those of
constraints.txt. An installation that is still current is skipped.
"""

import hashlib
import sys
import venv
from pathlib import Path

import nox

nox.needs_version = ">=2025.10"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
SHARED = ROOT / ".nox" / "fullbore"


def shared_python(session: nox.Session, extra: str) -> str:
    """The interpreter of the shared environment, with fullbore and `extra` installed in it."""
    if sys.version_info < (3, 11):  # noqa: UP036 (nox may run on an older Python than fullbore)
        session.error(
            f"Fullbore needs Python 3.11 or newer; this nox runs on {sys.version.split()[0]}. "
            "Install nox with a newer one: python3.11 -m pip install nox"
        )
    python = SHARED / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    stamp = SHARED / f".installed-{extra}"
    current = _fingerprint()
    if stamp.is_file() and stamp.read_text() == current:
        session.log(f"{SHARED.relative_to(ROOT)} is current for fullbore[{extra}].")
        return str(python)
    session.log(f"Installing fullbore[{extra}] into {SHARED.relative_to(ROOT)}; torch is large.")
    venv.create(SHARED, with_pip=True)
    session.run(
        *(str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"),
        *(() if sys.stdout.isatty() else ("--quiet",)),
        *("-c", "constraints.txt", "-e", f".[{extra}]"),
        external=True,
    )
    stamp.write_text(current)
    return str(python)


def _fingerprint() -> str:
    """Changes whenever the installation could: by what is asked for, or by the Python it is for."""
    asked = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join([*asked, sys.version.encode()])).hexdigest()


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """64 prompts through a real model on this machine, with timing and cost."""
    python = shared_python(session, "backend")
    session.run(python, "examples/demo.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Everything but what is marked slow or gpu, in two processes; arguments go to pytest."""
    python = shared_python(session, "dev")
    arguments = ("-n", "2", "--dist", "loadfile", *session.posargs)
    session.run(
        *(python, "-m", "pytest", "-m", "not slow and not gpu", *arguments),
        env={"OMP_NUM_THREADS": "1"},  # torch's threads would be twice as many as there are cores
        external=True,
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format; `-- --fix` repairs what can be repaired."""
    session.install("-c", "constraints.txt", "ruff", silent=True)
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check both packages with mypy, strictly."""
    python = shared_python(session, "dev")
    session.run(python, "-m", "mypy", *session.posargs, external=True)


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """What takes minutes: whole grids, 5,000 streams, a million inputs, 10,000 cancellations."""
    python = shared_python(session, "dev")
    if session.posargs:
        session.run(python, "bench/soak.py", *session.posargs, external=True)
        return
    session.run(python, "-m", "pytest", "-m", "slow", "--timeout", "1800", external=True)
    for run in ("streams", "map", "cancel"):
        session.run(python, "bench/soak.py", run, external=True)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """What needs an NVIDIA GPU: kernels on the device, and the engine on them; see docs/gpu.md."""
    python = shared_python(session, "dev")
    session.run(python, "bench/gpu_check.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def compile(session: nox.Session) -> None:  # noqa: A001 (its name is what it does)
    """Compile every Triton kernel for sm_80, sm_90 and sm_100; needs no GPU."""
    python = shared_python(session, "dev")
    session.run(python, "bench/compile_table.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Output tokens/s of the server at concurrency 1, 8 and 32; arguments go to the script."""
    python = shared_python(session, "dev")
    session.run(python, "bench/serve_load.py", *session.posargs, external=True)
