"""Rotary position embedding (Su et al., RoFormer, 2021), half-split layout as in GPT-NeoX."""

from __future__ import annotations

import torch


def rope_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pair (i, i + head_dim / 2) of every head by its token's angle.

    :param x: (tokens, heads, head_dim); :param cos: and :param sin: (tokens, head_dim / 2), in
        fp32. Returns a tensor like ``x``.
    """
    half = x.shape[-1] // 2
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
