"""Llama, and what is shaped like it: SmolLM2, Llama 2 and 3, Mistral.

Touvron et al., 2023; Jiang et al., "Mistral 7B", 2023 (the sliding window). Pre-norm blocks of
grouped-query attention with rotary positions and a gated MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernels import Ops
from ..layers.attention import Attention
from ..layers.block import PreNormBlock
from ..layers.mlp import GatedMlp
from .decoder import Decoder, DecoderConfig


def llama(config: Mapping[str, Any], ops: Ops) -> Decoder:
    """A model for a Hugging Face ``config.json``, its weights not yet filled in.

    :raises ModelError: for settings that it does not know.
    """
    c = DecoderConfig.from_hf(config)
    c.require_silu()
    qkv_bias = bool(config.get("attention_bias", False))

    def block() -> PreNormBlock:
        attention = Attention(
            ops,
            hidden=c.hidden,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            qkv_bias=qkv_bias,
            out_bias=bool(config.get("attention_out_bias", qkv_bias)),
            window=config.get("sliding_window"),
        )
        mlp = GatedMlp(ops, c.hidden, c.intermediate, bias=bool(config.get("mlp_bias", False)))
        return PreNormBlock(ops, c.hidden, c.norm_eps, attention, mlp)

    return Decoder(ops, c, [block() for _ in range(c.layers)])
