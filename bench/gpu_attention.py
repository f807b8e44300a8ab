"""Attention over the paged cache: decode, prefill, shared prefixes, latent attention.

Bytes are the keys and values that some query sees, once, with queries and results; operations are
two for each multiplication of a product that is not masked away. Sizes are those of Qwen3-8B (32
query and 8 KV heads of 128), and of DeepSeek-V3 (128 heads, 512 + 64 numbers a token).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_cases import Case
from gpu_timing import Bench, Row, SkippedError

from fullbore_backend.kernels import AttentionBatch, KvPages
from fullbore_backend.kernels.kv_pages import LARGEST, token_bytes
from fullbore_backend.kernels.mla_attention import mla_attention_torch
from fullbore_backend.kernels.paged_attention import paged_attention_torch

BLOCK = 16
TWIN_LIMIT = 2**31
"""Bytes of keys and values up to which a twin, which copies them, is run as the oracle."""

TWIN_SCORES = 2**30
"""Scores up to which the twin of latent attention, which keeps them all, is run."""


def attention(bench: Bench) -> Iterator[Case]:
    """Grouped-query attention: decodes at several batch sizes and contexts, then prefills."""
    batches, contexts = ((2,), (40,)) if bench.tiny else ((1, 16, 64, 256), (1024, 4096, 16384))
    for batch in batches:
        for context in contexts:
            name = f"decode {batch} x {context}"
            yield Case(name, partial(_decode, bench, batch, context, bench.dtype))
    for stored in (torch.float8_e4m3fn, torch.int8):
        batch, context = (2, 40) if bench.tiny else (64, 4096)
        name = f"decode {batch} x {context}, {str(stored).removeprefix('torch.')} pages"
        yield Case(name, partial(_decode, bench, batch, context, stored))
    for tokens in (24,) if bench.tiny else (2048, 8192):
        yield Case(f"prefill {tokens}", partial(_prefill, bench, tokens))


def shared_prefixes(bench: Bench) -> Iterator[Case]:
    """Cascade attention, against reading the prefix for each sequence."""
    for batch, shared, own in ((3, 32, 20),) if bench.tiny else ((16, 4096, 256), (64, 4096, 256)):
        yield Case(f"{batch} x ({shared} + {own})", partial(_cascade, bench, batch, shared, own))


def latent_attention(bench: Bench) -> Iterator[Case]:
    """Multi-head latent attention: decodes, then a prefill."""
    for batch, context in ((2, 40),) if bench.tiny else ((1, 4096), (16, 4096), (64, 4096)):
        yield Case(f"decode {batch} x {context}", partial(_mla, bench, [1] * batch, context))
    for tokens in (24,) if bench.tiny else (2048,):
        yield Case(f"prefill {tokens}", partial(_mla, bench, [tokens], tokens))


def _heads(bench: Bench) -> tuple[int, int, int]:
    """Query heads, KV heads, and the size of a head."""
    return (4, 2, 64) if bench.tiny else (32, 8, 128)


def _step(
    bench: Bench,
    query_lens: Sequence[int],
    context: int,
    *,
    dims: tuple[int, int, int],
    stored: torch.dtype,
    shared: int = 0,
) -> tuple[KvPages, AttentionBatch]:
    """Pages in random order, filled with normal numbers, and a step on them.

    :param dims: KV heads, and the sizes of a key and of a value.
    :param shared: tokens that all sequences share.
    """
    kv_heads, k_dim, v_dim = dims
    count, common = -(-context // BLOCK), shared // BLOCK
    total = common + len(query_lens) * (count - common)
    pages = KvPages.zeros(
        *(total, BLOCK, kv_heads), k_dim=k_dim, v_dim=v_dim, dtype=stored, device=bench.device
    )
    for tensor in (pages.k, pages.v):
        _fill(bench, tensor)
    for scales in (pages.k_scale, pages.v_scale):
        if scales is not None:
            scales.fill_(1 / 50)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).tolist()
    common_blocks, rest = order[:common], order[common:]
    own = count - common
    batch = AttentionBatch.build(
        query_lens=query_lens,
        context_lens=[context] * len(query_lens),
        block_tables=[
            common_blocks + rest[i * own : (i + 1) * own] for i in range(len(query_lens))
        ],
        block_size=BLOCK,
        device=bench.device,
    )
    return pages, batch


def _fill(bench: Bench, pages: torch.Tensor) -> None:
    if pages.dtype not in LARGEST:
        pages.normal_()
        return
    for page in pages.split(4096):  # in parts: the wide numbers are as large again, several times
        page.copy_((bench.randn(*page.shape, dtype=torch.float32) * 50).clamp(-127, 127))


def _decode(bench: Bench, batch: int, context: int, stored: torch.dtype) -> Row:
    heads, kv_heads, dim = _heads(bench)
    pages, step = _step(bench, [1] * batch, context, dims=(kv_heads, dim, dim), stored=stored)
    query = bench.randn(batch, heads, dim)
    cached = batch * context * token_bytes(kv_heads, k_dim=dim, v_dim=dim, dtype=stored)
    call: dict[str, Any] = {"scale": dim**-0.5}
    return bench.measure(
        lambda: bench.ops.paged_attention(query, pages, step, **call),
        traffic=cached + 2 * query.nbytes,
        operations=4 * heads * dim * batch * context,
        oracle=None
        if cached > TWIN_LIMIT
        else lambda: paged_attention_torch(query, pages, step, **call),
        tolerance=0.03,
    )


def _prefill(bench: Bench, tokens: int) -> Row:
    """The baseline is torch's fused attention on contiguous keys and values."""
    heads, kv_heads, dim = _heads(bench)
    pages, step = _step(bench, [tokens], tokens, dims=(kv_heads, dim, dim), stored=bench.dtype)
    query = bench.randn(tokens, heads, dim)
    q = bench.randn(1, heads, tokens, dim)
    k, v = (bench.randn(1, kv_heads, tokens, dim) for _ in range(2))
    scale = dim**-0.5
    return bench.measure(
        lambda: bench.ops.paged_attention(query, pages, step, scale=scale),
        traffic=2 * query.nbytes + 2 * tokens * kv_heads * dim * query.itemsize,
        operations=4 * heads * dim * tokens * (tokens + 1) / 2,
        oracle=lambda: paged_attention_torch(query, pages, step, scale=scale),
        baseline=(
            "torch attention",
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        ),
    )


