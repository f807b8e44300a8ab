"""The torch twins against plain fp64 arithmetic: a twin is the oracle of every faster kernel."""

from __future__ import annotations

import pytest
import torch

from fullbore_backend.kernels.attention_batch import AttentionBatch
from fullbore_backend.kernels.kv_pages import KvPages
from fullbore_backend.kernels.linear import has_onednn, linear_onednn, pack_linear_onednn
from fullbore_backend.kernels.paged_attention import paged_attention_torch
from fullbore_backend.kernels.rms_norm import add_rms_norm_torch, rms_norm_torch
from fullbore_backend.kernels.rope import rope_torch
from fullbore_backend.kernels.silu_mul import silu_mul_torch
from fullbore_backend.kernels.store_kv import store_kv_torch

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (5, 123), (3, 7, 64)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    wide = x.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(rms_norm_torch(x, weight, 1e-5), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_returns_the_sum_too(dtype: torch.dtype) -> None:
    x, residual, weight = (randn(5, 24, dtype=dtype, seed=seed) for seed in range(3))
    normed, total = add_rms_norm_torch(x, residual, weight[0], 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm_torch(total, weight[0], 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_is_a_rotation_of_pairs(dtype: torch.dtype) -> None:
    x = randn(6, 3, 16, dtype=dtype)[:, 1:]  # a view with a gap, as queries are
    angles = randn(6, 8, seed=1)
    turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(
        torch.ones(6, 1, 8, dtype=torch.float64), angles.double()[:, None]
    )
    assert_close(
        rope_torch(x, angles.cos(), angles.sin()), torch.cat((turned.real, turned.imag), -1)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype: torch.dtype) -> None:
    x = randn(7, 26, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(silu_mul_torch(x), gate / (1 + (-gate).exp()) * up)


@pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN")
@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 200])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (123, 77), (1, 5)], ids=str)
def test_linear_onednn(inputs: int, outputs: int, with_bias: bool, rows: int) -> None:
    """Within the bound of rounding errors that add up at random (Higham and Mary, 2019)."""
    x, weight = randn(rows, inputs), randn(outputs, inputs, seed=1)
    bias = randn(outputs, seed=2) if with_bias else torch.zeros(outputs)
    want = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    got = linear_onednn(x, pack_linear_onednn(weight), bias if with_bias else None)
    assert got.shape == (rows, outputs)
    assert ((got.double() - want).abs() <= (inputs + 1) ** 0.5 * 2.0**-24 * size).all()


def attend_naively(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """One sequence in fp64: query i is token ``first + i`` and sees keys up to itself."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for i in range(query.shape[0]):
        low = 0 if window is None else max(first + i - window + 1, 0)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = keys[low : first + i + 1, kv].double() @ query[i, head].double() * scale
            out[i, head] = scores.softmax(0) @ values[low : first + i + 1, kv].double()
    return out


@pytest.mark.parametrize("window", [None, 1, 5], ids=["full", "window1", "window5"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (9, 3), (4, 4)], ids=str)
def test_paged_attention(heads: tuple[int, int], block_size: int, window: int | None) -> None:
    """Decodes, prefills and chunked prefills in one step, on pages in shuffled order."""
    query_lens = [1, 1, 1, 1, 3, 7, 20]
    context_lens = [1, 4, 5, 200, 3, 30, 33]
    head_dim, (num_heads, kv_heads) = 8, heads
    pages = [-(-context // block_size) for context in context_lens]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(3)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in pages]
    unseen = torch.full((sum(pages), block_size, kv_heads, head_dim), 1e4)
    cache = KvPages(k=unseen, v=unseen.clone())
    keys, values, queries = [], [], []
    for i, (new, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        keys.append(randn(context, kv_heads, head_dim, seed=10 + i))
        values.append(randn(context, kv_heads, head_dim, seed=20 + i))
        queries.append(randn(new, num_heads, head_dim, seed=30 + i))
        slots = [tables[i][p // block_size] * block_size + p % block_size for p in range(context)]
        store_kv_torch(keys[i], values[i], cache, torch.tensor(slots))
    batch = AttentionBatch.build(
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=tables,
        block_size=block_size,
        device=torch.device("cpu"),
    )
    got = paged_attention_torch(torch.cat(queries), cache, batch, scale=0.3, window=window)
    want = torch.cat(
        [
            attend_naively(query, key, value, context - new, window, 0.3)
            for query, key, value, context, new in zip(
                queries, keys, values, context_lens, query_lens, strict=True
            )
        ]
    )
    assert_close(got, want)


def test_slots_are_the_last_tokens_of_each_sequence() -> None:
    batch = AttentionBatch.build(
        query_lens=[1, 3],
        context_lens=[6, 5],
        block_tables=[[7, 2], [0, 9]],
        block_size=4,
        device=torch.device("cpu"),
    )
    assert batch.slots.tolist() == [2 * 4 + 1, 0 * 4 + 2, 0 * 4 + 3, 9 * 4 + 0]


def test_one_long_context_does_not_pad_the_short_ones() -> None:
    """Decodes share a group only while padding at most doubles what is read."""
    contexts = [16] * 30 + [8000]
    batch = AttentionBatch.build(
        query_lens=[1] * 31,
        context_lens=contexts,
        block_tables=[list(range(-(-context // 16))) for context in contexts],
        block_size=16,
        device=torch.device("cpu"),
    )
    assert [group.num_seqs for group in batch.groups(16)] == [30, 1]
    assert batch.groups(16)[0].blocks.numel() == 30
