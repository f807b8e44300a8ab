"""How a matrix product is cut among programs, and how partial sums are added up.

A program makes one tile of the output: ``BLOCK_N`` rows of the weight times ``BLOCK_M`` tokens. The
weight is the left factor, so that a Hopper warp group (64 rows) is filled even by a single token.
Where there are fewer tiles than the GPU can hold, the inputs are split too (split-K): each program
sums up a part of them, and a second kernel adds the parts in a fixed order, so that a result does
not depend on which program was first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ._triton import CompileCase, Launch, jit, tl, triton

_PROGRAMS_PER_SM = 2
_SMS = 132  # an H200's, for the interpreter
_SUM_BLOCK = 1024
_MOST_SPLITS = 16


def tile_launch(m: int, n: int, k: int, warps: int, stages: int) -> Launch:
    """A row of a tuning table: tokens, rows and inputs of a program's step."""
    return Launch(
        blocks={"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages
    )


def launch_for(table: Mapping[int, Mapping[int, Launch]], capability: int, tokens: int) -> Launch:
    """The row of a tuning table for a number of tokens.

    :param table: capability, and the most tokens of a tile, to the launch. Its largest tile is used
        for all that is larger.
    """
    rows = table[capability]
    return rows[min((most for most in rows if most >= tokens), default=max(rows))]


def split_inputs(*, tiles: int, steps: int, device: torch.device) -> tuple[int, int]:
    """Parts that the inputs are cut into, and steps along the inputs in each.

    :param tiles: tiles of the output; :param steps: steps of the main loop for the whole of them.
    """
    sms = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else _SMS
    )
    wanted = min(steps, _MOST_SPLITS, max(1, _PROGRAMS_PER_SM * sms // tiles))
    each = -(-steps // max(1, wanted))
    return -(-steps // each) if each else 1, each


@jit
def tile_of(pid, tiles_n, tiles_m):  # type: ignore[no-untyped-def]
    """The tile of a program: eight tiles of tokens share a weight while it is in the L2 cache."""
    width = 8 * tiles_n
    first = pid // width * 8
    height = tl.minimum(tiles_m - first, 8)
    return pid % width // height, first + pid % width % height


@jit
def store_tile(  # type: ignore[no-untyped-def]
    acc, out_ptr, bias_ptr, n, m, rows, tokens, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr
):
    """Write a tile, (BLOCK_N, BLOCK_M) fp32: the result with its bias, or a part of the inputs'."""
    inside = (n[None, :] < rows) & (m[:, None] < tokens)
    at = m[:, None].to(tl.int64) * rows + n[None, :]
    if SPLITS > 1:
        at += tl.program_id(1).to(tl.int64) * tokens * rows
    elif HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + at, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _add_parts_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    rows,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A piece of one token's outputs a program."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < rows
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLITS):
        at = (part * tokens + token) * rows + n
        total += tl.load(parts_ptr + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * rows + n, total.to(out_ptr.dtype.element_ty), mask=inside)


def output_and_parts(
    x: torch.Tensor, rows: int, splits: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """For the result, (tokens, rows) like ``x``, and for its parts, (splits, ...) fp32, if any."""
    out = torch.empty(x.shape[0], rows, dtype=x.dtype, device=x.device)
    if splits == 1:
        return out, None
    return out, torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device)


def add_parts(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Add up ``parts`` (splits, tokens, rows) fp32 and a bias into ``out`` (tokens, rows)."""
    splits, tokens, rows = parts.shape
    _add_parts_kernel[(tokens, triton.cdiv(rows, _SUM_BLOCK))](
        *(parts, out if bias is None else bias, out, tokens, rows),
        HAS_BIAS=bias is not None,
        SPLITS=splits,
        BLOCK=_SUM_BLOCK,
        num_warps=4,
    )


def launch_options(launch: Launch) -> dict[str, Any]:
    """A tuning table's row as keyword arguments of a kernel."""
    return {**launch.blocks, "num_warps": launch.num_warps, "num_stages": launch.num_stages}


def compile_cases(capability: int) -> Iterator[CompileCase]:
    """Every configuration that the compile table builds for ``capability``."""
    for splits in (2, _MOST_SPLITS):
        yield CompileCase(
            name=f"add_parts/bf16/{splits}",
            kernel=_add_parts_kernel,
            arguments={
                "parts_ptr": "*fp32:16",
                "bias_ptr": "*bf16:16",
                "out_ptr": "*bf16:16",
                "tokens": "i32",
                "rows": "i32:16",
            },
            constants={"HAS_BIAS": True, "SPLITS": splits, "BLOCK": _SUM_BLOCK},
        )
