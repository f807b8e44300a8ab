"""MXFP4, as gpt-oss stores its experts: 4-bit floats in blocks of 32 with one power of two each.

OCP Microscaling Formats (MX) Specification 1.0, 2023. It is widened when a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..errors import ModelError

if TYPE_CHECKING:
    import torch

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the fourth bit is the sign
_BIAS = 127
_BLOCKS, _SCALES = "_blocks", "_scales"


def widen_mxfp4(
    tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace each pair ``X_blocks`` and ``X_scales`` by ``X``, inputs before outputs.

    :param dtype: of what is widened.
    :raises ModelError: when one half of a pair is missing.
    """
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        suffix = name[-len(_BLOCKS) :]
        if suffix not in (_BLOCKS, _SCALES):
            yield name, tensor
            continue
        stem = name[: -len(suffix)]
        pair = halves.setdefault(stem, {})
        pair[suffix] = tensor
        if len(pair) == 2:
            del halves[stem]
            weight = dequantize_mxfp4(pair[_BLOCKS], pair[_SCALES], dtype=dtype)
            yield stem, weight.transpose(-1, -2)
    if halves:
        stem, pair = next(iter(halves.items()))
        raise ModelError(f"the checkpoint has {stem}{next(iter(pair))} without its other half.")


def dequantize_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """(..., blocks, 16) uint8, the low half of a byte first, and (..., blocks) uint8 exponents to
    (..., 32 · blocks) in ``dtype``.

    A stack of experts is widened one by one: all at once would take several times the result.
    """
    import torch

    if blocks.dim() > 3:
        out = torch.empty(*blocks.shape[:-2], 32 * blocks.shape[-2], dtype=dtype)
        for target, some, exponents in zip(out, blocks, scales, strict=True):
            target.copy_(dequantize_mxfp4(some, exponents, dtype=dtype))
        return out
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32)
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - _BIAS
    return torch.ldexp(table[nibbles.int()], exponents).flatten(-2).to(dtype)
