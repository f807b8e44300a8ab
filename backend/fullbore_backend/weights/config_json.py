"""One form for a model's configuration, whatever wrote it.

``config.json`` has changed over the years: rotary settings moved, defaults were left out. The
result of :func:`normalise` always has these keys, so that a model class needs no fallbacks:

``model_type``, ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``,
``num_key_value_heads``, ``head_dim``, ``intermediate_size``, ``vocab_size``,
``max_position_embeddings``, ``rms_norm_eps``, ``hidden_act``, ``tie_word_embeddings``,
``attention_bias`` (of q, k and v), ``attention_out_bias`` (of o), ``mlp_bias``, ``rope_theta``
(float), ``rope_scaling`` (``None``, or a dict with ``rope_type``; for ``dynamic`` and ``longrope``
also ``original_max_position_embeddings`` and ``factor``), ``partial_rotary_factor``,
``bos_token_id``, ``eos_token_id``, ``pad_token_id``; and every other key as it was found.

``rope_type`` is Hugging Face's, and one more: ``factors``, with ``factors`` a list of
``head_dim / 2`` divisors of the inverse frequencies (how GGUF stores Llama 3's scaling).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..errors import ModelError

_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
_COUNTS = (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")

_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_TIED_BY_DEFAULT = frozenset({"gemma", "gemma2", "gemma3_text"})


def normalise(raw: Mapping[str, Any], *, source: str) -> Mapping[str, Any]:
    """Bring a configuration to the form above; ``source`` names its file in errors.

    :raises ModelError: if a key without which no model can be built is missing or not usable.
    """
    if not isinstance(raw.get("model_type"), str):
        raise ModelError(f"{source} has no model_type; it is not a model's configuration.")
    config = {**_DEFAULTS, **raw}
    if missing := [key for key in _REQUIRED if config.get(key) is None]:
        raise ModelError(f"{source} lacks {', '.join(missing)}; the model cannot be built from it.")
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    if config.get("head_dim") is None and isinstance(heads, int) and heads > 0:
        config["head_dim"] = config["hidden_size"] // heads
    _check_counts(config, source)
    config["hidden_act"] = raw.get("hidden_act") or raw.get("hidden_activation") or "silu"
    if config.get("tie_word_embeddings") is None:
        config["tie_word_embeddings"] = raw["model_type"] in _TIED_BY_DEFAULT
    if config.get("attention_bias") is None:
        config["attention_bias"] = raw["model_type"] == "qwen2"  # always biased, without a setting
    if config.get("attention_out_bias") is None:
        config["attention_out_bias"] = config["attention_bias"] and raw["model_type"] != "qwen2"
    _normalise_rope(config)
    return MappingProxyType(config)


def _check_counts(config: Mapping[str, Any], source: str) -> None:
    for key in _COUNTS:
        value = config[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{source} has {key} = {value!r}; it must be a positive integer.")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads:
        raise ModelError(
            f"{source} has {heads} attention heads and {kv_heads} key-value heads; "
            "the first must be a multiple of the second."
        )


def _normalise_rope(config: dict[str, Any]) -> None:
    """Fold ``rope_parameters``, ``rope_scaling`` and their older spellings into one."""
    parameters = dict(config.pop("rope_parameters", None) or {})
    # Models with two kinds of layers nest one set of parameters per kind.
    if local := parameters.get("sliding_attention"):
        config.setdefault("rope_local_base_freq", float(local.get("rope_theta", 10_000.0)))
    if "full_attention" in parameters:
        parameters = dict(parameters["full_attention"])
    scaling = {**(config.get("rope_scaling") or {}), **parameters}
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    partial = scaling.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    config["rope_theta"] = float(theta)
    config["partial_rotary_factor"] = float(partial or 1.0)
    config["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **scaling}
    if kind in ("dynamic", "longrope"):
        _complete_by_length(config, config["rope_scaling"])


def _complete_by_length(config: Mapping[str, Any], scaling: dict[str, Any]) -> None:
    """What the kinds of scaling that depend on a sequence's length take from beside them.

    ``dynamic`` starts at ``max_position_embeddings``, whatever else is there; ``longrope`` reaches
    up to them.
    """
    limit = config["max_position_embeddings"]
    key = "original_max_position_embeddings"
    original = limit if scaling["rope_type"] == "dynamic" else scaling.get(key) or config.get(key)
    scaling[key] = original or limit
    if scaling.get("factor") is None:
        scaling["factor"] = limit / scaling[key]
