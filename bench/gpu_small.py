"""The operations between the matrix products, all bound by memory; and the choice of a token.

Sizes are those of Qwen3-8B: hidden 4096, 32 query and 8 KV heads of 128, 12288 in the feed-forward
block, 151936 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from gpu_cases import Case
from gpu_timing import Bench, Row

from fullbore_backend import SamplingParams
from fullbore_backend.kernels import KvPages
from fullbore_backend.kernels.rms_norm import add_rms_norm_torch, rms_norm_torch
from fullbore_backend.kernels.rope_store_kv import rope_store_kv_torch
from fullbore_backend.kernels.silu_mul import silu_mul_torch
from fullbore_backend.sampling import SamplingState, start_sampling

EPS = 1e-6


def small_operations(bench: Bench) -> Iterator[Case]:
    """Norms, rotation with the cache's store, and the gate."""
    for tokens in (3,) if bench.tiny else (1, 64, 2048, 16384):
        yield Case(f"rms_norm {tokens}", partial(_norm, bench, tokens))
        yield Case(f"add_rms_norm {tokens}", partial(_add_norm, bench, tokens))
        yield Case(f"rope_store_kv {tokens}", partial(_rope_store, bench, tokens))
        yield Case(f"silu_mul {tokens}", partial(_silu_mul, bench, tokens))


def _norm(bench: Bench, tokens: int) -> Row:
    """Bytes: ``x`` is read and the result written."""
    x = bench.randn(tokens, 96 if bench.tiny else 4096)
    weight = bench.randn(x.shape[1])
    return bench.measure(
        lambda: bench.ops.rms_norm(x, weight, EPS),
        traffic=2 * x.nbytes + weight.nbytes,
        oracle=lambda: rms_norm_torch(x, weight, EPS),
    )


def _add_norm(bench: Bench, tokens: int) -> Row:
    """Bytes: two read, two written."""
    x, residual = (bench.randn(tokens, 96 if bench.tiny else 4096) for _ in range(2))
    weight = bench.randn(x.shape[1])
    return bench.measure(
        lambda: bench.ops.add_rms_norm(x, residual, weight, EPS),
        traffic=4 * x.nbytes + weight.nbytes,
        oracle=lambda: add_rms_norm_torch(x, residual, weight, EPS),
    )


def _rope_store(bench: Bench, tokens: int) -> Row:
    """Bytes: queries, keys and values are read and written once, the angles are read."""
    heads, kv_heads, dim = (4, 2, 64) if bench.tiny else (32, 8, 128)
    block = 16
    qkv = bench.randn(tokens, heads + 2 * kv_heads, dim)
    angle = bench.randn(tokens, dim // 2, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()
    pages = KvPages.zeros(
        *(-(-tokens // block), block, kv_heads),
        k_dim=dim,
        v_dim=dim,
        dtype=bench.dtype,
        device=bench.device,
    )
    slots = torch.randperm(tokens, device=bench.device)
    norm = bench.randn(dim)
    inputs = (qkv, cos, sin, pages, slots)
    options: dict[str, Any] = {"heads": heads, "q_norm": norm, "k_norm": norm}
    return bench.measure(
        lambda: bench.ops.rope_store_kv(*inputs, **options),
        traffic=2 * qkv.nbytes + 2 * cos.nbytes + slots.nbytes,
        oracle=lambda: rope_store_kv_torch(*inputs, **options),
    )


def _silu_mul(bench: Bench, tokens: int) -> Row:
    """Bytes: two read for each one written."""
    gate_up = bench.randn(tokens, 2 * (96 if bench.tiny else 12288))
    return bench.measure(
        lambda: bench.ops.silu_mul(gate_up),
        traffic=1.5 * gate_up.nbytes,
        oracle=lambda: silu_mul_torch(gate_up),
    )


def sampling(bench: Bench) -> Iterator[Case]:
    """From logits to tokens that the device knows, the host's part included."""
    kinds = {
        "greedy": SamplingParams(temperature=0),
        "temperature": SamplingParams(temperature=0.6, seed=1),
        "top-p, top-k": SamplingParams(temperature=0.6, top_p=0.9, top_k=50, seed=1),
        "penalties": SamplingParams(temperature=0.6, frequency_penalty=0.5, seed=1),
    }
    for rows in (2,) if bench.tiny else (1, 64, 256):
        for name, params in kinds.items():
            yield Case(f"{name} {rows}", partial(_sample, bench, rows, params))


def _sample(bench: Bench, rows: int, params: SamplingParams) -> Row:
    """Bytes: the logits are read once. By the clock on the wall, until the tokens are chosen."""
    vocab = 500 if bench.tiny else 151_936
    logits = bench.randn(rows, vocab, std=4.0, dtype=torch.float32)
    states = [SamplingState(params, (1, 2, 3), banned=frozenset(), seed=i) for i in range(rows)]
    with torch.inference_mode():
        timing = bench.stopwatch.wall(
            lambda: start_sampling(logits, states), repeats=1 if bench.tiny else 20
        )
    return {
        "us": round(timing.us, 2),
        "us_p20": round(timing.us_p20, 2),
        "us_p80": round(timing.us_p80, 2),
        "bytes": logits.nbytes,
        "operations": 0,
        "note": "host included",
    }
