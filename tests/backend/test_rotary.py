"""Tables of rotary angles: against transformers' where it has the kind, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fullbore_backend.errors import ModelError
from fullbore_backend.layers.rotary import rotary_tables, trained_positions
from fullbore_backend.weights.config_json import normalise

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 8,
    "vocab_size": 8,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.02, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0],
}


def normalised(scaling: dict[str, Any], **more: Any) -> Any:
    raw = {"model_type": "llama", **SIZES, "rope_theta": 5000.0, "rope_scaling": scaling, **more}
    return normalise(raw, source="config.json")


def theirs(scaling: dict[str, Any], length: int, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' frequencies for a sequence of this length, and what they make of positions."""
    parameters = {"rope_theta": 5000.0, **scaling}
    config = transformers.LlamaConfig(**SIZES, rope_parameters=parameters, **more)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, None, length)
    angles = torch.outer(torch.arange(float(length)), frequencies)
    return angles.cos() * magnitude, angles.sin() * magnitude


@pytest.mark.parametrize("length", [16, 32, 33, 100, 128])
@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 32),
        ({**LONGROPE, "original_max_position_embeddings": 32}, 128),
        ({**LONGROPE, "original_max_position_embeddings": 32, "factor": 2.0}, 128),
        ({**LONGROPE, "original_max_position_embeddings": 32, "attention_factor": 1.5}, 128),
    ],
    ids=["dynamic", "longrope", "longrope, own factor", "longrope, own magnitude"],
)
def test_kinds_that_depend_on_the_length(scaling: dict[str, Any], limit: int, length: int) -> None:
    """As transformers computes them for a sequence as long as the longest."""
    config = normalised(scaling, max_position_embeddings=limit)
    got = rotary_tables(
        head_dim=16, max_positions=length, theta=5000.0, scaling=config["rope_scaling"]
    )
    want = theirs(scaling, length, max_position_embeddings=limit)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert trained_positions(config["rope_scaling"]) == 32


def test_the_original_length_may_stand_beside_the_scaling() -> None:
    """As in Phi-3's configurations; the factor follows from it."""
    more = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    scaling = normalised(LONGROPE, **more)["rope_scaling"]
    assert (scaling["original_max_position_embeddings"], scaling["factor"]) == (32, 4.0)


def test_other_kinds_do_not_depend_on_the_length() -> None:
    assert trained_positions(None) is None
    assert trained_positions({"rope_type": "linear", "factor": 2.0}) is None


def test_longrope_wants_a_divisor_for_each_frequency() -> None:
    scaling = {**LONGROPE, "original_max_position_embeddings": 4, "factor": 2.0}
    with pytest.raises(ModelError, match="long_factor has 8 numbers for 4 frequencies"):
        rotary_tables(head_dim=8, max_positions=8, theta=1e4, scaling=scaling)


def test_unknown_rope_scaling_is_refused() -> None:
    with pytest.raises(ModelError, match="rope scaling 'ntk-by-ear'"):
        rotary_tables(head_dim=8, max_positions=4, theta=1e4, scaling={"rope_type": "ntk-by-ear"})


def test_factors_divide_the_frequencies() -> None:
    cos, _ = rotary_tables(
        head_dim=4,
        max_positions=3,
        theta=100.0,
        scaling={"rope_type": "factors", "factors": [1.0, 4.0]},
    )
    want = torch.outer(torch.arange(3.0), torch.tensor([1.0, 0.1 / 4])).cos()
    torch.testing.assert_close(cos, want)
