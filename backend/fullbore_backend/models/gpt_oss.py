"""gpt-oss (OpenAI, 2025): experts with biases and a clamped gate, attention with sinks.

Every other layer sees a window of 128 tokens. A learned score for each head joins the softmax and
takes no value, so that a head may look at nothing. The published checkpoints hold the experts in
MXFP4, which is widened when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernels import Ops
from ..layers.attention import Attention
from ..layers.block import PreNormBlock
from ..layers.moe import Moe, Routing
from .decoder import Decoder, DecoderConfig


def gpt_oss(config: Mapping[str, Any], ops: Ops) -> Decoder:
    """A model for a Hugging Face ``config.json``, its weights not yet filled in.

    :raises ModelError: for settings that it does not know.
    """
    c = DecoderConfig.from_hf(config)
    c.require_silu()
    bias = bool(config.get("attention_bias", True))

    def block(layer: int) -> PreNormBlock:
        kinds = config.get("layer_types")
        slides = kinds[layer] == "sliding_attention" if kinds else layer % 2 == 0
        attention = Attention(
            ops,
            hidden=c.hidden,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            qkv_bias=bias,
            out_bias=bias,
            window=config.get("sliding_window", 128) if slides else None,
            sinks=True,
        )
        experts = Moe(
            ops,
            hidden=c.hidden,
            intermediate=c.intermediate,
            experts=config.get("num_local_experts") or config["num_experts"],
            routing=Routing(top_k=config["num_experts_per_tok"], scoring="softmax_topk"),
            activation="clamped_swiglu",
            bias=True,
            router="router",
        )
        return PreNormBlock(ops, c.hidden, c.norm_eps, attention, experts)

    return Decoder(ops, c, [block(layer) for layer in range(c.layers)])