def _cascade(bench: Bench, batch: int, shared: int, own: int) -> Row:
    """Bytes: the shared keys and values once. The baseline reads them for each sequence."""
    heads, kv_heads, dim = _heads(bench)
    context = shared + own
    dims = (kv_heads, dim, dim)
    pages, step = _step(bench, [1] * batch, context, dims=dims, stored=bench.dtype, shared=shared)
    query = bench.randn(batch, heads, dim)
    per_token = token_bytes(kv_heads, k_dim=dim, v_dim=dim, dtype=bench.dtype)
    scale, count = dim**-0.5, shared // BLOCK
    return bench.measure(
        lambda: bench.ops.cascade_attention(query, pages, step, count, scale=scale),
        traffic=(shared + batch * own) * per_token + 2 * query.nbytes,
        operations=4 * heads * dim * batch * context,
        oracle=lambda: paged_attention_torch(query, pages, step, scale=scale),
        tolerance=0.03,
        baseline=(
            "without cascade",
            lambda: bench.ops.paged_attention(query, pages, step, scale=scale),
        ),
    )


def _mla(bench: Bench, query_lens: Sequence[int], context: int) -> Row:
    """Bytes: each latent and rotated key once, for all heads."""
    if bench.ops.mla_attention is mla_attention_torch:
        raise SkippedError("there is no Triton kernel for it")
    heads, latent, rope = (4, 32, 16) if bench.tiny else (128, 512, 64)
    pages, step = _step(bench, query_lens, context, dims=(1, latent + rope, 0), stored=bench.dtype)
    tokens = sum(query_lens)
    q_latent, q_rope = bench.randn(tokens, heads, latent), bench.randn(tokens, heads, rope)
    pairs = sum(n * (context - n) + n * (n + 1) / 2 for n in query_lens)
    cached = len(query_lens) * context * (latent + rope) * bench.dtype.itemsize
    call: dict[str, Any] = {"scale": (latent + rope) ** -0.5}
    return bench.measure(
        lambda: bench.ops.mla_attention(q_latent, q_rope, pages, step, **call),
        traffic=cached + 2 * q_latent.nbytes + q_rope.nbytes,
        operations=2 * heads * (2 * latent + rope) * pairs,
        oracle=None
        if heads * pairs > TWIN_SCORES
        else lambda: mla_attention_torch(q_latent, q_rope, pages, step, **call),
        tolerance=0.03,
    )
