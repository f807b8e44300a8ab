"""Which product goes with which quantised weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fullbore_backend.kernels import Ops, triton_ops
from fullbore_backend.kernels.linear_fp8 import quantize_fp8
from fullbore_backend.kernels.linear_int4 import quantize_int4
from fullbore_backend.kernels.linear_int8 import quantize_int8
from fullbore_backend.kernels.linear_quantized import QuantizedWeight, concat_weights

QUANTIZERS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "int8": quantize_int8,
    "fp8": quantize_fp8,
    "fp8 blocks": lambda weight: quantize_fp8(weight, 128),
    "int4": quantize_int4,
}
# What the relative error may be, in the norm: of weights and activations of random numbers.
ERRORS = {"int8": 0.015, "fp8": 0.1, "fp8 blocks": 0.1, "int4": 0.12}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ops", [Ops(), triton_ops()], ids=["torch", "triton"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_any_kind_multiplies(name: str, ops: Ops, device: torch.device) -> None:
    x, weight, bias = randn(6, 256), randn(128, 256, seed=1), randn(128, seed=2)
    made = QUANTIZERS[name](weight)
    want = x @ weight.T + bias
    got = ops.linear_quantized(x.to(device), made.to(device), bias.to(device)).cpu()
    assert got.shape == want.shape
    assert (got - want).norm() <= ERRORS[name] * want.norm()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_parts_side_by_side_are_one_weight(name: str) -> None:
    parts = [QUANTIZERS[name](randn(128, 256, seed=seed)) for seed in range(3)]
    assert all(one.joins(other) for one in parts for other in parts)
    whole = concat_weights(parts)
    assert (whole.rows, whole.inputs) == (384, 256)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
