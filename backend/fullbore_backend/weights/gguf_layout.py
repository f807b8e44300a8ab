"""How GGUF files of each architecture relate to Hugging Face's: one table, no I/O.

An entry says which ``model_type`` an architecture is, how its tensors are called there, and what
the conversion to GGUF did to the values, so that it can be undone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_ATTENTION_AND_MLP = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TWO_NORMS = {**_ATTENTION_AND_MLP, "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    **_ATTENTION_AND_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTSIDE_BLOCKS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies (Llama 3); they become part of the configuration."""

_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTER_NAME = re.compile(r"(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One value of ``general.architecture``.

    :param model_type: what a ``config.json`` calls it.
    :param hidden_act: the activation, which GGUF does not state.
    :param block_names: GGUF's name of a layer's tensor to Hugging Face's, without the suffix.
    :param permuted: rows of q and k are interleaved for ggml's rotary layout and must be put back.
    :param norm_offset: what the conversion added to the weights of the norms.
    :param defaults: configuration that the architecture implies and GGUF leaves out.
    """

    model_type: str
    hidden_act: str = "silu"
    block_names: Mapping[str, str]
    permuted: bool = False
    norm_offset: float = 0.0
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def rename(self, name: str) -> str | None:
        """Hugging Face's name of a tensor, or ``None`` if the architecture has no such tensor."""
        if match := _BLOCK_NAME.fullmatch(name):
            layer, stem, suffix = match.groups()
            target = self.block_names.get(stem)
            return target and f"model.layers.{int(layer)}.{target}.{suffix}"
        if match := _OUTER_NAME.fullmatch(name):
            target = _OUTSIDE_BLOCKS.get(match[1])
            return target and f"{target}.{match[2]}"
        return None

    def required(self, num_layers: int) -> list[str]:
        """GGUF names of the tensors a model of this many layers cannot do without."""
        blocks = [f"blk.{i}.{stem}.weight" for i in range(num_layers) for stem in self.block_names]
        return ["token_embd.weight", "output_norm.weight", *blocks]


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        # Llama 1 to 3, SmolLM, and Mistral, whose files carry this name too.
        "llama": Architecture(model_type="llama", block_names=_TWO_NORMS, permuted=True),
        "qwen2": Architecture(
            model_type="qwen2", block_names=_TWO_NORMS, defaults={"use_sliding_window": False}
        ),
        "qwen3": Architecture(
            model_type="qwen3",
            block_names={**_TWO_NORMS, **_QK_NORMS},
            defaults={"use_sliding_window": False},
        ),
        "gemma3": Architecture(
            model_type="gemma3_text",
            hidden_act="gelu_pytorch_tanh",
            block_names={**_FOUR_NORMS, **_QK_NORMS},
            norm_offset=1.0,
            defaults={"rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6},
        ),
    }
)
