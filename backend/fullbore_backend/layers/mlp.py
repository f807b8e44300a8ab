"""The gated feed-forward block of Llama-like models."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from ..kernels import Ops
from .linear import Linear
from .places import Places, linear_places


class GatedMlp(nn.Module):
    """``down(act(gate(x)) · up(x))`` with gate and up as one product.

    :param activation: ``silu``, or ``gelu`` in its tanh approximation.
    """

    def __init__(
        self,
        ops: Ops,
        hidden: int,
        intermediate: int,
        *,
        bias: bool = False,
        activation: Literal["silu", "gelu"] = "silu",
    ) -> None:
        super().__init__()
        self.is_silu = activation == "silu"
        self.gate = ops.silu_mul if self.is_silu else ops.gelu_mul
        self.gate_up = Linear(ops, hidden, (intermediate, intermediate), bias=bias)
        self.down = Linear(ops, intermediate, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """:param x: (tokens, hidden). Returns the same shape."""
        out: torch.Tensor = self.down(self.gate(self.gate_up(x)))
        return out

    def places(self) -> Places:
        """Its weights, by their names in a checkpoint below ``mlp``."""
        return {
            **linear_places(self.gate_up, "gate_proj", "up_proj"),
            **linear_places(self.down, "down_proj"),
        }
