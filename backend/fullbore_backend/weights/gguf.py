"""A GGUF file as a :class:`~.checkpoint.Checkpoint`: metadata to configuration, blocks to tensors.

Owns undoing what the conversion to GGUF did (names, the order of q and k rows, offset norms). The
container is left to :mod:`.gguf_file`, blocks to :mod:`.gguf_types`, names to :mod:`.gguf_layout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ModelError
from .gguf_config import eos_token_ids, hugging_face_config
from .gguf_file import GGUFFile, TensorInfo, read_gguf
from .gguf_layout import ARCHITECTURES, ROPE_FACTORS, Architecture
from .gguf_types import StorageType, dequantize, storage_type

if TYPE_CHECKING:
    import torch

Values = np.ndarray[Any, np.dtype[np.float32]]


class GGUFCheckpoint:
    """A model in one GGUF file."""

    def __init__(self, path: Path) -> None:
        """Parse the header and check every tensor's name, type and extent; read no weights.

        :raises ModelError: saying what is wrong with the file.
        """
        self.path = path
        self._file = read_gguf(path)
        self._architecture = _architecture(self._file)
        self._types = _check_tensors(self._file, self._architecture)
        rope_factors = None
        if info := self._file.tensors.get(ROPE_FACTORS):
            rope_factors = [float(value) for value in self._read(info).reshape(-1)]
        self.config: Mapping[str, Any] = hugging_face_config(
            self._file, self._architecture, rope_factors=rope_factors
        )
        self.eos_token_ids: tuple[int, ...] = eos_token_ids(self._file.metadata)
        self.quantization: str | None = None  # blocks are widened
        self._check_complete()

    @property
    def model_type(self) -> str:
        """See :meth:`.checkpoint.Checkpoint.model_type`."""
        return self._architecture.model_type

    def tensors(self, *, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`.checkpoint.Checkpoint.tensors`."""
        import torch

        for info in self._file.tensors.values():
            name = self._architecture.rename(info.name)
            if name is None:
                continue
            values = self._read(info)
            if self._architecture.permuted and ".self_attn." in name:
                values = self._restore_rotary_order(name, values)
            if self._architecture.norm_offset and name.endswith("norm.weight"):
                values -= self._architecture.norm_offset
            is_wide = self._types[info.name].name == "F32"
            yield name, torch.from_numpy(values).to(torch.float32 if is_wide else dtype)

    def _read(self, info: TensorInfo) -> Values:
        kind = self._types[info.name]
        data = np.frombuffer(self._file.view, np.uint8, kind.num_bytes(info.shape), info.offset)
        return dequantize(data, kind, info.shape)

    def _restore_rotary_order(self, name: str, tensor: Values) -> Values:
        """ggml rotates neighbours (2i, 2i + 1), Hugging Face halves (i, i + d/2); put rows back."""
        if ".q_proj." in name:
            heads = self.config["num_attention_heads"]
        elif ".k_proj." in name:
            heads = self.config["num_key_value_heads"]
        else:
            return tensor
        rows = tensor.shape[0]
        order = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
        return tensor[order]

    def _check_complete(self) -> None:
        names = self._file.tensors
        required = self._architecture.required(self.config["num_hidden_layers"])
        if missing := [name for name in required if name not in names]:
            raise ModelError(
                f"{self.path} lacks {len(missing)} of the tensors of a "
                f"{self._architecture.model_type} model, {missing[0]!r} among them; download or "
                "convert it again."
            )
        config = self.config
        for stem, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
            expected = (config[heads] * config["head_dim"], config["hidden_size"])
            for layer in range(config["num_hidden_layers"]):
                name = f"blk.{layer}.{stem}.weight"
                if names[name].shape != expected:
                    raise ModelError(
                        f"{self.path}: {name} is {names[name].shape}, but the metadata imply "
                        f"{expected}. The file contradicts itself."
                    )


def _architecture(file: GGUFFile) -> Architecture:
    if (parts := file.metadata.get("split.count", 0)) and parts > 1:
        raise ModelError(
            f"{file.path} is one of {parts} parts. Merge them first: "
            "`llama-gguf-split --merge FIRST_PART MERGED.gguf`."
        )
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} has the architecture {name!r}. Supported in GGUF: "
            f"{', '.join(sorted(ARCHITECTURES))}. Other models may load from safetensors."
        )
    return ARCHITECTURES[name]


def _check_tensors(file: GGUFFile, architecture: Architecture) -> dict[str, StorageType]:
    types: dict[str, StorageType] = {}
    for info in file.tensors.values():
        if info.name != ROPE_FACTORS and architecture.rename(info.name) is None:
            raise ModelError(
                f"{file.path} has a tensor {info.name!r}, which a {architecture.model_type} model "
                "has no place for: it is a variant that is not supported."
            )
        try:
            types[info.name] = storage_type(info.type_id)
            size = types[info.name].num_bytes(info.shape)
        except ModelError as error:
            raise ModelError(f"{file.path}, tensor {info.name!r}: {error}.") from error
        if info.offset + size > len(file.view):
            raise ModelError(
                f"{file.path} is truncated: {info.name!r} needs bytes up to {info.offset + size}, "
                f"the file has {len(file.view)}. Download it again."
            )
    return types
