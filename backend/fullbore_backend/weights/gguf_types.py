"""ggml's storage types: how large a block is, and how it becomes fp32.

The arithmetic is the ``gguf`` package's; this file asks it what it can do and feeds it pieces of a
size that stays in the cache, which makes it three times as fast as one call a tensor. The package
is imported on first use: it takes a tenth of a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PIECE = 1 << 17
"""Elements dequantised at once: half a MiB of fp32."""


@dataclass(frozen=True, slots=True)
class StorageType:
    """A ggml type: ``block_size`` elements take ``block_bytes`` bytes."""

    type_id: int
    name: str
    block_size: int
    block_bytes: int

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this shape.

        :raises ModelError: if a row is not a whole number of blocks.
        """
        if shape and shape[-1] % self.block_size:
            raise ModelError(
                f"a row of {shape[-1]} elements is no multiple of {self.name}'s block of "
                f"{self.block_size}"
            )
        return math.prod(shape) // self.block_size * self.block_bytes


@cache
def storage_type(type_id: int) -> StorageType:
    """Look a type up by ggml's number.

    :raises ModelError: if the type is unknown, or known but not one that can be dequantised.
    """
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(type_id)
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ModelError(
            f"storage type {type_id} is unknown to gguf {_gguf_version()}; "
            "a newer `gguf` package may know it"
        ) from None
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:  # gguf has no list of what it dequantises: it is asked with a block
        raise ModelError(
            f"tensors of type {kind.name} cannot be dequantised by gguf {_gguf_version()}; "
            "convert the model to another quantisation"
        ) from None
    return StorageType(type_id, kind.name, block_size, block_bytes)


def dequantize(
    data: NDArray[np.uint8], kind: StorageType, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Turn a tensor's bytes into a fresh fp32 array of ``shape``.

    ``data`` is one-dimensional and holds exactly ``kind.num_bytes(shape)`` bytes.
    """
    import gguf

    qtype = gguf.GGMLQuantizationType(kind.type_id)
    out = np.empty(math.prod(shape), np.float32)
    blocks = max(1, _PIECE // kind.block_size)
    byte_step, step = blocks * kind.block_bytes, blocks * kind.block_size
    for index in range(-(-data.size // byte_step)):
        piece = data[index * byte_step : (index + 1) * byte_step]
        # An all-ones or otherwise odd scale may overflow to inf; that is the file's business.
        with np.errstate(all="ignore"):
            values = gguf.dequantize(piece.reshape(1, -1), qtype)
        out[index * step : (index + 1) * step] = values.reshape(-1)
    return out.reshape(shape)


def _gguf_version() -> str:
    from importlib.metadata import version

    return version("gguf")
