"""The gate of a SwiGLU block (Shazeer, 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up`` where ``gate_up`` (tokens, 2 · size) holds gate, then up, in a row.

    Returns (tokens, size), same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
