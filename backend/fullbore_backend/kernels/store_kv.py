"""Write new keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..errors import ConfigError
from ._triton import CompileCase, capability, jit, tl, triton
from .kv_pages import LARGEST, KvPages, quantize_kv


def store_kv_torch(
    key: torch.Tensor, value: torch.Tensor, pages: KvPages, slots: torch.Tensor
) -> None:
    """Store token i's key and value in slot ``slots[i]``; changes the pages in place.

    Reads and writes each new key and value once. Into fp8 or int8 pages they are rounded with a
    scale of their own for each token and head (:func:`.kv_pages.quantize_kv`).

    :param key: (tokens, kv_heads, k_dim). :param value: (tokens, kv_heads, v_dim).
    :param slots: (tokens,) int64, each ``block · block_size + offset``, all distinct; a token whose
        slot is negative is padding and is skipped.
    """
    if not slots.numel():
        return
    if int(slots.min()) < 0:
        kept = slots >= 0
        key, value, slots = key[kept], value[kept], slots[kept]
    _store(key, pages.k, pages.k_scale, slots)
    _store(value, pages.v, pages.v_scale, slots)


def _store(
    new: torch.Tensor, pages: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor
) -> None:
    if not pages.shape[3]:
        return  # latent attention keeps no values
    rows = pages.view(-1, *pages.shape[2:])
    if scales is None:
        rows.index_copy_(0, slots, new.to(pages.dtype))
        return
    assert pages.dtype in LARGEST
    values, scale = quantize_kv(new, pages.dtype)
    # Byte by byte: torch does not index fp8 on every device.
    rows.view(torch.uint8).index_copy_(0, slots, values.view(torch.uint8))
    scales.view(-1, scales.shape[2]).index_copy_(0, slots, scale)


@jit
def store_row(  # type: ignore[no-untyped-def]
    pages_ptr,
    scale_ptr,
    row,
    x,
    columns,
    inside,
    DIM: tl.constexpr,
    LARGEST_STORED: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Write one token's key or value of one head, fp32 ``x``, to row ``row`` of the pages.

    With ``LARGEST_STORED`` it is scaled to that magnitude first, and its scale is written too.
    """
    target = pages_ptr + row * DIM + columns
    if LARGEST_STORED > 0:
        scale = tl.max(tl.where(inside, tl.abs(x), 0.0), axis=0) / LARGEST_STORED
        x = x / tl.maximum(scale, 1.1754944e-38)
        if ROUND:
            x = tl.floor(x + 0.5)
        x = tl.minimum(tl.maximum(x, -LARGEST_STORED), LARGEST_STORED)
        tl.store(scale_ptr + row, scale)
    tl.store(target, x.to(pages_ptr.dtype.element_ty), mask=inside)


@jit
def _store_kernel(  # type: ignore[no-untyped-def]
    key_ptr,
    value_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LARGEST_STORED: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One head of one token a program."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        row = slot * KV_HEADS + head
        columns = tl.arange(0, BLOCK_K)
        inside = columns < K_DIM
        source = key_ptr + token * key_stride + head * key_head_stride + columns
        x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        store_row(k_ptr, k_scale_ptr, row, x, columns, inside, K_DIM, LARGEST_STORED, ROUND)
        if V_DIM > 0:
            columns = tl.arange(0, BLOCK_V)
            inside = columns < V_DIM
            source = value_ptr + token * value_stride + head * value_head_stride + columns
            x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            store_row(v_ptr, v_scale_ptr, row, x, columns, inside, V_DIM, LARGEST_STORED, ROUND)


def store_kv_triton(
    key: torch.Tensor, value: torch.Tensor, pages: KvPages, slots: torch.Tensor
) -> None:
    """:func:`store_kv_torch` on the GPU."""
    tokens, kv_heads, k_dim = key.shape
    if not tokens:
        return
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    v_dim = value.shape[2]
    _store_kernel[(tokens, kv_heads)](
        *(key, value, slots, *destinations(pages), *key.stride()[:2], *value.stride()[:2]),
        KV_HEADS=kv_heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        BLOCK_K=triton.next_power_of_2(k_dim),
        BLOCK_V=triton.next_power_of_2(max(v_dim, 1)),
        **storing(pages.k.dtype),
        num_warps=1,
    )


def destinations(pages: KvPages) -> tuple[torch.Tensor, ...]:
    """Keys, values and their scales as a kernel takes them; without scales anything stands in.

    :raises ConfigError: for fp8 on a GPU that has no such type.
    """
    if pages.k_scale is None or pages.v_scale is None:
        return pages.k, pages.v, pages.k, pages.v
    if pages.k.dtype == torch.float8_e4m3fn and capability(pages.k.device) < 89:
        raise ConfigError(
            "this GPU has no 8-bit floats, so it cannot write an fp8 KV cache: use int8."
        )
    return pages.k, pages.v, pages.k_scale, pages.v_scale


def storing(dtype: torch.dtype) -> dict[str, Any]:
    """The constants of :func:`store_row` for pages of a dtype."""
    return {"LARGEST_STORED": int(LARGEST.get(dtype, 0)), "ROUND": dtype == torch.int8}


def compile_cases(capability: int) -> Iterator[CompileCase]:
    """Every configuration that the compile table builds for ``capability``."""
    for stored, largest in (("bf16", 0), ("i8", 127), ("fp8e4nv", 448)):
        if stored == "fp8e4nv" and capability < 89:
            continue
        for k_dim, v_dim in ((128, 128), (576, 0)):
            yield CompileCase(
                name=f"store_kv/bf16/{stored}/{k_dim}+{v_dim}",
                kernel=_store_kernel,
                arguments={
                    **dict.fromkeys(("key_ptr", "value_ptr"), "*bf16:16"),
                    "slots_ptr": "*i64:16",
                    **dict.fromkeys(("k_ptr", "v_ptr"), f"*{stored}:16"),
                    **dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*fp32:16"),
                    **dict.fromkeys(("key_stride", "value_stride"), "i32:16"),
                    **dict.fromkeys(("key_head_stride", "value_head_stride"), "i32:16"),
                },
                constants={
                    "KV_HEADS": 8 if v_dim else 1,
                    "K_DIM": k_dim,
                    "V_DIM": v_dim,
                    "BLOCK_K": triton.next_power_of_2(k_dim),
                    "BLOCK_V": triton.next_power_of_2(max(v_dim, 1)),
                    "LARGEST_STORED": largest,
                    "ROUND": stored == "i8",
                },
                num_warps=1,
            )
