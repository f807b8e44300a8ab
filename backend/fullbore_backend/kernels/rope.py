"""Rotary position embedding (Su et al., RoFormer, 2021)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ._triton import CompileCase, jit, tl, triton


def rope_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Rotate pairs of every head by their token's angles.

    A pair is (i, i + pairs), as in GPT-NeoX and Llama, or, interleaved, (2i, 2i + 1), as in GPT-J
    and DeepSeek. Dimensions beyond the last pair stay as they are (partial rotary).

    :param x: (tokens, heads, head_dim). :param cos: and :param sin: (tokens, pairs) in fp32, with
        ``2 · pairs <= head_dim``. Returns a tensor like ``x``.
    """
    pairs = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleaved:
        low, high = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    else:
        low, high = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = (low * cos - high * sin, high * cos + low * sin)
    rotated = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    if 2 * pairs == x.shape[-1]:
        return rotated.to(x.dtype)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * pairs :]), dim=-1)


@jit
def _rope_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one token a program; ``out`` is contiguous."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    turns = columns < 2 * PAIRS
    if INTERLEAVED:
        low = columns % 2 == 0
        partner = tl.where(low, columns + 1, columns - 1)
        pair = columns // 2
    else:
        low = columns < PAIRS
        partner = tl.where(low, columns + PAIRS, columns - PAIRS)
        pair = tl.where(low, columns, columns - PAIRS)
    row_ptr = x_ptr + token * token_stride + head * head_stride
    x = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(row_ptr + partner, mask=turns, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * PAIRS + pair, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + token * PAIRS + pair, mask=turns, other=0.0)
    turned = x * cos + tl.where(low, -other, other) * sin
    out = out_ptr + (token * HEADS + head) * DIM + columns
    tl.store(out, turned.to(out_ptr.dtype.element_ty), mask=inside)


def rope_triton(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """:func:`rope_torch` on the GPU. Heads may lie apart; elements of one may not."""
    tokens, heads, dim = x.shape
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if tokens:
        x = x if x.stride(2) == 1 else x.contiguous()
        _rope_kernel[(tokens, heads)](
            *(x, cos, sin, out, x.stride(0), x.stride(1)),
            HEADS=heads,
            DIM=dim,
            PAIRS=cos.shape[1],
            INTERLEAVED=interleaved,
            BLOCK=triton.next_power_of_2(dim),
            num_warps=1,
        )
    return out


def compile_cases(capability: int) -> Iterator[CompileCase]:
    """Every configuration that the compile table builds for ``capability``."""
    for dim, pairs, interleaved in ((64, 32, True), (128, 64, False), (128, 32, False)):
        yield CompileCase(
            name=f"rope/bf16/{dim}/{pairs}{'/interleaved' * interleaved}",
            kernel=_rope_kernel,
            arguments={
                "x_ptr": "*bf16:16",
                "cos_ptr": "*fp32:16",
                "sin_ptr": "*fp32:16",
                "out_ptr": "*bf16:16",
                "token_stride": "i32:16",
                "head_stride": "i32:16",
            },
            constants={
                "HEADS": 32,
                "DIM": dim,
                "PAIRS": pairs,
                "INTERLEAVED": interleaved,
                "BLOCK": dim,
            },
            num_warps=1,
        )
