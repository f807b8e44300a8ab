"""Weights in float8 e4m3 with a scale for each block, output or tensor (DeepSeek-V3, 2024).

Of a module: ``weight`` (outputs, inputs) float8, and ``weight_scale_inv`` or ``weight_scale``,
which both multiply it: (outputs / 128, inputs / 128) rounded up, (outputs, 1), or one number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .parts import Format, require, unfit

if TYPE_CHECKING:
    import torch

    from .parts import Weight


def fp8(settings: Mapping[str, Any]) -> Format:
    """The format that a ``quantization_config`` describes.

    :raises ModelError: for another float8, or blocks that are not two numbers.
    """
    kind = settings.get("fmt") or "e4m3"
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"float8 {kind!r} is not supported; e4m3 is.")
    block = settings.get("weight_block_size")
    if block is not None and (len(block) != 2 or not all(size > 0 for size in block)):
        raise ModelError(f"weight_block_size is {block!r}; it must be two positive numbers.")
    return Format(
        parts=frozenset({"weight", "weight_scale_inv", "weight_scale"}),
        join=partial(_join, block=block),
    )


def _join(module: str, parts: Mapping[str, torch.Tensor], *, block: Sequence[int] | None) -> Weight:
    weight = require(module, parts, "weight")
    part = "weight_scale" if "weight_scale" in parts else "weight_scale_inv"
    return scaled_float8(module, weight, f"{module}.{part}", parts[part], block)


def scaled_float8(
    module: str,
    weight: torch.Tensor,
    scale_name: str,
    scales: torch.Tensor,
    block: Sequence[int] | None,
) -> Weight:
    """``weight · scales``, kept in 8 bits if a kernel knows blocks of that size.

    :param block: outputs and inputs of a block; ``None`` if a scale is a row's or the tensor's.
    :raises ModelError: for another dtype, or scales that do not fit.
    """
    import torch

    from ..kernels.linear_fp8 import BLOCK, Fp8Weight

    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise unfit(f"{module}.weight", weight, "a matrix in float8 e4m3 was expected")
    rows, inputs = weight.shape
    wide = scales.float()
    if wide.numel() == 1:
        return Fp8Weight(values=weight, scales=wide.reshape(1).repeat(rows))
    if wide.shape in ((rows,), (rows, 1)):
        return Fp8Weight(values=weight, scales=wide.reshape(rows))
    if block is None or wide.shape != (-(-rows // block[0]), -(-inputs // block[1])):
        raise unfit(scale_name, scales, f"that does not fit a weight of {(rows, inputs)}")
    if tuple(block) == (BLOCK, BLOCK):
        return Fp8Weight(values=weight, scales=wide)
    spread = wide.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * spread[:rows, :inputs]
