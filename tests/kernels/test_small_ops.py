"""Rotation, storing and gates in Triton against their torch twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fullbore_backend.kernels.kv_pages import LARGEST, KvPages
from fullbore_backend.kernels.rope import rope_torch, rope_triton
from fullbore_backend.kernels.rope_store_kv import rope_store_kv_torch, rope_store_kv_triton
from fullbore_backend.kernels.silu_mul import (
    clamped_swiglu_torch,
    clamped_swiglu_triton,
    gelu_mul_torch,
    gelu_mul_triton,
    silu_mul_torch,
    silu_mul_triton,
)
from fullbore_backend.kernels.store_kv import store_kv_torch, store_kv_triton

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STORED = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8]
Check = Callable[..., None]


def randn(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def angles(tokens: int, pairs: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    turn = randn(tokens, pairs, seed=9, dtype=torch.float32, device=device)
    return turn.cos(), turn.sin()


def empty_pages(
    dtype: torch.dtype, heads: int, k_dim: int, v_dim: int, device: torch.device
) -> KvPages:
    shape = (5, 4, heads)
    scaled = dtype in LARGEST
    return KvPages(
        k=torch.zeros(*shape, k_dim, dtype=dtype, device=device),
        v=torch.zeros(*shape, v_dim, dtype=dtype, device=device),
        k_scale=torch.zeros(shape, device=device) if scaled else None,
        v_scale=torch.zeros(shape, device=device) if scaled else None,
    )


def assert_same_pages(got: KvPages, want: KvPages) -> None:
    """Stored numbers may differ by one step of their dtype: scales and ties round differently."""
    assert (got.k_scale is None) == (want.k_scale is None)
    for one, other in ((got.k, want.k), (got.v, want.v)):
        step = {torch.int8: 1.0, torch.float8_e4m3fn: 32.0}.get(one.dtype, 0.0)
        loose = 2 * torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
        torch.testing.assert_close(one.double(), other.double(), rtol=loose, atol=step)
    for one, other in ((got.k_scale, want.k_scale), (got.v_scale, want.v_scale)):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("dim", "pairs"), [(8, 4), (80, 40), (20, 6)], ids=str)
def test_rope(
    dim: int,
    pairs: int,
    interleaved: bool,
    dtype: torch.dtype,
    device: torch.device,
    assert_as_exact: Check,
) -> None:
    x = randn(3, 5, dim, seed=0, dtype=dtype, device=device)[:, 1:4]
    cos, sin = angles(3, pairs, device)
    exact = rope_torch(x.double(), cos.double(), sin.double(), interleaved=interleaved)
    twin = rope_torch(x, cos, sin, interleaved=interleaved)
    assert_as_exact(rope_triton(x, cos, sin, interleaved=interleaved), twin, exact)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize(("k_dim", "v_dim"), [(16, 16), (24, 12), (36, 0)], ids=str)
def test_store_kv_skips_padding(
    k_dim: int, v_dim: int, stored: torch.dtype, device: torch.device
) -> None:
    key = randn(4, 3, k_dim, seed=0, dtype=torch.float32, device=device)[:, :2]
    value = randn(4, 2, v_dim, seed=1, dtype=torch.float32, device=device)
    slots = torch.tensor([7, -1, 19, 0], device=device)
    got, want = (empty_pages(stored, 2, k_dim, v_dim, device) for _ in range(2))
    store_kv_triton(key, value, got, slots)
    store_kv_torch(key, value, want, slots)
    assert_same_pages(got, want)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("norm", [None, "like x", "fp32"])
@pytest.mark.parametrize("pairs", [8, 5], ids=["all turn", "some turn"])
def test_rope_store_kv(
    pairs: int,
    norm: str | None,
    stored: torch.dtype,
    device: torch.device,
    assert_as_exact: Check,
) -> None:
    """From one buffer of queries, keys and values, a token of it padding."""
    dtype = torch.float16 if stored == torch.float16 else torch.float32
    heads, kv_heads, dim = 4, 2, 16
    qkv = randn(3, 2, heads + 2 * kv_heads, dim, seed=0, dtype=dtype, device=device)[:, 1]
    cos, sin = angles(3, pairs, device)
    slots = torch.tensor([7, -1, 19], device=device)
    norm_dtype = torch.float32 if norm == "fp32" else dtype
    norms = [randn(dim, seed=seed, dtype=norm_dtype, device=device) for seed in (3, 4)]
    options = {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-5} if norm else {}
    got, want = (empty_pages(stored, kv_heads, dim, dim, device) for _ in range(2))
    query = rope_store_kv_triton(qkv, cos, sin, got, slots, heads=heads, **options)
    twin = rope_store_kv_torch(qkv, cos, sin, want, slots, heads=heads, **options)
    assert_same_pages(got, want)
    wide = {name: each.double() if name != "eps" else each for name, each in options.items()}
    exact = rope_store_kv_torch(
        *(qkv.double(), cos.double(), sin.double()),
        empty_pages(torch.float32, kv_heads, dim, dim, device),
        slots,
        heads=heads,
        **wide,
    )
    assert_as_exact(query, twin, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 123, 1500])
@pytest.mark.parametrize(
    ("kernel", "twin"),
    [
        (silu_mul_triton, silu_mul_torch),
        (gelu_mul_triton, gelu_mul_torch),
        (clamped_swiglu_triton, clamped_swiglu_torch),
    ],
    ids=["silu", "gelu", "clamped"],
)
def test_gates(
    kernel: Callable[..., torch.Tensor],
    twin: Callable[..., torch.Tensor],
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    assert_as_exact: Check,
) -> None:
    x = randn(3, 2, 2 * size, seed=0, dtype=dtype, device=device)[:, 1] * 5
    assert_as_exact(kernel(x), twin(x), twin(x.double()))


def test_nothing_to_do(device: torch.device) -> None:
    """Empty batches launch nothing."""
    pages = empty_pages(torch.float32, 2, 8, 8, device)
    none = torch.empty(0, 8, 8, device=device)
    cos, sin = angles(0, 4, device)
    slots = torch.empty(0, dtype=torch.int64, device=device)
    assert rope_triton(none, cos, sin).shape == (0, 8, 8)
    assert rope_store_kv_triton(none, cos, sin, pages, slots, heads=4).shape == (0, 4, 8)
    store_kv_triton(none[:, :2], none[:, :2], pages, slots)
    assert silu_mul_triton(none.flatten(1)).shape == (0, 32)
