"""Configurations of all ages end in one form."""

from __future__ import annotations

from typing import Any

import pytest

from fullbore_backend.errors import ModelError
from fullbore_backend.weights.config_json import normalise

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_defaults() -> None:
    """What old files leave out."""
    config = normalise(SIZES, source="x")
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16
    assert config["max_position_embeddings"] == 2048
    assert config["hidden_act"] == "silu"
    assert config["rope_theta"] == 10_000.0
    assert config["rope_scaling"] is None
    assert config["partial_rotary_factor"] == 1.0
    assert not any(config[key] for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"))
    with pytest.raises(TypeError):
        config["head_dim"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("given", "theta", "scaling"),
    [
        pytest.param({"rope_theta": 5e5}, 5e5, None, id="theta"),
        pytest.param(
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            1e4,
            {"rope_type": "linear", "factor": 2.0},
            id="old key",
        ),
        pytest.param(
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            5e5,
            {"rope_type": "llama3", **LLAMA3},
            id="llama 3",
        ),
        pytest.param(
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            5e5,
            {"rope_type": "llama3", **LLAMA3},
            id="transformers 5",
        ),
        pytest.param(
            {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}},
            7.0,
            None,
            id="default",
        ),
        pytest.param({"rope_scaling": None, "rope_theta": None}, 1e4, None, id="null"),
        pytest.param(
            {"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 2.0}},
            1e4,
            {"rope_type": "yarn", "factor": 2.0},
            id="both spellings",
        ),
    ],
)
def test_rotary_settings(given: dict[str, Any], theta: float, scaling: Any) -> None:
    """`rope_theta` is a number and `rope_scaling` None or an object with `rope_type`."""
    config = normalise(SIZES | given, source="x")
    assert (config["rope_theta"], config["rope_scaling"]) == (theta, scaling)
    assert "rope_parameters" not in config


def test_two_kinds_of_layers() -> None:
    """Each has its own rotary settings; those of the full ones are the model's."""
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    given = {"model_type": "gemma3_text", "rope_parameters": parameters}
    config = normalise(SIZES | given | {"hidden_activation": "gelu_pytorch_tanh"}, source="x")
    assert config["rope_theta"] == 1e6
    assert config["rope_local_base_freq"] == 1e4
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["hidden_act"] == "gelu_pytorch_tanh"
    assert config["tie_word_embeddings"] is True


def test_biases() -> None:
    """Qwen 2 has them on q, k and v without saying so; Llama's setting includes o."""
    qwen = normalise(SIZES | {"model_type": "qwen2"}, source="x")
    assert (qwen["attention_bias"], qwen["attention_out_bias"]) == (True, False)
    llama = normalise(SIZES | {"attention_bias": True}, source="x")
    assert (llama["attention_bias"], llama["attention_out_bias"]) == (True, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_type": None}, "no model_type"),
        ({"hidden_size": None, "vocab_size": None}, "lacks hidden_size, vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
        ({"head_dim": -1}, "head_dim = -1"),
        ({"num_key_value_heads": 3}, "multiple of the second"),
    ],
)
def test_unusable_values_are_refused(given: dict[str, Any], message: str) -> None:
    """Naming file, key and value."""
    with pytest.raises(ModelError, match=f"the file.*{message}"):
        normalise(SIZES | given, source="the file")
