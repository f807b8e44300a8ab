"""The Triton kernel of products with 4-bit weights.

A program reads words of eight codes and makes them numbers in registers, two at a time: the bits of
two codes, set into those of 128 (1024 in fp16), are 128 + code, from which the zeros are taken. So
a code costs an instruction and a half, and the loop keeps up with memory. What is left are small
whole numbers; the sum over a group is scaled when it is complete, in fp32.

A call reads ``rows · inputs / 2`` bytes of weight and does ``2 · tokens · rows · inputs``
operations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import torch

from ._triton import CompileCase, Launch, capability, constant, jit, tl, triton
from .linear_int4 import CHUNK, Int4Weight
from .linear_tiles import (
    add_parts,
    launch_for,
    launch_options,
    output_and_parts,
    split_inputs,
    store_tile,
    tile_launch,
    tile_of,
)

_CHUNK = constant(CHUNK)
_INTERPRETED = constant(os.environ.get("TRITON_INTERPRET") == "1")  # it knows no PTX


# Not yet measured. Few tokens: a step reads 4 or 8 KiB of weight, and three or four of them are in
# flight in each of two or three programs an SM. 128 rows make more of the loop's own instructions
# than 64. Many: tiles as large as the sums and a group's part of them fit the registers. What is
# multiplied at once is wide, but on Ampere, where that costs registers and saves nothing.
_TUNED = {
    80: {
        16: tile_launch(16, 64, 32, 4, 5),
        32: tile_launch(32, 64, 32, 4, 4),
        64: tile_launch(64, 64, 32, 4, 4),
        128: tile_launch(128, 128, 32, 8, 4),
    },
    90: {
        16: tile_launch(16, 128, 128, 4, 5),
        32: tile_launch(32, 128, 128, 4, 4),
        64: tile_launch(64, 128, 64, 8, 4),
        128: tile_launch(128, 128, 64, 8, 4),
    },
    100: {
        16: tile_launch(16, 128, 128, 4, 5),
        32: tile_launch(32, 128, 128, 4, 5),
        64: tile_launch(64, 128, 64, 4, 4),
        128: tile_launch(128, 128, 128, 8, 4),
    },
}
_EXACT = tile_launch(16, 32, 32, 8, 2)
"""For fp32, whose exact products no tensor core does: small tiles, that they fit."""


def _choose(capability: int, tokens: int, group: int, dtype: torch.dtype) -> Launch:
    """The launch for so many tokens, and groups of that size."""
    if dtype == torch.float32:
        return _EXACT
    # Several groups a step leave no room for the sums of 128 tokens.
    most = 128 if group == CHUNK else 64
    launch = launch_for(_TUNED, capability, min(tokens, most))
    width = min(group, launch.blocks["BLOCK_K"])
    return replace(launch, blocks={**launch.blocks, "BLOCK_K": width})


@jit(do_not_specialize=("tokens", "steps_each"))  # type: ignore[untyped-decorator]
def _w4_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    row_stride,
    group_stride,
    tokens,
    rows,
    inputs,
    steps_each,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile, for one part of the inputs, a program; a step of the loop is a chunk.

    ``w`` is read in words of eight codes, (rows, chunks · 16). Strides of scales and zeros are
    alike. ``WHOLE``: the inputs are a multiple of a chunk. ``BLOCK_K``: inputs multiplied at once,
    of one group.
    """
    tile_n, tile_m = tile_of(tl.program_id(0), tl.cdiv(rows, BLOCK_N), tl.cdiv(tokens, BLOCK_M))
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    words: tl.constexpr = _CHUNK // 8
    groups: tl.constexpr = _CHUNK // GROUP
    steps = tl.cdiv(inputs, _CHUNK)
    first = tl.program_id(1) * steps_each
    last = tl.minimum(first + steps_each, steps)
    # Rows beyond the last are read as the last, and not written.
    n_safe = tl.minimum(n, rows - 1).to(tl.int64)
    word = first * words + tl.arange(0, words)
    w_ptrs = w_ptr + n_safe[:, None] * (steps * words) + word[None, :]
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * x_stride + (first * _CHUNK + k)[:, None]
    scale_ptrs = scale_ptr + n_safe * row_stride
    zero_ptrs = zero_ptr + n_safe * row_stride
    # Scales are too small to be copied ahead as the rest is: a group's are loaded while the one
    # before is multiplied. Behind the last, and in the padding, they are the last one's. Zeros are
    # loaded when they are needed: kept for a step, they would send the codes through shared memory.
    last_group = inputs // GROUP - 1
    group = tl.minimum(first * groups, last_group).to(tl.int64) * group_stride
    scale = tl.load(scale_ptrs + group)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, last):
        w = tl.load(w_ptrs).to(tl.uint32, bitcast=True)
        for part in tl.static_range(groups):
            zero = tl.full((BLOCK_N,), 8, tl.uint8)
            if HAS_ZEROS:
                zero = tl.load(zero_ptrs + group)
            group = tl.minimum(step * groups + part + 1, last_group).to(tl.int64) * group_stride
            next_scale = tl.load(scale_ptrs + group)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for at in tl.static_range(part * GROUP, (part + 1) * GROUP, BLOCK_K):
                inside = m[None, :] < tokens
                if not WHOLE:
                    inside = inside & (k[:, None] < inputs - step * _CHUNK - at)
                x = tl.load(x_ptrs + at, mask=inside, other=0.0)
                codes = _codes(w, zero, at // 32, BLOCK_K, x.dtype)
                total = tl.dot(codes, x, total, input_precision="ieee")
            acc += total * scale.to(tl.float32)[:, None]
            scale = next_scale
        w_ptrs += words
        x_ptrs += _CHUNK
    store_tile(acc, out_ptr, bias_ptr, n, m, rows, tokens, HAS_BIAS, SPLITS)


@jit
def _codes(w, zero, first: tl.constexpr, COUNT: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """``code - zero`` of ``COUNT`` inputs of a chunk, (BLOCK_N, COUNT) of ``dtype``.

    :param w: (BLOCK_N, 16) words of eight codes; :param zero: (BLOCK_N,), uint8 if whole.
    :param first: the first input, in 32s.
    """
    half: tl.constexpr = tl.float16 if dtype == tl.float16 else tl.bfloat16
    unit: tl.constexpr = 1024.0 if half == tl.float16 else 128.0
    unit_bits: tl.constexpr = 0x64006400 if half == tl.float16 else 0x43004300
    if COUNT == 128:
        pairs = _beside(_beside(_bits(w, 0), _bits(w, 1)), _beside(_bits(w, 2), _bits(w, 3)))
    elif COUNT == 64:
        pairs = _beside(_bits(w, first), _bits(w, first + 1))
    else:
        pairs = _bits(w, first)
    pairs |= unit_bits
    if _INTERPRETED or dtype == tl.float32:
        codes = _halves(pairs, half).to(tl.float32) - unit - zero.to(tl.float32)[:, None]
    elif zero.dtype == tl.uint8:
        minus = zero.to(tl.uint32) * 0x10001 | (unit_bits | 0x80008000)
        codes = _halves(_add_halves(pairs, minus, half), half)
    else:
        # Added in two parts, as the half that is nearest to 128 + zero is not near enough.
        offset = -unit - zero.to(tl.float32)
        near = offset.to(half)
        rest = (offset - near.to(tl.float32)).to(half)
        pairs = _add_halves(_add_halves(pairs, _twice(near), half), _twice(rest), half)
        codes = _halves(pairs, half)
    return codes.to(dtype)


@jit
def _bits(w, quarter: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two codes of each word, in the low bits of its halves: 32 inputs of a chunk."""
    return (w >> 4 * quarter) & 0x000F000F


@jit
def _beside(a, b):  # type: ignore[no-untyped-def]
    """(rows, columns) twice to (rows, 2 · columns)."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@jit
def _twice(x):  # type: ignore[no-untyped-def]
    """The bits of a 16-bit number in both halves of 32 bits."""
    return x.to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001


@jit
def _halves(pairs, half: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rows, columns) of 32 bits to (rows, 2 · columns), the low half first."""
    low = pairs.to(tl.uint16).to(half, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(half, bitcast=True)
    return tl.join(low, high).reshape(pairs.shape[0], 2 * pairs.shape[1])


@jit
def _add_halves(pairs, x, half: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the halves of ``x``, (rows,), to those of ``pairs``, (rows, columns), all of 32 bits.

    In one instruction; Triton itself would take two, and two to move each half about.
    """
    pairs, x = tl.broadcast(pairs, x[:, None])
    # sm_80 does not add bf16: 1 · a + b.
    wide: tl.constexpr = "{ .reg .b32 i; mov.b32 i, 0x3f803f80; fma.rn.bf16x2 $0, $1, i, $2; }"
    code: tl.constexpr = "add.f16x2 $0, $1, $2;" if half == tl.float16 else wide
    return tl.inline_asm_elementwise(code, "=r,r,r", [pairs, x], tl.uint32, is_pure=True, pack=1)


def linear_int4_triton(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`.linear_int4.linear_int4_torch` on the GPU, with the weight not rounded.

    Rows of ``x`` may lie apart.
    """
    tokens = x.shape[0]
    if tokens == 0:
        return x.new_empty(0, weight.rows)
    if x.dtype == torch.bfloat16 and x.device.type == "cpu":
        # Triton's interpreter keeps bf16 as the integers of its bits, and would multiply those.
        return linear_int4_triton(x.float(), weight, bias).to(x.dtype)
    launch = _choose(capability(x.device), tokens, weight.group, x.dtype)
    block = launch.blocks
    tiles = triton.cdiv(weight.rows, block["BLOCK_N"]) * triton.cdiv(tokens, block["BLOCK_M"])
    steps = triton.cdiv(weight.inputs, CHUNK)
    splits, each = split_inputs(tiles=tiles, steps=steps, device=x.device)
    out, parts = output_and_parts(x, weight.rows, splits)
    scales, zeros = weight.scales, weight.zeros
    _w4_kernel[(tiles, splits)](
        *(x, weight.values.view(torch.int32), scales, scales if zeros is None else zeros),
        *(out if bias is None else bias, out if parts is None else parts),
        *(x.stride(0), *scales.stride(), tokens, weight.rows, weight.inputs, each),
        GROUP=weight.group,
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None,
        SPLITS=splits,
        WHOLE=weight.inputs % CHUNK == 0,
        **launch_options(launch),
    )
    if parts is not None:
        add_parts(parts, bias, out)
    return out


def compile_cases(capability: int) -> Iterator[CompileCase]:
    """Every configuration that the compile table builds for ``capability``."""
    for tokens in _TUNED[capability]:
        for group, zeros in ((128, "u8"), (128, None), (64, "u8"), (32, "u8"), (32, "fp16")):
            if tokens <= 64 or group == CHUNK:
                yield _case(capability, "bf16", tokens, group, zeros)
        yield _case(capability, "fp16", tokens, 128, "u8")
    yield _case(capability, "fp32", 16, 32, "u8")


def _case(capability: int, dtype: str, tokens: int, group: int, zeros: str | None) -> CompileCase:
    exact = dtype == "fp32"
    launch = _choose(capability, tokens, group, torch.float32 if exact else torch.bfloat16)
    splits = 4 if tokens == 16 else 1
    return CompileCase(
        name=f"linear_int4/{dtype}/{tokens}/{group}/{zeros or 'symmetric'}",
        kernel=_w4_kernel,
        arguments={
            "x_ptr": f"*{dtype}:16",
            "w_ptr": "*i32:16",
            "scale_ptr": "*fp16:16",
            "zero_ptr": f"*{zeros or 'fp16'}:16",
            "bias_ptr": f"*{dtype}:16",
            "out_ptr": "*fp32:16" if splits > 1 else f"*{dtype}:16",
            "x_stride": "i32:16",
            "group_stride": "i32:16",
            "tokens": "i32",
            "rows": "i32:16",
            "inputs": "i32:16",
            "steps_each": "i32",
        },
        constants={
            "row_stride": 1,
            "GROUP": group,
            "HAS_ZEROS": zeros is not None,
            "HAS_BIAS": True,
            "SPLITS": splits,
            "WHOLE": True,
            **launch.blocks,
        },
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        tensor_cores=not exact,
        warp_group=tokens >= 64,
    )
