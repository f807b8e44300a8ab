"""GLM-4.5 (Zhipu AI, 2025): half of each head rotates; sigmoid-routed experts and a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernels import Ops
from ..layers.attention import Attention
from ..layers.block import FeedForward, PreNormBlock
from ..layers.mlp import GatedMlp
from ..layers.moe import sigmoid_moe
from .decoder import Decoder, DecoderConfig


def glm4_moe(config: Mapping[str, Any], ops: Ops) -> Decoder:
    """A model for a Hugging Face ``config.json``, its weights not yet filled in.

    :raises ModelError: for settings that it does not know.
    """
    c = DecoderConfig.from_hf(config)
    c.require_silu()

    def block(layer: int) -> PreNormBlock:
        attention = Attention(
            ops,
            hidden=c.hidden,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            qkv_bias=bool(config.get("attention_bias", False)),
            out_bias=False,
            qk_norm=bool(config.get("use_qk_norm", False)),
            norm_eps=c.norm_eps,
        )
        mlp: FeedForward
        if layer < config.get("first_k_dense_replace", 1):
            mlp = GatedMlp(ops, c.hidden, c.intermediate)
        else:
            mlp = sigmoid_moe(config, c.hidden, ops)
        return PreNormBlock(ops, c.hidden, c.norm_eps, attention, mlp)

    return Decoder(ops, c, [block(layer) for layer in range(c.layers)])
