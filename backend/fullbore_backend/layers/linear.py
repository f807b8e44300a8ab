"""A linear map filled in from one or more checkpoint tensors: several of those, one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import ModelError
from ..kernels import Ops


class Linear(nn.Module):
    """``x @ weight.T + bias``, with the outputs of one or more checkpoint tensors side by side.

    Fill it in with :meth:`load`, then :meth:`pack` it once; only then can it be called.

    :param outputs: rows of each part: ``(q, k, v)`` makes one product out of three projections.
    """

    def __init__(
        self, ops: Ops, inputs: int, outputs: int | Sequence[int], *, bias: bool = False
    ) -> None:
        super().__init__()
        self.ops = ops
        self.parts = (outputs,) if isinstance(outputs, int) else tuple(outputs)
        size = sum(self.parts)
        self.weight = nn.Parameter(torch.empty(size, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(size), requires_grad=False) if bias else None

    def load(self, part: int, kind: str, tensor: torch.Tensor) -> None:
        """Fill one part: ``kind`` is ``weight`` (rows, inputs) or ``bias`` (rows,).

        :raises ModelError: when the shape differs from what the configuration promised.
        """
        target = self.weight if kind == "weight" else self.bias
        if target is None:
            raise ModelError(f"the checkpoint has a {kind} where the configuration says none.")
        start = sum(self.parts[:part])
        rows = target.data[start : start + self.parts[part]]
        if rows.shape != tensor.shape:
            raise ModelError(
                f"a {kind} of shape {tuple(tensor.shape)} does not fit {tuple(rows.shape)}: "
                "the checkpoint does not match its configuration."
            )
        rows.copy_(tensor)

    def pack(self) -> None:
        """Lay the weight out for the product; the original is given up."""
        self.packed = self.ops.pack_linear(self.weight.data)
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """:param x: (tokens, inputs). Returns (tokens, outputs)."""
        return self.ops.linear(x, self.packed, self.bias)
