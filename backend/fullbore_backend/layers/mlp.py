"""The gated feed-forward block of Llama-like models."""

from __future__ import annotations

import torch
from torch import nn

from ..kernels import Ops
from .linear import Linear


class GatedMlp(nn.Module):
    """``down(silu(gate(x)) · up(x))`` with gate and up as one product."""

    def __init__(self, ops: Ops, hidden: int, intermediate: int, *, bias: bool = False) -> None:
        super().__init__()
        self.ops = ops
        self.gate_up = Linear(ops, hidden, (intermediate, intermediate), bias=bias)
        self.down = Linear(ops, intermediate, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """:param x: (tokens, hidden). Returns the same shape."""
        out: torch.Tensor = self.down(self.ops.silu_mul(self.gate_up(x)))
        return out
