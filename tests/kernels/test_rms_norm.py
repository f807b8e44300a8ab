"""The Triton RMSNorm against its torch twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fullbore_backend.kernels.rms_norm import (
    add_rms_norm_torch,
    add_rms_norm_triton,
    rms_norm_torch,
    rms_norm_triton,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def randn(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (5, 123), (3, 7, 64), (2, 1823)], ids=str)
def test_rms_norm(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    assert_as_exact: Callable[..., None],
) -> None:
    x = randn(*shape, seed=0, dtype=dtype, device=device)
    weight = randn(shape[-1], seed=1, dtype=dtype, device=device)
    exact = rms_norm_torch(x.double(), weight.double(), 1e-5)
    twin = rms_norm_torch(x, weight, 1e-5)
    assert_as_exact(rms_norm_triton(x, weight, 1e-5), twin, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_weight_in_fp32_multiplies_before_rounding(
    dtype: torch.dtype, device: torch.device, assert_as_exact: Callable[..., None]
) -> None:
    x = randn(5, 123, seed=0, dtype=dtype, device=device)
    weight = randn(123, seed=1, dtype=torch.float32, device=device)
    exact = rms_norm_torch(x.double(), weight.double(), 1e-5)
    twin = rms_norm_torch(x, weight, 1e-5)
    assert torch.equal(twin, exact.to(dtype)), "rounded once"
    assert_as_exact(rms_norm_triton(x, weight, 1e-5), twin, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_of_rows_that_lie_apart(
    dtype: torch.dtype, device: torch.device, assert_as_exact: Callable[..., None]
) -> None:
    x = randn(6, 2, 123, seed=0, dtype=dtype, device=device)[:, 1]
    residual = randn(6, 123, seed=1, dtype=dtype, device=device)
    weight = randn(123, seed=2, dtype=dtype, device=device)
    normed, total = add_rms_norm_triton(x, residual, weight, 1e-6)
    twin_normed, twin_total = add_rms_norm_torch(x, residual, weight, 1e-6)
    wide = [each.double() for each in (x, residual, weight)]
    exact_normed, exact_total = add_rms_norm_torch(*wide, 1e-6)
    assert_as_exact(total, twin_total, exact_total)
    assert_as_exact(normed, twin_normed, exact_normed)
