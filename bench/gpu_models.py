"""Models of published shapes with random weights, and what a step of one must move and compute.

Speed does not depend on what the weights say, so no checkpoint is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from fullbore_backend.kernels import Ops
from fullbore_backend.models import Decoder, build_model

STD = 0.02

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "Qwen3-30B-A3B": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""As their ``config.json`` have them."""

_TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def shape(name: str, *, tiny: bool) -> dict[str, Any]:
    """The configuration of one of :data:`SHAPES`, or a tiny one of its kind."""
    return {**SHAPES[name], **(_TINY if tiny else {})}


def weights(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every weight of a Qwen3, dense or of experts: its name in a checkpoint, and its shape."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    query, kv = (config[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", (hidden,)
        for part, rows in (("q", query), ("k", kv), ("v", kv)):
            yield f"{layer}.self_attn.{part}_proj.weight", (rows, hidden)
        for part in ("q_norm", "k_norm"):
            yield f"{layer}.self_attn.{part}.weight", (dim,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, query)
        if config["model_type"] != "qwen3_moe":
            yield from _gated(f"{layer}.mlp", hidden, config["intermediate_size"])
            continue
        yield f"{layer}.mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            block = f"{layer}.mlp.experts.{expert}"
            yield from _gated(block, hidden, config["moe_intermediate_size"])


def _gated(block: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{block}.gate_proj.weight", (inner, hidden)
    yield f"{block}.up_proj.weight", (inner, hidden)
    yield f"{block}.down_proj.weight", (hidden, inner)


def tensors(
    config: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight, normal around 0, and norms of ones."""
    for name, size in weights(config):
        made = torch.empty(size, dtype=dtype, device=device)
        yield name, made.fill_(1) if "norm" in name else made.normal_(0, STD)


def random_model(
    config: Mapping[str, Any], ops: Ops, *, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """A model to run, its weights random."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = build_model(config, ops)
    finally:
        torch.set_default_dtype(default)
    model.load(tensors(config, dtype, device))
    model.init_rotary(min(config["max_position_embeddings"], 8192))
    return model.eval()


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """A folder that the engine can load: configuration, weights, and a token's text for each id."""
    torch.manual_seed(0)
    made = {name: tensor.cpu() for name, tensor in tensors(config, dtype, device)}
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate(_texts(letters, config["vocab_size"]))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def _texts(letters: list[str], count: int) -> Iterator[str]:
    """``count`` different texts: the bytes, then runs of letters."""
    yield from letters[:count]
    plain = [letter for letter in letters if letter.isascii() and letter.isalpha()]
    for number in range(len(letters), count):
        digits = []
        for _ in range(4):
            number, digit = divmod(number, len(plain))
            digits.append(plain[digit])
        yield "".join(digits)


def resident_bytes(config: Mapping[str, Any], tokens: int, itemsize: int = 2) -> int:
    """All weights, and a cache for ``tokens`` tokens."""
    total = sum(math.prod(size) for _, size in weights(config))
    return (total + tokens * _kv_numbers(config)) * itemsize


def step_bytes(config: Mapping[str, Any], batch: int, context: int, itemsize: int = 2) -> float:
    """What a decode step must read: every weight it uses and every key and value it sees, once.

    Of an embedding that is not the head too, one row a sequence; of E experts, so many as uniform
    routing uses of them: ``E · (1 - (1 - k / E) ** batch)``.
    """
    total = 0.0
    for name, size in weights(config):
        count = math.prod(size)
        if name == "model.embed_tokens.weight" and not config["tie_word_embeddings"]:
            count = batch * size[1]
        share = _share_of_experts(config, batch) if ".experts." in name else 1.0
        total += share * count
    return (total + batch * context * _kv_numbers(config)) * itemsize


def _kv_numbers(config: Mapping[str, Any]) -> int:
    """Numbers that a token has in the cache."""
    per_layer: int = 2 * config["num_key_value_heads"] * config["head_dim"]
    return int(config["num_hidden_layers"]) * per_layer


def _share_of_experts(config: Mapping[str, Any], batch: int) -> float:
    unused: float = (1 - config["num_experts_per_tok"] / config["num_experts"]) ** batch
    return 1 - unused


def step_operations(config: Mapping[str, Any], batch: int, context: int) -> float:
    """What a decode step must compute: two for each weight a token uses, and attention's."""
    active = 0.0
    for name, size in weights(config):
        count = math.prod(size)
        if ".experts." in name:
            count *= config["num_experts_per_tok"] / config["num_experts"]
        if name != "model.embed_tokens.weight" or config["tie_word_embeddings"]:
            active += count
    heads: int = config["num_attention_heads"] * config["head_dim"]
    return batch * (2 * active + 4 * config["num_hidden_layers"] * heads * context)
