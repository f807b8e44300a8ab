"""Between the projections of attention and attention itself, in one pass: norm, rotate, store.

One launch takes a step's projected queries, keys and values, norms queries and keys head by head
where the model does (Dehghani et al., 2023), rotates them (Su et al., RoFormer, 2021), rounds keys
and values to the cache's dtype, and writes them to their pages. Bound by memory: each number is
read and written once; apart, the same takes three passes over queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ._triton import CompileCase, jit, tl, triton
from .kv_pages import KvPages
from .rms_norm import rms_norm_torch
from .rope import rope_torch
from .store_kv import destinations, store_kv_torch, store_row, storing


def rope_store_kv_torch(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pages: KvPages,
    slots: torch.Tensor,
    *,
    heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Store keys and values, and return the queries, rotated.

    :param qkv: (tokens, heads + 2 · kv_heads, head_dim): queries, then keys, then values.
    :param cos: and :param sin: (tokens, pairs) fp32; see :func:`.rope.rope_torch`.
    :param slots: (tokens,) int64; see :func:`.store_kv.store_kv_torch`.
    :param q_norm: and :param k_norm: (head_dim,) weights of RMS norms, both or neither; see
        :func:`.rms_norm.rms_norm_torch` for their dtype.
    :returns: (tokens, heads, head_dim), same dtype as ``qkv``.
    """
    kv_heads = pages.k.shape[2]
    rotated, value = qkv.tensor_split([heads + kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = rotated.tensor_split([heads], dim=1)
        query, key = rms_norm_torch(query, q_norm, eps), rms_norm_torch(key, k_norm, eps)
        rotated = torch.cat((query, key), dim=1)
    # Queries and keys lie side by side, so that one call rotates both.
    query, key = rope_torch(rotated, cos, sin).tensor_split([heads], dim=1)
    store_kv_torch(key, value, pages, slots)
    return query


@jit
def _rope_store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    slots_ptr,
    query_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    token_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    LARGEST_STORED: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One head of one token a program. ``qkv`` is contiguous within a token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    row_ptr = qkv_ptr + token * token_stride + head * DIM
    x = tl.load(row_ptr + columns, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    slot = tl.load(slots_ptr + token)
    if head >= HEADS + KV_HEADS:
        if slot >= 0:
            row = slot * KV_HEADS + (head - HEADS - KV_HEADS)
            store_row(v_ptr, v_scale_ptr, row, x, columns, inside, DIM, LARGEST_STORED, ROUND)
    else:
        is_query = head < HEADS
        # The partner of each dimension in its pair, and the sign with which it enters.
        turns = columns < 2 * PAIRS
        low = columns < PAIRS
        partner = tl.where(low, columns + PAIRS, columns - PAIRS)
        partner = tl.where(turns, partner, columns)
        other = tl.load(row_ptr + partner, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            norm_ptr = k_norm_ptr
            if is_query:
                norm_ptr = q_norm_ptr
            weight = tl.load(norm_ptr + columns, mask=inside, other=0.0)
            other_weight = tl.load(norm_ptr + partner, mask=inside, other=0.0)
            scale = tl.rsqrt(tl.sum(x * x, axis=0) / DIM + eps)
            x, other = x * scale, other * scale
            if weight.dtype != tl.float32:
                x, other = x.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
            x, other = x * weight.to(tl.float32), other * other_weight.to(tl.float32)
            x, other = x.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
        angle = token * PAIRS + tl.where(low, columns, columns - PAIRS)
        cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
        turned = x * cos + tl.where(low, -other, other) * sin
        if is_query:
            out = query_ptr + (token * HEADS + head) * DIM + columns
            tl.store(out, turned.to(dtype), mask=inside)
        elif slot >= 0:
            turned = turned.to(dtype).to(tl.float32)
            row = slot * KV_HEADS + (head - HEADS)
            store_row(k_ptr, k_scale_ptr, row, turned, columns, inside, DIM, LARGEST_STORED, ROUND)


def rope_store_kv_triton(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pages: KvPages,
    slots: torch.Tensor,
    *,
    heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """:func:`rope_store_kv_torch` on the GPU."""
    tokens, _, dim = qkv.shape
    kv_heads = pages.k.shape[2]
    query = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return query
    if qkv.stride(2) != 1 or qkv.stride(1) != dim:
        qkv = qkv.contiguous()
    has_norm = q_norm is not None and k_norm is not None
    _rope_store_kernel[(tokens, heads + 2 * kv_heads)](
        *(qkv, cos, sin, q_norm if has_norm else cos, k_norm if has_norm else cos, slots, query),
        *destinations(pages),
        *(qkv.stride(0), eps),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAIRS=cos.shape[1],
        BLOCK=triton.next_power_of_2(dim),
        HAS_NORM=has_norm,
        **storing(pages.k.dtype),
        num_warps=1,
    )
    return query


def compile_cases(capability: int) -> Iterator[CompileCase]:
    """Every configuration that the compile table builds for ``capability``."""
    for stored, largest in (("bf16", 0), ("i8", 127), ("fp8e4nv", 448)):
        if stored == "fp8e4nv" and capability < 89:
            continue
        for dim, pairs in ((64, 32), (128, 64), (128, 32), (256, 128)):
            for norm in (None, "bf16", "fp32"):
                kind = "" if norm is None else f"norm_{norm}_"
                yield CompileCase(
                    name=f"{kind}rope_store_kv/bf16/{stored}/{dim}/{pairs}",
                    kernel=_rope_store_kernel,
                    arguments={
                        "qkv_ptr": "*bf16:16",
                        **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32:16"),
                        **dict.fromkeys(("q_norm_ptr", "k_norm_ptr"), f"*{norm or 'fp32'}:16"),
                        "slots_ptr": "*i64:16",
                        "query_ptr": "*bf16:16",
                        **dict.fromkeys(("k_ptr", "v_ptr"), f"*{stored}:16"),
                        **dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*fp32:16"),
                        "token_stride": "i32:16",
                        "eps": "fp32",
                    },
                    constants={
                        "HEADS": 32,
                        "KV_HEADS": 8,
                        "DIM": dim,
                        "PAIRS": pairs,
                        "BLOCK": dim,
                        "HAS_NORM": norm is not None,
                        "LARGEST_STORED": largest,
                        "ROUND": stored == "i8",
                    },
                    num_warps=1,
                )
