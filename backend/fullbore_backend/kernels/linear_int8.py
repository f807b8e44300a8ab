"""``x @ weight.T`` in 8-bit integers: weights scaled by output, activations by token as they come.

Dettmers et al., "LLM.int8()", 2022, without its outliers. Sums are exact, in int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .quantize_rows import quantize_rows_torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    """A weight of ``values · scales``.

    :param values: (rows, inputs) int8.
    :param scales: (rows,) fp32.
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

    def dequantize(self) -> torch.Tensor:
        """(rows, inputs) fp32."""
        return self.values.float() * self.scales[:, None]

    def to(self, device: torch.device) -> Int8Weight:
        """The same weight there."""
        return Int8Weight(values=self.values.to(device), scales=self.scales.to(device))

    def joins(self, other: object) -> bool:
        """Whether ``other`` can follow it in :meth:`concat`."""
        return isinstance(other, Int8Weight)

    @classmethod
    def concat(cls, parts: Sequence[Int8Weight]) -> Int8Weight:
        """One weight with the outputs of all, in order."""
        return cls(
            values=torch.cat([part.values for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
        )


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """Quantise (rows, inputs), each row by its largest magnitude."""
    values, scales = quantize_rows_torch(weight, torch.int8)
    return Int8Weight(values=values, scales=scales[:, 0].contiguous())


def linear_int8_torch(
    x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply.

    :param x: (tokens, inputs) of any float dtype; :param bias: (rows,) or none.
    :returns: (tokens, rows), same dtype as ``x``.
    """
    values, scales = quantize_rows_torch(x, torch.int8)
    out = _product(values, weight.values) * scales * weight.scales
    return (out if bias is None else out + bias.float()).to(x.dtype)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The exact product of int8 matrices, as fp32."""
    if x.device.type == "cpu" and x.shape[0]:
        return torch._int_mm(x, weight.T).float()
    return (x.double() @ weight.double().T).float()
