"""Grouped-query attention on the paged cache: project, rotate, store, attend, project back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..kernels import AttentionBatch, KvPages, Ops
from .linear import Linear
from .places import Places, copy_to, linear_places

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a step's tokens, (tokens, pairs) each in fp32."""


class Attention(nn.Module):
    """Multi-head attention with ``kv_heads`` shared keys and values (Ainslie et al., GQA, 2023).

    :param window: sliding-window length in tokens, or ``None``.
    :param scale: multiplies the scores; by default one over the root of ``head_dim``.
    :param qk_norm: norm queries and keys head by head before they are rotated (Dehghani et al.,
        2023); ``norm_plus`` is added to those norms' weights.
    :param sinks: a learned score for each head that joins the softmax (gpt-oss).
    :param rope: which of the model's rotary tables is this layer's.
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
        scale: float | None = None,
        soft_cap: float | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        norm_plus: float = 0.0,
        sinks: bool = False,
        rope: int = 0,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.window, self.soft_cap, self.rope = window, soft_cap, rope
        self.scale = head_dim**-0.5 if scale is None else scale
        self.eps, self.norm_plus = norm_eps, norm_plus
        sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.qkv = Linear(ops, hidden, sizes, bias=qkv_bias)
        self.out = Linear(ops, heads * head_dim, hidden, bias=out_bias)
        # A sum in fewer bits would not be what the checkpoint says.
        norm_dtype = torch.float32 if norm_plus else None
        self.q_norm = _norm(head_dim, norm_dtype) if qk_norm else None
        self.k_norm = _norm(head_dim, norm_dtype) if qk_norm else None
        self.sinks = (
            nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False)
            if sinks
            else None
        )

    def forward(
        self, x: torch.Tensor, ropes: Sequence[Rope], pages: KvPages, batch: AttentionBatch
    ) -> torch.Tensor:
        """:param x: (tokens, hidden); :param pages: this layer's keys and values.

        Returns (tokens, hidden)."""
        qkv = self.qkv(x).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        query = self.ops.rope_store_kv(
            *(qkv, *ropes[self.rope], pages, batch.slots),
            heads=self.heads,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.eps,
        )
        attended = self.ops.paged_attention(
            *(query, pages, batch),
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
        )
        out: torch.Tensor = self.out(attended.flatten(1))
        return out

    def places(self) -> Places:
        """Its weights, by their names in a checkpoint below ``self_attn``."""
        places = linear_places(self.qkv, "q_proj", "k_proj", "v_proj")
        places |= linear_places(self.out, "o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            places["q_norm.weight"] = copy_to(self.q_norm, plus=self.norm_plus)
            places["k_norm.weight"] = copy_to(self.k_norm, plus=self.norm_plus)
        if self.sinks is not None:
            places["sinks"] = copy_to(self.sinks)
        return places


def _norm(size: int, dtype: torch.dtype | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
