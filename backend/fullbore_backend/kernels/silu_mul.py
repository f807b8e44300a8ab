"""The gates of gated feed-forward blocks (Shazeer, 2020, "GLU Variants Improve Transformer").

Each takes ``gate_up`` (tokens, 2 · size), which holds gate, then up, in a row, and returns
(tokens, size) of the same dtype. Bound by memory: three elements moved for each one returned.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up`` (SwiGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) · up`` with the tanh approximation of GELU (GeGLU, as in Gemma)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu_torch(
    gate_up: torch.Tensor, *, limit: float = 7.0, alpha: float = 1.702
) -> torch.Tensor:
    """gpt-oss's gate: ``(up + 1) · gate · sigmoid(alpha · gate)``, with both clamped first.

    ``gate`` to at most ``limit``, ``up`` to [-limit, limit].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)
