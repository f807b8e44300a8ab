"""``x @ weight.T`` with a quantised weight of any kind: which product goes with which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from .linear_fp8 import Fp8Weight, linear_fp8_torch
from .linear_int4 import Int4Weight, linear_int4_torch
from .linear_int8 import Int8Weight, linear_int8_torch
from .linear_w4 import linear_int4_triton
from .linear_w8 import linear_fp8_triton, linear_int8_triton

QuantizedWeight: TypeAlias = Int8Weight | Fp8Weight | Int4Weight
"""What takes a weight's place. All kinds have ``rows``, ``inputs``, ``dequantize()``, ``to()``,
``joins()`` and ``concat()``."""


def concat_weights(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight with the outputs of all, in order. Each :meth:`joins` the next."""
    first = parts[0]
    if isinstance(first, Int8Weight):
        return Int8Weight.concat([part for part in parts if isinstance(part, Int8Weight)])
    if isinstance(first, Fp8Weight):
        return Fp8Weight.concat([part for part in parts if isinstance(part, Fp8Weight)])
    return Int4Weight.concat([part for part in parts if isinstance(part, Int4Weight)])


def linear_quantized_torch(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply.

    :param x: (tokens, inputs) of any float dtype; :param bias: (rows,) or none.
    :returns: (tokens, rows), same dtype as ``x``.
    """
    if isinstance(weight, Int8Weight):
        return linear_int8_torch(x, weight, bias)
    if isinstance(weight, Fp8Weight):
        return linear_fp8_torch(x, weight, bias)
    return linear_int4_torch(x, weight, bias)


def linear_quantized_triton(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`linear_quantized_torch` on the GPU."""
    if isinstance(weight, Int8Weight):
        return linear_int8_triton(x, weight, bias)
    if isinstance(weight, Fp8Weight):
        return linear_fp8_triton(x, weight, bias)
    return linear_int4_triton(x, weight, bias)
