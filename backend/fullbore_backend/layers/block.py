"""One layer of a pre-norm transformer, whatever attention and feed-forward block it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from ..kernels import AttentionBatch, KvPages, Ops
from .attention import Rope
from .places import Places, below, copy_to


class Mixer(Protocol):
    """Attention of any kind: (tokens, hidden) in and out."""

    def __call__(
        self, x: torch.Tensor, ropes: Sequence[Rope], pages: KvPages, batch: AttentionBatch
    ) -> torch.Tensor: ...

    def places(self) -> Places: ...


class FeedForward(Protocol):
    """A feed-forward block of any kind: (tokens, hidden) in and out."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def places(self) -> Places: ...


class Block(Protocol):
    """A layer as a decoder runs it."""

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        ropes: Sequence[Rope],
        pages: KvPages,
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what the next layer adds, and the stream it adds it to, (tokens, hidden) each.

        :param residual: the stream that ``x`` is to be added to; ``None`` in the first layer.
        """

    def places(self) -> Places: ...


class PreNormBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(
        self, ops: Ops, hidden: int, eps: float, attention: Mixer, mlp: FeedForward
    ) -> None:
        super().__init__()
        self.ops, self.eps = ops, eps
        self.attention_norm = nn.Parameter(torch.empty(hidden), requires_grad=False)
        self.attention = attention
        self.mlp_norm = nn.Parameter(torch.empty(hidden), requires_grad=False)
        self.mlp = mlp

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        ropes: Sequence[Rope],
        pages: KvPages,
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Block`."""
        if residual is None:
            normed, residual = self.ops.rms_norm(x, self.attention_norm, self.eps), x
        else:
            normed, residual = self.ops.add_rms_norm(x, residual, self.attention_norm, self.eps)
        x = self.attention(normed, ropes, pages, batch)
        normed, residual = self.ops.add_rms_norm(x, residual, self.mlp_norm, self.eps)
        return self.mlp(normed), residual

    def places(self) -> Places:
        """Its weights, by their names in a checkpoint below the layer's number."""
        return {
            "input_layernorm.weight": copy_to(self.attention_norm),
            "post_attention_layernorm.weight": copy_to(self.mlp_norm),
            **below("self_attn", self.attention.places()),
            **below("mlp", self.mlp.places()),
        }
