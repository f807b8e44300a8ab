"""A linear map filled in from one or more checkpoint tensors: several of those, one product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..kernels import Ops
from ..kernels.linear_quantized import QuantizedWeight, concat_weights


def widened(weight: torch.Tensor | QuantizedWeight, device: torch.device) -> torch.Tensor:
    """A weight as it is, or on ``device`` in fp32."""
    return weight if isinstance(weight, torch.Tensor) else weight.to(device).dequantize()


class Linear(nn.Module):
    """``x @ weight.T + bias``, with the outputs of one or more checkpoint tensors side by side.

    Fill it in with :meth:`load`, then :meth:`pack` it once; only then can it be called. Weights
    that come in few bits stay so if all parts do, in the same way; else they are widened.

    :param outputs: rows of each part: ``(q, k, v)`` makes one product out of three projections.
    """

    def __init__(
        self, ops: Ops, inputs: int, outputs: int | Sequence[int], *, bias: bool = False
    ) -> None:
        super().__init__()
        self.ops, self.inputs = ops, inputs
        self.parts = (outputs,) if isinstance(outputs, int) else tuple(outputs)
        size = sum(self.parts)
        # Without rows until one comes that is not quantised: memory may not hold the model wide.
        self.weight = nn.Parameter(torch.empty(0, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(size), requires_grad=False) if bias else None
        self.packed: Any = None
        self.is_quantized = False
        self._quantized: dict[int, QuantizedWeight] = {}

    def load(self, part: int, kind: str, tensor: torch.Tensor | QuantizedWeight) -> None:
        """Fill one part: ``kind`` is ``weight`` (rows, inputs) or ``bias`` (rows,).

        :raises ModelError: when the shape differs from what the configuration promised.
        """
        if kind == "bias" and self.bias is None:
            raise ModelError("a bias where the configuration says none.")
        rows = self.parts[part]
        expected = (rows,) if kind == "bias" else (rows, self.inputs)
        shape = (
            tuple(tensor.shape)
            if isinstance(tensor, torch.Tensor)
            else (tensor.rows, tensor.inputs)
        )
        if shape != expected:
            raise ModelError(
                f"a {kind} of shape {shape} does not fit {expected}: "
                "the checkpoint does not match its configuration."
            )
        if isinstance(tensor, torch.Tensor):
            self._rows(part, kind).copy_(tensor)
        else:
            self._quantized[part] = tensor.to(self.weight.device)

    def pack(self) -> None:
        """Lay the weight out for the product; the original is given up."""
        quantized = [self._quantized[part] for part in sorted(self._quantized)]
        joined = all(first.joins(second) for first, second in pairwise(quantized))
        self.is_quantized = len(quantized) == len(self.parts) and joined
        if self.is_quantized:
            self.packed = concat_weights(quantized)
        else:
            for part, weight in self._quantized.items():
                self._rows(part, "weight").copy_(weight.dequantize())
            self.packed = self.ops.pack_linear(self.weight.data)
        self._quantized.clear()
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """:param x: (tokens, inputs). Returns (tokens, outputs)."""
        multiply = self.ops.linear_quantized if self.is_quantized else self.ops.linear
        out: torch.Tensor = multiply(x, self.packed, self.bias)
        return out

    def _rows(self, part: int, kind: str) -> torch.Tensor:
        """Where a part goes, in memory that is taken with the first."""
        start = sum(self.parts[:part])
        if kind == "bias":
            assert self.bias is not None, "whoever loads one has looked"
            target = self.bias.data
        else:
            if not len(self.weight):
                self.weight.data = self.weight.new_empty(sum(self.parts), self.inputs)
            target = self.weight.data
        return target[start : start + self.parts[part]]
