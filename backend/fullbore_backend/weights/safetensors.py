"""A Hugging Face folder as a :class:`~.checkpoint.Checkpoint`: ``config.json`` and safetensors.

Owns finding the files and naming the one that is missing or broken, and which format quantised
weights are in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .awq import awq
from .compressed import compressed
from .config_json import normalise
from .fp8 import fp8
from .gptq import gptq
from .mxfp4 import widen_mxfp4
from .parts import Format, join_parts

if TYPE_CHECKING:
    import torch

    from .parts import Weight

_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {
    "awq": awq,
    "compressed-tensors": compressed,
    "fbgemm_fp8": fp8,
    "fp8": fp8,
    "gptq": gptq,
}
"""By ``quant_method``. MXFP4 has no names of its own for the parts of a weight; see `tensors`."""
_MXFP4 = "mxfp4"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """A model in a folder of one or more safetensors files."""

    def __init__(self, path: Path) -> None:
        """Read the configuration and the index; read no weights.

        :raises ModelError: naming the file that is missing or broken.
        """
        self.path = path
        self._raw = raw = read_json(path / "config.json")
        if not isinstance(raw.get("model_type"), str):
            raise ModelError(f"{path / 'config.json'} has no model_type; it is no model's.")
        self.model_type: str = raw["model_type"]
        self._method: str | None = (raw.get("quantization_config") or {}).get("quant_method")
        self._format = _format(raw, path)
        self.quantization = None if self._format is None else self._method
        self.eos_token_ids: tuple[int, ...] = folder_eos_token_ids(path)
        self._shards = _shards(path)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """See :meth:`.checkpoint.Checkpoint.config`."""
        return normalise(self._raw, source=str(self.path / "config.json"))

    def tensors(self, *, dtype: torch.dtype) -> Iterator[tuple[str, Weight]]:
        """See :meth:`.checkpoint.Checkpoint.tensors`."""
        if self._method == _MXFP4:
            return widen_mxfp4(self._stored(), dtype=dtype)
        if self._format is None:
            return self._stored()
        return join_parts(self._stored(), self._names(), self._format)

    def _names(self) -> Iterator[str]:
        """Of every tensor that :meth:`_stored` yields."""
        for file, expected in self._shards.items():
            if expected:
                yield from expected
                continue
            with _opened(file) as shard:
                yield from shard.keys()

    def _stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor as it is in the files."""
        for file, expected in self._shards.items():
            with _opened(file) as shard:
                names = set(shard.keys())
                if missing := sorted(expected - names):
                    raise ModelError(f"{file} lacks {missing[0]!r}, which its index lists.")
                for name in sorted(expected or names):
                    yield name, shard.get_tensor(name)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A file of safetensors.

    :raises ModelError: if it cannot be read, now or later.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise ModelError(f"Cannot read {file}: {error}. Download it again.") from error


def _format(config: Mapping[str, Any], path: Path) -> Format | None:
    """How quantised weights are kept; ``None`` if there are none, or MXFP4's.

    :raises ModelError: in a way that is not known.
    """
    settings = config.get("quantization_config") or {}
    method = settings.get("quant_method")
    if method in (None, _MXFP4):
        return None
    if method not in _FORMATS:
        known = ", ".join(sorted({*_FORMATS, _MXFP4}))
        raise ModelError(
            f"{path} is quantised with {method}, which is not supported in safetensors; known are "
            f"{known}. Use an unquantised copy or a GGUF file."
        )
    try:
        return _FORMATS[method](settings)
    except ModelError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def folder_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Every end id that ``generation_config.json`` and ``config.json`` name, each once."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            found += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    :raises ModelError: naming the file, if it is missing, not JSON or not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} is missing; a model folder needs it.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read {file}: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a {type(value).__name__}; it must be a JSON object.")
    return value


def _shards(folder: Path) -> dict[Path, set[str]]:
    """Each weight file with the tensors expected in it; an empty set expects all it has."""
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / _INDEX} has no weight_map.")
        shards: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            shards.setdefault(folder / Path(str(file)).name, set()).add(name)
        if missing := sorted(str(file) for file in shards if not file.is_file()):
            raise ModelError(f"{missing[0]} is missing; the index lists it.")
        return shards
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: set()}
    hint = ""
    if any(folder.glob("*.bin")):
        hint = " The folder has PyTorch pickles, which are not read; convert them to safetensors."
    raise ModelError(f"{folder / _SINGLE} is missing, and so is {_INDEX}.{hint}")
