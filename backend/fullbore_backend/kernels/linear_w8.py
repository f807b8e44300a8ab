"""The Triton kernels of products with 8-bit weights.

Where the tensor cores know the format (int8 everywhere, e4m3 from Hopper on), activations are
quantised by a kernel of their own and both factors stay 8 bits wide. Below, e4m3 is widened to the
activations' dtype in the loop, and activations are left as they are.

A call reads ``rows · inputs`` bytes of weight and does ``2 · tokens · rows · inputs`` operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ._triton import CompileCase, Launch, capability, jit, tl, triton
from .linear_fp8 import BLOCK, Fp8Weight
from .linear_int8 import Int8Weight
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
from .quantize_rows import LARGEST, quantize_rows_triton

# Not yet measured. Few tokens: small tiles, so that two programs fit an SM with some 50 KiB of
# loads in flight. Many: tiles of 128 × 128, as large as sums and a block's part of them fit the
# registers. Steps are 128 inputs throughout, a block of the scales.
_NATIVE = {
    80: {
        16: tile_launch(16, 64, 128, 4, 4),
        64: tile_launch(64, 64, 128, 4, 4),
        128: tile_launch(128, 128, 128, 8, 3),
    },
    90: {
        16: tile_launch(16, 64, 128, 4, 5),
        64: tile_launch(64, 64, 128, 4, 4),
        128: tile_launch(128, 128, 128, 8, 4),
    },
    100: {
        16: tile_launch(16, 128, 128, 4, 4),
        64: tile_launch(64, 128, 128, 4, 4),
        128: tile_launch(128, 128, 128, 8, 4),
    },
}
_WIDENED = {
    80: {
        16: tile_launch(16, 64, 128, 4, 4),
        64: tile_launch(64, 64, 128, 4, 3),
        128: tile_launch(128, 128, 64, 8, 3),
    }
}

_EXACT = tile_launch(16, 32, 64, 8, 2)
"""For fp32 that is not quantised, whose exact products no tensor core does."""


def _choose(dtype: torch.dtype, capability: int, tokens: int) -> Launch:
    """The launch for activations of ``dtype`` as they are multiplied."""
    if dtype == torch.float32:
        return _EXACT
    if dtype in LARGEST:
        return launch_for(_NATIVE, capability, tokens)
    return launch_for(_WIDENED, 80, tokens)


@jit(do_not_specialize=("tokens", "steps_each"))  # type: ignore[untyped-decorator]
def _w8_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    tokens,
    rows,
    inputs,
    steps_each,
    NATIVE: tl.constexpr,
    BLOCKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile, for one part of the inputs, a program.

    ``WHOLE``: the inputs are a multiple of ``BLOCK_K``. Scales of ``x`` are (groups, tokens), those
    of the weight (rows) or (rows / 128, inputs / 128). Not ``NATIVE``: the weight is e4m3 as bytes,
    and ``x`` has no scales.
    """
    tile_n, tile_m = tile_of(tl.program_id(0), tl.cdiv(rows, BLOCK_N), tl.cdiv(tokens, BLOCK_M))
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(inputs, BLOCK_K)
    first = tl.program_id(1) * steps_each
    last = tl.minimum(first + steps_each, steps)
    # Rows beyond the last are read as the last, and not written.
    n_safe = tl.minimum(n, rows - 1)
    w_ptrs = w_ptr + n_safe[:, None].to(tl.int64) * inputs + (first * BLOCK_K + k)[None, :]
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * x_stride + (first * BLOCK_K + k)[:, None]
    integer: tl.constexpr = w_ptr.dtype.element_ty == tl.int8
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if integer else tl.float32)
    block_row = w_scale_ptr + tile_n * BLOCK_N // 128 * tl.cdiv(inputs, 128)
    for step in range(first, last):
        if WHOLE:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=m[None, :] < tokens, other=0.0)
        else:
            left = inputs - step * BLOCK_K
            w = tl.load(w_ptrs, mask=k[None, :] < left, other=0.0)
            x = tl.load(x_ptrs, mask=(m[None, :] < tokens) & (k[:, None] < left), other=0.0)
        if not NATIVE:
            w = _widen(w, x.dtype)
        if BLOCKED:
            at = step * BLOCK_K // 128  # loaded before the product, to arrive while it is computed
            scale = tl.load(block_row + at)
            if NATIVE:
                scale_m = tl.load(x_scale_ptr + at * tokens + m, mask=m < tokens, other=0.0)
                scale *= scale_m[None, :]
            acc += tl.dot(w, x, input_precision="ieee") * scale
        elif integer:
            acc = tl.dot(w, x, acc, out_dtype=tl.int32)
        elif NATIVE:
            # Hopper sums e4m3 in fewer bits than fp32 has: a step's sum is added in full.
            acc = tl.dot(w, x, acc, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(w, x, acc, input_precision="ieee")
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    total = acc.to(tl.float32)
    if not BLOCKED:
        total *= tl.load(w_scale_ptr + n_safe)[:, None]
        if NATIVE:
            total *= tl.load(x_scale_ptr + m, mask=m < tokens, other=0.0)[None, :]
    store_tile(total, out_ptr, bias_ptr, n, m, rows, tokens, HAS_BIAS, SPLITS)


@jit
def _widen(w, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes of e4m3 to ``dtype``, subnormals too; the bytes of NaN, which weights have not, to 480.

    Exponent and mantissa are put where fp32 has them; what remains is the distance of the biases.
    """
    bits = w.to(tl.int32)
    wide = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return (wide.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120


def linear_int8_triton(
    x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`.linear_int8.linear_int8_torch` on the GPU."""
    values, scales = quantize_rows_triton(x, torch.int8)
    return _multiply(x, values, scales, weight.values, weight.scales, bias, native=True)


def linear_fp8_triton(
    x: torch.Tensor,
    weight: Fp8Weight,
    bias: torch.Tensor | None = None,
    *,
    native: bool | None = None,
) -> torch.Tensor:
    """:func:`.linear_fp8.linear_fp8_torch` on the GPU.

    :param native: multiply in e4m3, or widen the weight and leave ``x`` as it is; by default what
        the GPU can do. Not native, blocks of scales begin at a multiple of 128 rows all the same.
    """
    if native is None:
        native = capability(x.device) >= 90
    if not native:
        if x.dtype == torch.bfloat16 and x.device.type == "cpu":
            # Triton's interpreter keeps bf16 as the integers of its bits, and would multiply those.
            return linear_fp8_triton(x.float(), weight, bias, native=False).to(x.dtype)
        return _multiply(
            *(x, x, weight.scales, weight.values.view(torch.uint8), weight.scales, bias),
            native=False,
        )
    group = BLOCK if weight.blocked else None
    values, scales = quantize_rows_triton(x, torch.float8_e4m3fn, group)
    return _multiply(x, values, scales, weight.values, weight.scales, bias, native=True)


def _multiply(
    x: torch.Tensor,
    values: torch.Tensor,
    x_scales: torch.Tensor,
    w_values: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    native: bool,
) -> torch.Tensor:
    """:param x: gives shape and dtype of the result; :param values: what is multiplied."""
    tokens, inputs = values.shape
    rows = w_values.shape[0]
    if tokens == 0:
        return x.new_empty(0, rows)
    launch = _choose(values.dtype, capability(x.device), tokens)
    block = launch.blocks
    tiles = triton.cdiv(rows, block["BLOCK_N"]) * triton.cdiv(tokens, block["BLOCK_M"])
    steps = triton.cdiv(inputs, block["BLOCK_K"])
    splits, each = split_inputs(tiles=tiles, steps=steps, device=x.device)
    out, parts = output_and_parts(x, rows, splits)
    _w8_kernel[(tiles, splits)](
        *(values, x_scales, w_values, w_scales, out if bias is None else bias),
        *(out if parts is None else parts, values.stride(0), tokens, rows, inputs, each),
        NATIVE=native,
        BLOCKED=w_scales.dim() == 2,
        HAS_BIAS=bias is not None,
        SPLITS=splits,
        WHOLE=inputs % block["BLOCK_K"] == 0,
        **launch_options(launch),
    )
    if parts is not None:
        add_parts(parts, bias, out)
    return out


def compile_cases(capability: int) -> Iterator[CompileCase]:
    """Every configuration that the compile table builds for ``capability``."""
    for tokens, launch in _NATIVE[capability].items():
        yield _case("int8", "i8", tokens, launch, blocked=False)
        if capability >= 90:
            yield _case("fp8", "fp8e4nv", tokens, launch, blocked=False)
            yield _case("fp8_blocks", "fp8e4nv", tokens, launch, blocked=True)
    if capability < 90:
        for tokens, launch in _WIDENED[capability].items():
            yield _case("fp8_widened", "u8", tokens, launch, blocked=False)
            yield _case("fp8_blocks_widened", "u8", tokens, launch, blocked=True)
        yield _case("fp8_blocks_widened", "u8", 16, _EXACT, blocked=True, dtype="fp32")


def _case(
    name: str, kind: str, tokens: int, launch: Launch, *, blocked: bool, dtype: str = "bf16"
) -> CompileCase:
    native = kind != "u8"
    splits = 4 if tokens == 16 else 1
    return CompileCase(
        name=f"linear_{name}/{dtype}/{tokens}",
        kernel=_w8_kernel,
        arguments={
            "x_ptr": f"*{kind}:16" if native else f"*{dtype}:16",
            "x_scale_ptr": "*fp32:16",
            "w_ptr": f"*{kind}:16",
            "w_scale_ptr": "*fp32:16",
            "bias_ptr": f"*{dtype}:16",
            "out_ptr": "*fp32:16" if splits > 1 else f"*{dtype}:16",
            "x_stride": "i32:16",
            "tokens": "i32",
            "rows": "i32:16",
            "inputs": "i32:16",
            "steps_each": "i32",
        },
        constants={
            "NATIVE": native,
            "BLOCKED": blocked,
            "HAS_BIAS": True,
            "SPLITS": splits,
            "WHOLE": True,
            **launch.blocks,
        },
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        tensor_cores=dtype != "fp32",
        warp_group=tokens >= 64,
    )
