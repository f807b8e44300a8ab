"""Grouped-query attention on the paged cache: project, rotate, store, attend, project back."""

from __future__ import annotations

import torch
from torch import nn

from ..kernels import AttentionBatch, Ops
from .linear import Linear


class Attention(nn.Module):
    """Multi-head attention with ``kv_heads`` shared keys and values (Ainslie et al., GQA, 2023).

    :param window: sliding-window length in tokens, or ``None``.
    """

    def __init__(
        self,
        ops: Ops,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool = False,
        out_bias: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.window = window
        self.scale = head_dim**-0.5
        sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.qkv = Linear(ops, hidden, sizes, bias=qkv_bias)
        self.out = Linear(ops, heads * head_dim, hidden, bias=out_bias)

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """:param x: (tokens, hidden); :param rope: cos and sin, (tokens, head_dim / 2) each;
        :param kv_cache: this layer's key and value pages. Returns (tokens, hidden)."""
        qkv = self.qkv(x).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        # Queries and keys lie side by side, so that one call rotates both.
        rotated = self.ops.rope(qkv[:, : self.heads + self.kv_heads], *rope)
        query, key = rotated[:, : self.heads], rotated[:, self.heads :]
        value = qkv[:, self.heads + self.kv_heads :]
        self.ops.store_kv(key, value, *kv_cache, batch.slots)
        attended = self.ops.paged_attention(
            query, *kv_cache, batch, scale=self.scale, window=self.window
        )
        out: torch.Tensor = self.out(attended.flatten(1))
        return out
