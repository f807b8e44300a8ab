"""Llama, and what is shaped like it: SmolLM2, Llama 2 and 3, Mistral.

Touvron et al., 2023. Pre-norm residual blocks of grouped-query attention with rotary positions and
a gated MLP. Reads top to bottom: configuration, block, model, names in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..kernels import AttentionBatch, Ops
from ..layers.attention import Attention
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.rotary import rotary_tables

KvCache = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes and switches, named as in the code below; see :meth:`from_hf` for their origin."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_positions: int
    window: int | None
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read a Hugging Face ``config.json``.

        :raises ModelError: for an activation that is not SiLU, or a missing size.
        """
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"activation {config['hidden_act']!r} is not supported; silu is.")
        bias = bool(config.get("attention_bias", False))
        try:
            heads = config["num_attention_heads"]
            return cls(
                vocab_size=config["vocab_size"],
                hidden=config["hidden_size"],
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                intermediate=config["intermediate_size"],
                norm_eps=config.get("rms_norm_eps", 1e-6),
                rope_theta=float(config.get("rope_theta") or 10_000.0),
                rope_scaling=config.get("rope_scaling"),
                max_positions=config.get("max_position_embeddings", 2048),
                window=config.get("sliding_window"),
                qkv_bias=bias,
                out_bias=bool(config.get("attention_out_bias", bias)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise ModelError(f"the model's configuration lacks {error}.") from None


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, ops: Ops) -> None:
        super().__init__()
        self.ops, self.eps = ops, config.norm_eps
        self.attention_norm = nn.Parameter(torch.empty(config.hidden), requires_grad=False)
        self.attention = Attention(
            ops,
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            window=config.window,
        )
        self.mlp_norm = nn.Parameter(torch.empty(config.hidden), requires_grad=False)
        self.mlp = GatedMlp(ops, config.hidden, config.intermediate, bias=config.mlp_bias)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rope: tuple[torch.Tensor, torch.Tensor],
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what the next block adds, and the stream it adds it to, (tokens, hidden) each."""
        if residual is None:
            normed, residual = self.ops.rms_norm(x, self.attention_norm, self.eps), x
        else:
            normed, residual = self.ops.add_rms_norm(x, residual, self.attention_norm, self.eps)
        x = self.attention(normed, rope, kv_cache, batch)
        normed, residual = self.ops.add_rms_norm(x, residual, self.mlp_norm, self.eps)
        return self.mlp(normed), residual

    def linear(self, path: str) -> Linear:
        """The linear map at a dotted path, such as ``attention.qkv``."""
        module = self.get_submodule(path)
        assert isinstance(module, Linear)
        return module


class Llama(nn.Module):
    """The whole model: token ids in, logits of chosen rows out."""

    def __init__(self, config: LlamaConfig, ops: Ops) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.embedding = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden), requires_grad=False
        )
        self.blocks = [Block(config, ops) for _ in range(config.layers)]
        self._owned = nn.ModuleList(self.blocks)  # lets torch see them; `blocks` keeps their type
        self.norm = nn.Parameter(torch.empty(config.hidden), requires_grad=False)
        self.head = None if config.tied else Linear(ops, config.hidden, config.vocab_size)
        self.cos = self.sin = torch.empty(0)  # made by init_rotary

    @classmethod
    def from_config(cls, config: Mapping[str, Any], ops: Ops) -> Llama:
        """An instance for a Hugging Face ``config.json``, its weights not yet filled in."""
        return cls(LlamaConfig.from_hf(config), ops)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Every sliding-window length that some layer uses."""
        return (self.config.window,)

    def kv_shape(self) -> tuple[int, int, int]:
        """What one token's keys take: (layers, kv_heads, head_dim); its values take the same."""
        return self.config.layers, self.config.kv_heads, self.config.head_dim

    def init_rotary(self, max_positions: int) -> None:
        """Make the angle tables for positions below ``max_positions``."""
        cos, sin = rotary_tables(
            head_dim=self.config.head_dim,
            max_positions=max_positions,
            theta=self.config.rope_theta,
            scaling=self.config.rope_scaling,
        )
        device = self.embedding.device
        self.cos, self.sin = cos.to(device), sin.to(device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        kv_cache: KvCache,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Run one step.

        :param token_ids: and :param positions: (tokens,) int64.
        :param rows: (sampled,) int64, the tokens whose logits are wanted.
        :param kv_cache: a layer's key and value pages each, (blocks, block_size, kv_heads,
            head_dim).
        :returns: (sampled, vocab_size) in fp32.
        """
        rope = self.cos[positions], self.sin[positions]
        x = nn.functional.embedding(token_ids, self.embedding)
        residual: torch.Tensor | None = None
        for block, layer_cache in zip(self.blocks, kv_cache, strict=True):
            x, residual = block(x, residual, rope, layer_cache, batch)
        assert residual is not None, "a model has at least one layer"
        x = x[rows] + residual[rows]
        x = self.ops.rms_norm(x, self.norm, self.config.norm_eps)
        logits = self.ops.linear(x, self.tied_head) if self.head is None else self.head(x)
        return logits.float()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill in every weight from (Hugging Face name, tensor) pairs.

        :raises ModelError: for a name that is not known, a wrong shape, or a weight left out.
        """
        missing = self._expected()
        for name, tensor in tensors:
            if name.endswith("rotary_emb.inv_freq") or (
                name == "lm_head.weight" and self.head is None
            ):
                continue  # derived from the configuration; tied to the embedding
            self._fill(name, tensor)
            missing.discard(name)
        if missing:
            some = ", ".join(sorted(missing)[:3])
            raise ModelError(f"the checkpoint lacks {len(missing)} tensors, among them {some}.")
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        if self.head is None:
            self.tied_head = self.ops.pack_linear(self.embedding.data)

    def _fill(self, name: str, tensor: torch.Tensor) -> None:
        match = _LAYER.fullmatch(name)
        if match and int(match["layer"]) < len(self.blocks):
            block = self.blocks[int(match["layer"])]
            if match["name"] in _LINEARS:
                path, part = _LINEARS[match["name"]]
                block.linear(path).load(part, match["kind"], tensor)
                return
            if match["name"] in _NORMS and match["kind"] == "weight":
                _copy(name, block.get_parameter(_NORMS[match["name"]]), tensor)
                return
        elif name == "lm_head.weight" and self.head is not None:
            self.head.load(0, "weight", tensor)
            return
        elif name in _TOP:
            _copy(name, self.get_parameter(_TOP[name]), tensor)
            return
        raise ModelError(f"the checkpoint has a tensor {name!r} that this model has no place for.")

    def _expected(self) -> set[str]:
        names = set(_TOP)
        if self.head is not None:
            names.add("lm_head.weight")
        for layer, block in enumerate(self.blocks):
            prefix = f"model.layers.{layer}."
            names.update(f"{prefix}{name}.weight" for name in (*_NORMS, *_LINEARS))
            for name, (path, _) in _LINEARS.items():
                if block.linear(path).bias is not None:
                    names.add(f"{prefix}{name}.bias")
        return names


_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<name>.+)\.(?P<kind>weight|bias)")

_TOP = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "norm"}

_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}

_LINEARS = {
    "self_attn.q_proj": ("attention.qkv", 0),
    "self_attn.k_proj": ("attention.qkv", 1),
    "self_attn.v_proj": ("attention.qkv", 2),
    "self_attn.o_proj": ("attention.out", 0),
    "mlp.gate_proj": ("mlp.gate_up", 0),
    "mlp.up_proj": ("mlp.gate_up", 1),
    "mlp.down_proj": ("mlp.down", 0),
}


def _copy(name: str, target: torch.Tensor, tensor: torch.Tensor) -> None:
    if target.shape != tensor.shape:
        raise ModelError(
            f"tensor {name!r} has shape {tuple(tensor.shape)}, the configuration says "
            f"{tuple(target.shape)}."
        )
    target.data.copy_(tensor)
