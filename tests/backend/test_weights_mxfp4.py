"""MXFP4 weights against the format's own words, and against transformers' reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fullbore_backend.errors import ModelError
from fullbore_backend.weights import open_checkpoint
from fullbore_backend.weights.mxfp4 import dequantize_mxfp4, widen_mxfp4

CONFIG = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 8,
    "quantization_config": {"quant_method": "mxfp4"},
}


def random(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def test_every_value_of_the_format() -> None:
    """The low half of a byte comes first; 127 is the exponent of one."""
    blocks = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    got = dequantize_mxfp4(blocks, torch.tensor([128], dtype=torch.uint8), dtype=torch.float32)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    one = [2 * value for value in (*positive, *(-value for value in positive))]
    assert got.tolist() == one * 2


def test_the_same_as_transformers() -> None:
    blocks, scales = random(2, 6, 3, 16), random(2, 6, 3, low=110, high=140)
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    ((name, got),) = widen_mxfp4([("w_scales", scales), ("w_blocks", blocks)], dtype=torch.float32)
    assert name == "w"
    torch.testing.assert_close(got, want.reshape(got.shape), rtol=0, atol=0)


def test_half_a_pair_is_an_error() -> None:
    with pytest.raises(ModelError, match="w_blocks without its other half"):
        list(widen_mxfp4([("w_blocks", random(1, 1, 16))], dtype=torch.float32))


def test_a_folder_is_widened_as_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = {"a_blocks": random(1, 2, 2, 16), "a_scales": random(1, 2, 2), "b": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    got = dict(open_checkpoint(tmp_path).tensors(dtype=torch.bfloat16))
    assert {name: (tuple(t.shape), t.dtype) for name, t in got.items()} == {
        "a": ((1, 64, 2), torch.bfloat16),
        "b": ((3,), torch.float32),
    }
