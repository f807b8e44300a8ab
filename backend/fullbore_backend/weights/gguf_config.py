"""A GGUF file's metadata in the words of a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ModelError
from .config_json import normalise
from .gguf_file import GGUFFile
from .gguf_layout import Architecture

_TOKENIZER = "tokenizer.ggml."
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_YARN_KEYS = {
    "yarn_ext_factor": "extrapolation_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a sequence, a turn or a message, each once."""
    found = (metadata.get(_TOKENIZER + key) for key in _END_KEYS)
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


def hugging_face_config(
    file: GGUFFile, architecture: Architecture, *, rope_factors: Sequence[float] | None
) -> Mapping[str, Any]:
    """Translate; ``rope_factors`` are the file's own divisors of the rotary frequencies, if any.

    :raises ModelError: if a key the architecture needs is missing.
    """
    metadata, tensors = file.metadata, file.tensors
    prefix = metadata["general.architecture"] + "."

    def key(name: str, default: Any = None) -> Any:
        return metadata.get(prefix + name, default)

    embedding = tensors.get("token_embd.weight")
    heads, hidden = key("attention.head_count"), key("embedding_length")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no token embedding; it is not a language model.")
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        raise ModelError(
            f"{file.path} states {heads!r} attention heads and an embedding length of {hidden!r}; "
            "both must be one number for all layers."
        )
    head_dim = key("attention.key_length") or hidden // heads
    rotary = key("rope.dimension_count") or head_dim
    if not all(isinstance(size, int) and size > 0 for size in (head_dim, rotary)):
        raise ModelError(
            f"{file.path} states heads of {head_dim!r} values, {rotary!r} of them rotated; both "
            "must be whole numbers above 0."
        )
    config: dict[str, Any] = {
        **architecture.defaults,
        "model_type": architecture.model_type,
        "hidden_act": architecture.hidden_act,
        "hidden_size": hidden,
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key("attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": key("feed_forward_length"),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": key("context_length", 2048),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "rope_theta": key("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(file, prefix, rope_factors),
        "partial_rotary_factor": rotary / head_dim,
        "bos_token_id": metadata.get(_TOKENIZER + "bos_token_id"),
        "eos_token_id": metadata.get(_TOKENIZER + "eos_token_id"),
        "pad_token_id": metadata.get(_TOKENIZER + "padding_token_id"),
    }
    if architecture.model_type == "gemma3_text":
        config |= _gemma3(config, sliding_window=key("attention.sliding_window"))
    return normalise(config, source=str(file.path))


def _rope_scaling(
    file: GGUFFile, prefix: str, factors: Sequence[float] | None
) -> dict[str, Any] | None:
    if factors is not None:
        return {"rope_type": "factors", "factors": list(factors)}
    metadata = file.metadata
    factor = metadata.get(prefix + "rope.scaling.factor") or metadata.get(
        prefix + "rope.scale_linear"
    )
    kind = metadata.get(prefix + "rope.scaling.type", "linear" if factor else "none")
    if kind == "none" or not factor:
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaling
    if kind != "yarn":
        raise ModelError(f"{file.path} has rope scaling {kind!r}; linear and yarn are supported.")
    if original := metadata.get(prefix + "rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    for name, target in _YARN_KEYS.items():
        if (value := metadata.get(f"{prefix}rope.scaling.{name}")) is not None:
            scaling[target] = value
    return scaling


def _gemma3(config: Mapping[str, Any], *, sliding_window: int | None) -> dict[str, Any]:
    """What Gemma 3 needs beyond the shared keys (Gemma 3 technical report, 2025)."""
    layers, pattern = config["num_hidden_layers"], config["sliding_window_pattern"]
    # The 27B model alone scales queries by its hidden size per head; GGUF does not say so.
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "sliding_window": sliding_window,
        "layer_types": [
            "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)
        ],
        "query_pre_attn_scalar": per_head if layers == 62 else config["head_dim"],
    }
