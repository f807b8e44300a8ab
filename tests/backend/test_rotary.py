"""Tables of rotary angles: what is refused, and the kind that only GGUF has."""

from __future__ import annotations

import pytest
import torch

from fullbore_backend.errors import ModelError
from fullbore_backend.layers.rotary import rotary_tables


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
