"""Mixture of experts: who computes a token, and the experts themselves.

Sparsely gated experts: Shazeer et al., 2017. Routing by sigmoid with a bias for selection alone,
limited to groups: DeepSeek-V3 (2024).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

from .silu_mul import clamped_swiglu_torch, silu_mul_torch

Scoring = Literal["softmax", "sigmoid", "softmax_topk"]
Activation = Literal["silu", "clamped_swiglu"]

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_mul_torch,
    "clamped_swiglu": clamped_swiglu_torch,
}


def route_torch(
    logits: torch.Tensor,
    *,
    top_k: int,
    scoring: Scoring = "softmax",
    bias: torch.Tensor | None = None,
    renormalize: bool = True,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts and their weights.

    :param logits: (tokens, experts).
    :param scoring: ``softmax`` over all experts, ``sigmoid`` of each, or ``softmax_topk``, a
        softmax over the chosen ones alone (gpt-oss).
    :param bias: (experts,) fp32, added for the choice and not to the weights.
    :param renormalize: make the weights sum to one before ``scale``.
    :param groups: the experts lie in so many groups, and are chosen from the ``top_groups`` of them
        with the largest sums of their two best scores.
    :returns: weights (tokens, top_k) fp32, experts (tokens, top_k) int32; their order among
        themselves means nothing.
    """
    logits = logits.float()
    if scoring == "softmax_topk":
        best, experts = logits.topk(top_k, dim=-1)
        return best.softmax(-1) * scale, experts.int()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if groups > top_groups:
        grouped = choice.view(*choice.shape[:-1], groups, -1)
        strength = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(strength, dtype=torch.bool)
        kept.scatter_(-1, strength.topk(top_groups, dim=-1).indices, True)
        choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    experts = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts.int()


def fused_experts_torch(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    *,
    activation: Activation = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, each a gated feed-forward block.

    An expert's tokens are computed together; their results are added up in fp32, in the order of
    the experts.

    :param x: (tokens, hidden).
    :param gate_up: (experts, 2 · size, hidden), gate above up; :param down: (experts, hidden,
        size). :param gate_up_bias: (experts, 2 · size); :param down_bias: (experts, hidden).
    :param weights: and :param experts: (tokens, top_k), of :func:`route_torch`.
    :returns: (tokens, hidden), same dtype as ``x``.
    """
    act = _ACTIVATIONS[activation]
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for expert in torch.unique(experts).tolist():
        tokens, place = torch.where(experts == expert)
        hidden = F.linear(
            x[tokens], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert]
        )
        out = F.linear(act(hidden), down[expert], None if down_bias is None else down_bias[expert])
        total.index_add_(0, tokens, out.to(total.dtype) * weights[tokens, place, None])
    return total.to(x.dtype)
