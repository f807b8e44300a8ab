"""DeepSeek-V3 and R1 (DeepSeek-AI, 2024): latent attention, sigmoid-routed experts in groups.

The cache holds one latent vector and one rotated key a token, for all heads. Keys and values are
never made: their projections are applied to the queries before attention and to its result after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..kernels import AttentionBatch, KvPages, Ops
from ..layers.attention import Rope
from ..layers.block import FeedForward, PreNormBlock
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.moe import sigmoid_moe
from ..layers.places import Places, copy_to, linear_places
from ..layers.rotary import yarn_scale
from .decoder import Decoder, DecoderConfig, KvLayout, Rotary

_LATENT_EPS = 1e-6
"""Of the norms of latents; the configuration's is that of the others."""


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA).

    :param q_rank: size of the queries' own latent; ``None`` projects them at once.
    :param kv_rank: size of the latent that stands for keys and values.
    :param nope: and :param rotary: dimensions of a head's query without and with a position.
    """

    def __init__(
        self,
        ops: Ops,
        *,
        hidden: int,
        heads: int,
        q_rank: int | None,
        kv_rank: int,
        nope: int,
        rotary: int,
        v_dim: int,
        scale: float,
        interleaved: bool,
        bias: bool,
    ) -> None:
        super().__init__()
        self.ops, self.scale, self.interleaved = ops, scale, interleaved
        self.heads, self.kv_rank, self.nope, self.rotary = heads, kv_rank, nope, rotary
        self.v_dim = v_dim
        self.q_down = None if q_rank is None else Linear(ops, hidden, q_rank, bias=bias)
        self.q_norm = None if q_rank is None else _empty(q_rank)
        self.q_up = Linear(ops, q_rank or hidden, heads * (nope + rotary))
        self.kv_down = Linear(ops, hidden, kv_rank + rotary, bias=bias)
        self.kv_norm = _empty(kv_rank)
        self.kv_up = _empty(heads, nope + v_dim, kv_rank)
        self.out = Linear(ops, heads * v_dim, hidden, bias=bias)

    def forward(
        self, x: torch.Tensor, ropes: Sequence[Rope], pages: KvPages, batch: AttentionBatch
    ) -> torch.Tensor:
        """:param x: (tokens, hidden). Returns the same shape."""
        ops = self.ops
        q = x
        if self.q_down is not None and self.q_norm is not None:
            q = ops.rms_norm(self.q_down(x), self.q_norm, _LATENT_EPS)
        query = self.q_up(q).view(-1, self.heads, self.nope + self.rotary)
        q_nope, q_rope = query.tensor_split([self.nope], dim=-1)
        latent, k_rope = self.kv_down(x).tensor_split([self.kv_rank], dim=-1)
        latent = ops.rms_norm(latent, self.kv_norm, _LATENT_EPS)
        q_rope = ops.rope(q_rope, *ropes[0], interleaved=self.interleaved)
        k_rope = ops.rope(k_rope.unsqueeze(1), *ropes[0], interleaved=self.interleaved)
        key = torch.cat((latent.unsqueeze(1), k_rope), dim=-1)
        ops.store_kv(key, key[..., :0], pages, batch.slots)
        to_keys, to_values = self.kv_up.tensor_split([self.nope], dim=1)
        q_latent = torch.einsum("thn,hnc->thc", q_nope, to_keys)
        attended = ops.mla_attention(q_latent, q_rope, pages, batch, scale=self.scale)
        values = torch.einsum("thc,hvc->thv", attended, to_values)
        out: torch.Tensor = self.out(values.flatten(1))
        return out

    def places(self) -> Places:
        """Its weights, by their names in a checkpoint below ``self_attn``."""
        places: Places = {
            **linear_places(self.kv_down, "kv_a_proj_with_mqa"),
            **linear_places(self.out, "o_proj"),
            "kv_a_layernorm.weight": copy_to(self.kv_norm),
            "kv_b_proj.weight": lambda tensor: copy_to(self.kv_up)(
                tensor.view(self.heads, -1, self.kv_rank)
            ),
        }
        if self.q_down is None or self.q_norm is None:
            return places | linear_places(self.q_up, "q_proj")
        places["q_a_layernorm.weight"] = copy_to(self.q_norm)
        return {
            **places,
            **linear_places(self.q_down, "q_a_proj"),
            **linear_places(self.q_up, "q_b_proj"),
        }


def deepseek_v3(config: Mapping[str, Any], ops: Ops) -> Decoder:
    """A model for a Hugging Face ``config.json``, its weights not yet filled in.

    :raises ModelError: for settings that it does not know.
    """
    c = DecoderConfig.from_hf(config)
    c.require_silu()
    nope, rotary = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    kv_rank = config["kv_lora_rank"]

    def block(layer: int) -> PreNormBlock:
        attention = LatentAttention(
            ops,
            hidden=c.hidden,
            heads=c.heads,
            q_rank=config.get("q_lora_rank"),
            kv_rank=kv_rank,
            nope=nope,
            rotary=rotary,
            v_dim=config["v_head_dim"],
            scale=(nope + rotary) ** -0.5 * yarn_scale(c.rotary.scaling),
            interleaved=bool(config.get("rope_interleave", True)),
            bias=bool(config.get("attention_bias", False)),
        )
        mlp: FeedForward
        if layer < config.get("first_k_dense_replace", 3):
            mlp = GatedMlp(ops, c.hidden, c.intermediate)
        else:
            mlp = sigmoid_moe(config, c.hidden, ops)
        return PreNormBlock(ops, c.hidden, c.norm_eps, attention, mlp)

    return Decoder(
        ops,
        c,
        [block(layer) for layer in range(c.layers)],
        rotaries=(Rotary(dim=rotary, theta=c.rotary.theta, scaling=c.rotary.scaling),),
        kv=KvLayout(layers=c.layers, kv_heads=1, k_dim=kv_rank + rotary, v_dim=0),
    )


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
