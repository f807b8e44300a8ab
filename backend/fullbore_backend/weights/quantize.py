"""Weights brought to the precision that was asked for, one by one as a checkpoint is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set

import torch

from ..config import Precision
from ..kernels.linear_fp8 import Fp8Weight, quantize_fp8
from ..kernels.linear_int4 import GROUPS, Int4Weight, quantize_int4
from ..kernels.linear_int8 import Int8Weight, quantize_int8
from ..kernels.linear_quantized import QuantizedWeight
from ..layers.linear import widened


def _int4(weight: torch.Tensor) -> torch.Tensor | Int4Weight:
    """In the largest groups that divide the inputs; as it is, if none do."""
    group = next((size for size in GROUPS if weight.shape[1] % size == 0), None)
    return weight if group is None else quantize_int4(weight, group)


_QUANTIZE: Mapping[str, Callable[[torch.Tensor], torch.Tensor | QuantizedWeight]] = {
    "int8": quantize_int8,
    "fp8": quantize_fp8,
    "int4": _int4,
}
_KINDS = {"int8": Int8Weight, "fp8": Fp8Weight, "int4": Int4Weight}

QUANTIZED = frozenset(_QUANTIZE)
"""The precisions of weights alone."""


def in_precision(
    tensors: Iterable[tuple[str, torch.Tensor | QuantizedWeight]],
    precision: Precision,
    *,
    names: Set[str],
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    """The same tensors, with weights quantised, or widened, if they are not as asked for.

    :param precision: ``auto`` changes nothing, a float's widens, each other one quantises.
    :param names: of the weights that may be quantised; others that are so already remain.
    :param device: where it is done.
    """
    for name, tensor in tensors:
        if precision == "auto":
            yield name, tensor
        elif precision not in QUANTIZED:
            yield name, widened(tensor, device)
        elif name not in names or isinstance(tensor, _KINDS[precision]):
            yield name, tensor
        else:
            yield name, _QUANTIZE[precision](widened(tensor, device).to(device))
