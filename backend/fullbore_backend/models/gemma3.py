"""Gemma 3, its text model (Gemma Team, 2025).

Norms before and after both halves of a layer, all multiplying by one plus their weight; norms of
queries and keys; five layers with a sliding window and angles of a short base for each layer that
sees everything; embeddings scaled by the root of their size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..kernels import AttentionBatch, KvPages, Ops
from ..layers.attention import Attention, Rope
from ..layers.mlp import GatedMlp
from ..layers.places import Places, below, copy_to
from .decoder import Decoder, DecoderConfig, Rotary

_GLOBAL, _LOCAL = 0, 1  # the two kinds of rotary angles


class Gemma3Block(nn.Module):
    """A layer whose halves are normed going in and coming out."""

    def __init__(self, ops: Ops, c: DecoderConfig, attention: Attention) -> None:
        super().__init__()
        self.ops, self.eps = ops, c.norm_eps
        self.attention = attention
        self.mlp = GatedMlp(ops, c.hidden, c.intermediate, activation="gelu")
        names = ("attention_in", "attention_out", "mlp_in", "mlp_out")
        self.norms = nn.ParameterDict({name: _norm(c.hidden) for name in names})

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        ropes: Sequence[Rope],
        pages: KvPages,
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`..layers.block.Block`."""
        ops, norms, eps = self.ops, self.norms, self.eps
        if residual is None:
            normed, residual = ops.rms_norm(x, norms["attention_in"], eps), x
        else:
            normed, residual = ops.add_rms_norm(x, residual, norms["attention_in"], eps)
        x = self.attention(normed, ropes, pages, batch)
        x = ops.rms_norm(x, norms["attention_out"], eps)
        normed, residual = ops.add_rms_norm(x, residual, norms["mlp_in"], eps)
        x = ops.rms_norm(self.mlp(normed), norms["mlp_out"], eps)
        return x, residual

    def places(self) -> Places:
        """Its weights, by their names in a checkpoint below the layer's number."""
        names = {
            "input_layernorm": "attention_in",
            "post_attention_layernorm": "attention_out",
            "pre_feedforward_layernorm": "mlp_in",
            "post_feedforward_layernorm": "mlp_out",
        }
        return {
            **{f"{name}.weight": copy_to(self.norms[at], plus=1.0) for name, at in names.items()},
            **below("self_attn", self.attention.places()),
            **below("mlp", self.mlp.places()),
        }


def gemma3(config: Mapping[str, Any], ops: Ops) -> Decoder:
    """A model for a Hugging Face ``config.json``, its weights not yet filled in.

    :raises ModelError: for settings that it does not know.
    """
    c = DecoderConfig.from_hf(config)
    if c.activation != "gelu_pytorch_tanh":
        raise ModelError(f"activation {c.activation!r} is not supported; gelu_pytorch_tanh is.")
    if config.get("use_bidirectional_attention"):
        raise ModelError("attention in both directions is not supported.")

    def block(layer: int) -> Gemma3Block:
        slides = _slides(config, layer)
        attention = Attention(
            ops,
            hidden=c.hidden,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            qkv_bias=bool(config.get("attention_bias", False)),
            out_bias=bool(config.get("attention_out_bias", False)),
            window=config.get("sliding_window", 4096) if slides else None,
            scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
            soft_cap=config.get("attn_logit_softcapping"),
            qk_norm=True,
            norm_eps=c.norm_eps,
            norm_plus=1.0,
            rope=_LOCAL if slides else _GLOBAL,
        )
        return Gemma3Block(ops, c, attention)

    local = Rotary(dim=c.rotary.dim, theta=float(config.get("rope_local_base_freq", 10_000.0)))
    return Decoder(
        ops,
        c,
        [block(layer) for layer in range(c.layers)],
        rotaries=(c.rotary, local),
        embedding_scale=c.hidden**0.5,
        norm_plus=1.0,
        logit_cap=config.get("final_logit_softcapping"),
    )


def _norm(size: int) -> nn.Parameter:
    """In fp32 whatever the model runs in: one plus a weight is taken there."""
    return nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)


def _slides(config: Mapping[str, Any], layer: int) -> bool:
    kinds = config.get("layer_types")
    if kinds:
        return bool(kinds[layer] == "sliding_attention")
    return bool((layer + 1) % config.get("sliding_window_pattern", 6))
