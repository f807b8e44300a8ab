"""Rotary position embedding (Su et al., RoFormer, 2021)."""

from __future__ import annotations

import torch


def rope_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Rotate pairs of every head by their token's angles.

    A pair is (i, i + pairs), as in GPT-NeoX and Llama, or, interleaved, (2i, 2i + 1), as in GPT-J
    and DeepSeek. Dimensions beyond the last pair stay as they are (partial rotary).

    :param x: (tokens, heads, head_dim). :param cos: and :param sin: (tokens, pairs) in fp32, with
        ``2 · pairs <= head_dim``. Returns a tensor like ``x``.
    """
    pairs = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleaved:
        low, high = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    else:
        low, high = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = (low * cos - high * sin, high * cos + low * sin)
    rotated = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    if 2 * pairs == x.shape[-1]:
        return rotated.to(x.dtype)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * pairs :]), dim=-1)
