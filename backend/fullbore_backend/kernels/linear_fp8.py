"""``x @ weight.T`` in float8 e4m3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022).

Weights are scaled by output, or in blocks of 128 × 128 with activations in groups of 128 inputs
(DeepSeek-V3, 2024); activations are scaled as they come. Sums are taken in fp32, and scaled after
each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .quantize_rows import LARGEST, quantize_rows_torch

BLOCK = 128
"""Rows and inputs of a block, and inputs of a group of activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """A weight of ``values · scales``.

    :param values: (rows, inputs) float8_e4m3fn.
    :param scales: fp32, (rows,), or (rows / 128, inputs / 128) rounded up if ``blocked``.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def rows(self) -> int:
        """Outputs."""
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        """Inputs."""
        return self.values.shape[1]

    @property
    def blocked(self) -> bool:
        """Whether a scale is that of a block, not of a row."""
        return self.scales.dim() == 2

    def dequantize(self) -> torch.Tensor:
        """(rows, inputs) fp32."""
        return self.values.float() * self._spread()

    def to(self, device: torch.device) -> Fp8Weight:
        """The same weight there."""
        return Fp8Weight(values=self.values.to(device), scales=self.scales.to(device))

    def joins(self, other: object) -> bool:
        """Whether ``other`` can follow it in :meth:`concat`: with blocks, only after whole ones."""
        if not isinstance(other, Fp8Weight) or other.blocked != self.blocked:
            return False
        return not self.blocked or self.rows % BLOCK == 0

    @classmethod
    def concat(cls, parts: Sequence[Fp8Weight]) -> Fp8Weight:
        """One weight with the outputs of all, in order."""
        return cls(
            values=torch.cat([part.values.view(torch.int8) for part in parts]).view(
                torch.float8_e4m3fn  # torch.cat knows no float8 on every device
            ),
            scales=torch.cat([part.scales for part in parts]),
        )

    def _spread(self) -> torch.Tensor:
        """The scales as they apply, broadcast with ``values``."""
        if not self.blocked:
            return self.scales[:, None]
        wide = self.scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return wide[: self.rows, : self.inputs]


def quantize_fp8(weight: torch.Tensor, block: int | None = None) -> Fp8Weight:
    """Quantise (rows, inputs) by the largest magnitude of each row, or block.

    :param block: ``None``, or :data:`BLOCK`.
    """
    if block is None:
        values, scales = quantize_rows_torch(weight, torch.float8_e4m3fn)
        return Fp8Weight(values=values, scales=scales[:, 0].contiguous())
    assert block == BLOCK, "blocks of another size have no kernel"
    limit = LARGEST[torch.float8_e4m3fn]
    rows, inputs = weight.shape
    down, across = -(-rows // block), -(-inputs // block)
    padded = F.pad(weight.float(), (0, across * block - inputs, 0, down * block - rows))
    scales = padded.view(down, block, across, block).abs().amax((1, 3)) / limit
    # A block of zeros is given a scale of one, to be divided by.
    scales = torch.where(scales > 0, scales, 1.0)
    wide = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :inputs]
    values = (weight.float() / wide).clamp(-limit, limit).to(torch.float8_e4m3fn)
    return Fp8Weight(values=values, scales=scales)


def linear_fp8_torch(
    x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply.

    :param x: (tokens, inputs) of any float dtype; :param bias: (rows,) or none.
    :returns: (tokens, rows), same dtype as ``x``.
    """
    group = BLOCK if weight.blocked else None
    values, scales = quantize_rows_torch(x, torch.float8_e4m3fn, group)
    wide = scales.repeat_interleave(group or weight.inputs, 1)[:, : weight.inputs]
    out = (values.float() * wide) @ weight.dequantize().T
    return (out if bias is None else out + bias.float()).to(x.dtype)
