"""Root-mean-square layer norm (Zhang and Sennrich, 2019), alone and fused with a residual add.

Bound by memory: reads and writes each element once (twice with the residual), 4 operations each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ._triton import CompileCase, jit, tl, triton


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension.

    The mean is taken in fp32 when ``x`` is narrower. What a weight in fp32 multiplies is not
    rounded before (Gemma's norms), what a narrower one multiplies is (Llama's).

    :param x: (..., size); :param weight: (size,), like ``x`` or fp32. Returns a tensor like ``x``.
    """
    if x.dtype.itemsize >= 4:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    if weight.dtype == torch.float32:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
    normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps)
    return normed.to(x.dtype) * weight


def add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``x`` to ``residual``, and norm the sum. Returns (normed, sum), each like ``x``."""
    total = residual + x
    return rms_norm_torch(total, weight, eps), total


@jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program. ``residual`` and ``total`` are contiguous, and unused without one."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * size + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * size + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    normed = wide * scale
    if weight.dtype != tl.float32:
        normed = normed.to(x.dtype).to(tl.float32)
    normed = normed * weight.to(tl.float32)
    tl.store(out_ptr + row * size + columns, normed.to(x.dtype), mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """:func:`rms_norm_torch` on the GPU. Rows of ``x`` may lie apart; elements of one may not."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, rows, weight, out, out, eps, has_residual=False)
    return out


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`add_rms_norm_torch` on the GPU, in one pass over memory."""
    rows = x.reshape(-1, x.shape[-1])
    out, total = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(residual)
    _launch(rows, residual.contiguous(), weight, out, total, eps, has_residual=True)
    return out, total


def _launch(
    rows: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    *,
    has_residual: bool,
) -> None:
    count, size = rows.shape
    if count == 0:
        return
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(count,)](
        *(rows, residual, weight, out, total, rows.stride(0), size, eps),
        HAS_RESIDUAL=has_residual,
        BLOCK=block,
        num_warps=_num_warps(block),
    )


def _num_warps(block: int) -> int:
    """Eight elements a thread and load, within what a program may have."""
    return max(1, min(16, block // 256))


def compile_cases(capability: int) -> Iterator[CompileCase]:
    """Every configuration that the compile table builds for ``capability``."""
    for dtype, weight in (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32")):
        for size in (576, 4096, 7168):
            block = triton.next_power_of_2(size)
            for has_residual in (False, True):
                yield CompileCase(
                    name=f"{'add_' * has_residual}rms_norm/{dtype}/{size}/{weight}",
                    kernel=_rms_norm_kernel,
                    arguments={
                        "x_ptr": f"*{dtype}:16",
                        "residual_ptr": f"*{dtype}:16",
                        "weight_ptr": f"*{weight}:16",
                        "out_ptr": f"*{dtype}:16",
                        "total_ptr": f"*{dtype}:16",
                        "x_stride": "i32:16",
                        "size": "i32:16",
                        "eps": "fp32",
                    },
                    constants={"HAS_RESIDUAL": has_residual, "BLOCK": block},
                    num_warps=_num_warps(block),
                )
