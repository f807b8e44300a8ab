"""Qwen2 and Qwen3, dense and as a mixture of experts (Qwen technical reports, 2024 and 2025).

Llama with biases on queries, keys and values (2), or norms of queries and keys head by head (3). A
sliding window, if it is switched on, holds from some layer upwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernels import Ops
from ..layers.attention import Attention
from ..layers.block import FeedForward, PreNormBlock
from ..layers.mlp import GatedMlp
from ..layers.moe import Moe, Routing
from .decoder import Decoder, DecoderConfig


def qwen2(config: Mapping[str, Any], ops: Ops) -> Decoder:
    """Qwen2 and Qwen2.5.

    :raises ModelError: for settings that it does not know.
    """
    return _qwen(config, ops, qkv_bias=True, qk_norm=False)


def qwen3(config: Mapping[str, Any], ops: Ops) -> Decoder:
    """Qwen3.

    :raises ModelError: for settings that it does not know.
    """
    return _qwen(config, ops, qkv_bias=bool(config.get("attention_bias", False)), qk_norm=True)


def _qwen(config: Mapping[str, Any], ops: Ops, *, qkv_bias: bool, qk_norm: bool) -> Decoder:
    c = DecoderConfig.from_hf(config)
    c.require_silu()
    is_moe = config.get("model_type") == "qwen3_moe"

    def block(layer: int) -> PreNormBlock:
        attention = Attention(
            ops,
            hidden=c.hidden,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            qkv_bias=qkv_bias,
            out_bias=bool(config.get("attention_out_bias", qkv_bias and qk_norm)),
            window=_window(config, layer, everywhere=is_moe),
            qk_norm=qk_norm,
            norm_eps=c.norm_eps,
        )
        mlp: FeedForward
        if is_moe and _is_sparse(config, layer):
            mlp = _experts(config, c.hidden, ops)
        else:
            mlp = GatedMlp(ops, c.hidden, c.intermediate)
        return PreNormBlock(ops, c.hidden, c.norm_eps, attention, mlp)

    return Decoder(ops, c, [block(layer) for layer in range(c.layers)])


def _window(config: Mapping[str, Any], layer: int, *, everywhere: bool) -> int | None:
    if not config.get("use_sliding_window"):
        return None
    kinds = config.get("layer_types")
    if everywhere:
        slides = True
    elif kinds:
        slides = kinds[layer] == "sliding_attention"
    else:
        slides = layer >= config.get("max_window_layers", 28)
    window: int | None = config.get("sliding_window", 4096)
    return window if slides else None


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    step = config.get("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    return layer not in dense and (layer + 1) % step == 0


def _experts(config: Mapping[str, Any], hidden: int, ops: Ops) -> Moe:
    return Moe(
        ops,
        hidden=hidden,
        intermediate=config["moe_intermediate_size"],
        experts=config.get("num_experts") or config["num_local_experts"],
        routing=Routing(
            top_k=config["num_experts_per_tok"],
            renormalize=bool(config.get("norm_topk_prob", False)),
        ),
    )
