"""Activations to 8 bits, token by token or in groups of a token's inputs, as they come.

``value · scale`` gives them back, with the largest magnitude of a group at the end of the range:
127 for int8, 448 for float8 e4m3. Bound by memory: reads each element once, writes one byte.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ._triton import CompileCase, constant, jit, tl, triton

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The magnitude that the largest element of a group gets."""

_ROUND = constant(1.5 * 2**23)  # added and taken away again: rounds to even, below 2^22
_PER_PROGRAM = 2048


def quantize_rows_torch(
    x: torch.Tensor, dtype: torch.dtype, group: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise (tokens, inputs).

    :param dtype: int8 or float8_e4m3fn.
    :param group: inputs that share a scale; ``None`` is all of a token's. The last group may be
        short.
    :returns: values (tokens, inputs), and scales (tokens, groups) fp32 whose tokens lie side by
        side. A token that has a NaN or an infinity gets NaN for a scale.
    """
    tokens, inputs = x.shape
    size = group or inputs
    groups = -(-inputs // size)
    padded = torch.nn.functional.pad(x.float(), (0, groups * size - inputs))
    grouped = padded.view(tokens, groups, size)
    largest = grouped.abs().amax(-1)
    limit = LARGEST[dtype]
    factor = limit / torch.where(largest > 0, largest, 1.0)
    scaled = grouped * factor[..., None]
    if dtype == torch.int8:
        scaled = scaled.nan_to_num(0.0).round()
    values = scaled.clamp(-limit, limit).to(dtype).view(tokens, groups * size)[:, :inputs]
    scales = torch.empty(groups, tokens, dtype=torch.float32, device=x.device).T
    scales.copy_(largest / limit + 0.0 * grouped.sum(-1))
    return values.contiguous(), scales


@jit(do_not_specialize=("tokens",))  # type: ignore[untyped-decorator]
def _quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    values_ptr,
    scales_ptr,
    x_stride,
    tokens,
    inputs,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    LIMIT: tl.constexpr,
    ROUND: tl.constexpr,
):
    """``GROUPS`` groups of one token a program; a group is ``SIZE`` long, padded to ``GROUP``."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    within = tl.arange(0, GROUP)
    column = group[:, None] * SIZE + within[None, :]
    inside = (within[None, :] < SIZE) & (column < inputs)
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    factor = LIMIT / tl.where(largest > 0, largest, 1.0)
    scaled = tl.clamp(x * factor[:, None], -LIMIT, LIMIT)
    if ROUND:
        scaled = (scaled + _ROUND) - _ROUND
    # The maximum passes NaN over: the sum brings it into the scale, so that it is not lost.
    scale = largest / LIMIT + 0.0 * tl.sum(x, axis=1)
    values = scaled.to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + token * inputs + column, values, mask=inside)
    tl.store(scales_ptr + group * tokens + token, scale, mask=group * SIZE < inputs)


def quantize_rows_triton(
    x: torch.Tensor, dtype: torch.dtype, group: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_rows_torch` on the GPU. Rows of ``x`` may lie apart."""
    tokens, inputs = x.shape
    size = group or inputs
    groups = -(-inputs // size)
    values = torch.empty(tokens, inputs, dtype=dtype, device=x.device)
    scales = torch.empty(groups, tokens, dtype=torch.float32, device=x.device)
    if values.numel():
        blocks = _blocks(size, groups)
        _quantize_rows_kernel[(tokens, triton.cdiv(groups, blocks["GROUPS"]))](
            *(x, values, scales, x.stride(0), tokens, inputs),
            SIZE=size,
            **blocks,
            LIMIT=LARGEST[dtype],
            ROUND=dtype == torch.int8,
            num_warps=_num_warps(blocks),
        )
    return values, scales.T


def _blocks(size: int, groups: int) -> dict[str, int]:
    padded = triton.next_power_of_2(size)
    at_once = max(1, min(_PER_PROGRAM // padded, triton.next_power_of_2(groups)))
    return {"GROUP": padded, "GROUPS": at_once}


def _num_warps(blocks: dict[str, int]) -> int:
    return max(1, min(16, blocks["GROUP"] * blocks["GROUPS"] // 512))


def compile_cases(capability: int) -> Iterator[CompileCase]:
    """Every configuration that the compile table builds for ``capability``."""
    kinds = [("i8", 127.0)] if capability < 90 else [("i8", 127.0), ("fp8e4nv", 448.0)]
    for kind, limit in kinds:
        for inputs, group in ((4096, None), (28672, None), (7168, 128)):
            size = group or inputs
            blocks = _blocks(size, -(-inputs // size))
            yield CompileCase(
                name=f"quantize_rows/{kind}/{inputs}/{group or 'token'}",
                kernel=_quantize_rows_kernel,
                arguments={
                    "x_ptr": "*bf16:16",
                    "values_ptr": f"*{kind}:16",
                    "scales_ptr": "*fp32:16",
                    "x_stride": "i32:16",
                    "tokens": "i32",
                    "inputs": "i32:16",
                },
                constants={**blocks, "SIZE": size, "LIMIT": limit, "ROUND": kind == "i8"},
                num_warps=_num_warps(blocks),
            )
