"""Matrix products with weights in 16, 8 and 4 bits, and experts.

Bytes are the weight with its scales, the activations and the result, once each; operations two for
each multiplication. Sizes are those of Qwen3-8B's feed-forward block, and the experts' those of
Qwen3-30B-A3B and DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from gpu_cases import Case
from gpu_timing import Bench, Row, SkippedError

from fullbore_backend.kernels.linear_fp8 import quantize_fp8
from fullbore_backend.kernels.linear_int4 import quantize_int4
from fullbore_backend.kernels.linear_int8 import quantize_int8
from fullbore_backend.kernels.linear_quantized import QuantizedWeight, linear_quantized_torch
from fullbore_backend.kernels.moe import fused_experts_torch, route_torch

KINDS: dict[str, tuple[str, Callable[[torch.Tensor], QuantizedWeight]]] = {
    "int8": ("int8", quantize_int8),
    "fp8": ("fp8", quantize_fp8),
    "fp8 in blocks": ("fp8", partial(quantize_fp8, block=128)),
    "int4": ("bf16", quantize_int4),
}
"""Each kind with the rate that bounds it: int4 weights are widened, and multiplied as 16 bits."""


def linear(bench: Bench) -> Iterator[Case]:
    """The library's product in 16 bits, and each quantised kind beside it."""
    shapes = ((96, 128),) if bench.tiny else ((24576, 4096), (4096, 12288))
    for tokens in (3,) if bench.tiny else (1, 16, 64, 2048):
        for shape in shapes:
            name = f"{tokens} x {shape[1]} -> {shape[0]}"
            yield Case(f"16 bits {name}", partial(_plain, bench, tokens, shape))
            for kind in KINDS:
                yield Case(f"{kind} {name}", partial(_quantized, bench, tokens, shape, kind))


def _plain(bench: Bench, tokens: int, shape: tuple[int, int]) -> Row:
    weight, x = bench.randn(*shape, std=0.02), bench.randn(tokens, shape[1])
    return bench.measure(
        lambda: bench.ops.linear(x, weight),
        traffic=weight.nbytes + x.nbytes + tokens * shape[0] * x.itemsize,
        operations=2 * tokens * weight.numel(),
        oracle=lambda: F.linear(x.float(), weight.float()),
    )


def _quantized(bench: Bench, tokens: int, shape: tuple[int, int], kind: str) -> Row:
    """The baseline is the library's product in 16 bits."""
    rate, quantize = KINDS[kind]
    plain, x = bench.randn(*shape, std=0.02), bench.randn(tokens, shape[1])
    weight = quantize(plain)
    return bench.measure(
        lambda: bench.ops.linear_quantized(x, weight),
        traffic=weight_bytes(weight) + x.nbytes + tokens * shape[0] * x.itemsize,
        operations=2 * tokens * plain.numel(),
        rate=rate,
        oracle=lambda: linear_quantized_torch(x, weight),
        tolerance=0.1 if bench.tiny else 0.02,  # the interpreter cuts fp8 off instead of rounding
        baseline=("16 bits", lambda: F.linear(x, plain)),
    )


def weight_bytes(weight: QuantizedWeight) -> int:
    """Values, scales, and zeros if it has them."""
    parts = (weight.values, weight.scales, getattr(weight, "zeros", None))
    return sum(part.nbytes for part in parts if part is not None)


def experts(bench: Bench) -> Iterator[Case]:
    """Routing, then the chosen experts; from one token to a prefill's many."""
    sizes = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "DeepSeek-V3": (256, 8, 7168, 2048)}
    if bench.tiny:
        sizes = {"tiny": (8, 2, 64, 32)}
    for name, size in sizes.items():
        for tokens in (5,) if bench.tiny else (1, 16, 64, 2048):
            yield Case(f"route {tokens}, {name}", partial(_route, bench, tokens, size))
            yield Case(f"experts {tokens}, {name}", partial(_experts, bench, tokens, size))


def _route(bench: Bench, tokens: int, size: tuple[int, int, int, int]) -> Row:
    """Bytes: the logits in, weights and numbers out. Softmax, not in groups."""
    if bench.ops.route is route_torch:
        raise SkippedError("there is no Triton kernel for it")
    count, top_k, _, _ = size
    logits = bench.randn(tokens, count, dtype=torch.float32)
    return bench.measure(
        lambda: bench.ops.route(logits, top_k=top_k)[0].sort(-1).values,
        traffic=logits.nbytes + tokens * top_k * 8,
        oracle=lambda: route_torch(logits, top_k=top_k)[0].sort(-1).values,
    )


def _experts(bench: Bench, tokens: int, size: tuple[int, int, int, int]) -> Row:
    """Bytes: the weights of those experts that some token chose, activations in and out."""
    if bench.ops.fused_experts is fused_experts_torch:
        raise SkippedError("there is no Triton kernel for it")
    count, top_k, hidden, inner = size
    x = bench.randn(tokens, hidden)
    gate_up = bench.randn(count, 2 * inner, hidden, std=0.02)
    down = bench.randn(count, hidden, inner, std=0.02)
    logits = bench.randn(tokens, count, dtype=torch.float32)
    weights, chosen = route_torch(logits, top_k=top_k)
    used = chosen.unique().numel()
    return bench.measure(
        lambda: bench.ops.fused_experts(x, gate_up, down, weights, chosen),
        traffic=used * 3 * hidden * inner * x.itemsize + 2 * x.nbytes,
        operations=6 * tokens * top_k * hidden * inner,
        oracle=lambda: fused_experts_torch(x, gate_up, down, weights, chosen),
        tolerance=0.03,
    )
