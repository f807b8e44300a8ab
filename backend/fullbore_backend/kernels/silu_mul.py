"""The gates of gated feed-forward blocks (Shazeer, 2020, "GLU Variants Improve Transformer").

Each takes ``gate_up`` (tokens, 2 · size), which holds gate, then up, in a row, and returns
(tokens, size) of the same dtype. Bound by memory: three elements moved for each one returned.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ._triton import CompileCase, jit, tl, triton

_SILU, _GELU, _CLAMPED = 0, 1, 2
_BLOCK = 1024


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up`` (SwiGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) · up`` with the tanh approximation of GELU (GeGLU, as in Gemma)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu_torch(
    gate_up: torch.Tensor, *, limit: float = 7.0, alpha: float = 1.702
) -> torch.Tensor:
    """gpt-oss's gate: ``(up + 1) · gate · sigmoid(alpha · gate)``, with both clamped first.

    ``gate`` to at most ``limit``, ``up`` to [-limit, limit].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


@jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """Below -80 the result is as good as 0; the exponential would leave fp32's range."""
    return 1.0 / (1.0 + tl.exp(-tl.maximum(x, -80.0)))


@jit
def gate_up_product(  # type: ignore[no-untyped-def]
    gate, up, KIND: tl.constexpr, limit, alpha
):
    """One of the gates above, on fp32; ``KIND`` is 0 for SiLU, 1 for GELU, 2 for gpt-oss's."""
    if KIND == 0:
        return gate * _sigmoid(gate) * up
    elif KIND == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * _sigmoid(2.0 * inner) * up  # (1 + tanh(x)) / 2 is sigmoid(2x)
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate * _sigmoid(alpha * gate)


@jit
def _gate_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr, out_ptr, token_stride, size, limit, alpha, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """A stretch of one token a program; ``out`` is contiguous."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    source = gate_up_ptr + token * token_stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    product = gate_up_product(gate, up, KIND, limit, alpha)
    target = out_ptr + token * size + columns
    tl.store(target, product.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """:func:`silu_mul_torch` on the GPU."""
    return _launch(gate_up, _SILU)


def gelu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """:func:`gelu_mul_torch` on the GPU."""
    return _launch(gate_up, _GELU)


def clamped_swiglu_triton(
    gate_up: torch.Tensor, *, limit: float = 7.0, alpha: float = 1.702
) -> torch.Tensor:
    """:func:`clamped_swiglu_torch` on the GPU."""
    return _launch(gate_up, _CLAMPED, limit, alpha)


def _launch(
    gate_up: torch.Tensor, kind: int, limit: float = 0.0, alpha: float = 0.0
) -> torch.Tensor:
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
        _gate_kernel[(tokens, triton.cdiv(size, _BLOCK))](
            *(gate_up, out, gate_up.stride(0), size, limit, alpha),
            KIND=kind,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out


def compile_cases(capability: int) -> Iterator[CompileCase]:
    """Every configuration that the compile table builds for ``capability``."""
    for name, kind in (("silu_mul", _SILU), ("gelu_mul", _GELU), ("clamped_swiglu", _CLAMPED)):
        for dtype in ("bf16", "fp16"):
            yield CompileCase(
                name=f"{name}/{dtype}",
                kernel=_gate_kernel,
                arguments={
                    "gate_up_ptr": f"*{dtype}:16",
                    "out_ptr": f"*{dtype}:16",
                    "token_stride": "i32:16",
                    "size": "i32:16",
                    "limit": "fp32",
                    "alpha": "fp32",
                },
                constants={"KIND": kind, "BLOCK": _BLOCK},
            )
