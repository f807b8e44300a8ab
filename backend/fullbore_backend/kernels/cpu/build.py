"""Compiles the C++ beside this file with the machine's own instruction set, once, and loads it.

The library has a plain C interface and no header of Python or torch, so that it builds in seconds,
needs nothing but a compiler, and does not depend on torch's version. It lies in the user's cache
folder under a name made of the sources, the compiler, its flags and the processor.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
SOURCES = ("decoder.cpp", "attention.h", "gemm.h", "simd.h", "team.h")
NATIVE = "-march=native"
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-Wall", "-Wno-psabi")
_TIMEOUT = 300


@cache
def load_library(*extra: str) -> ctypes.CDLL | None:
    """The compiled library; ``None`` where there is no compiler or it fails, with a logged reason.

    :param extra: flags for the compiler, by default those for this machine.
    """
    flags = (*_FLAGS, *(extra or (NATIVE,)))
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.warning("no C++ compiler (g++, clang++, CXX): the CPU runs torch's own operations")
        return None
    try:
        return _declared(ctypes.CDLL(str(_built(compiler, flags))))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        logger.warning(
            "the CPU kernels cannot be built, and torch's own operations run instead: %s", said
        )
        return None


def _built(compiler: str, flags: tuple[str, ...]) -> Path:
    """The library's path, after it was compiled if need be. One process compiles at a time."""
    folder = _cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_fingerprint(compiler, flags)}.so"
    if path.exists():
        return path
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(compiler, flags, path)
    return path


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    began = time.perf_counter()
    logger.info("compiling the CPU kernels for this machine, once (some 10 seconds)")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        subprocess.run(
            [compiler, *flags, str(HERE / SOURCES[0]), "-o", str(made)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
        made.replace(path)
    logger.info("compiled in %.1f s to %s", time.perf_counter() - began, path)


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True, timeout=_TIMEOUT
    ).stdout
    asked = [version, *flags, _processor(), *((HERE / name).read_text() for name in SOURCES)]
    return hashlib.sha256("\0".join(asked).encode()).hexdigest()[:20]


def _processor() -> str:
    """What the compiler's choice of instructions depends on: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "fullbore" / "kernels"


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer = ctypes.c_void_p
    library.fullbore_open.argtypes = [ctypes.c_int]
    library.fullbore_open.restype = pointer
    library.fullbore_close.argtypes = [pointer]
    library.fullbore_close.restype = None
    library.fullbore_step.argtypes = [pointer, pointer, pointer]
    library.fullbore_step.restype = ctypes.c_int
    return library
