"""``x @ weight.T + bias``, with a weight that is laid out once for the library that multiplies it.

A weight is packed when it is loaded and only ever used through the same implementation afterwards,
so what packing returns is opaque to everybody else.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_ROWS = 32
"""The rows of ``x`` that oneDNN chooses a layout for; measured best of 1, 32, 512 at 1 to 512 rows.
"""


def pack_linear_torch(weight: torch.Tensor) -> torch.Tensor:
    """The weight as it is, (outputs, inputs)."""
    return weight


def linear_torch(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply.

    :param x: (tokens, inputs); :param packed: of :func:`pack_linear_torch`;
    :param bias: (outputs,) or none. Returns (tokens, outputs), same dtype.
    """
    return F.linear(x, packed, bias)


def pack_linear_onednn(weight: torch.Tensor) -> torch.Tensor:
    """A copy in the blocked layout of oneDNN.

    Saves it reordering a weight at each product, which costs more than the product itself when
    ``x`` has few rows.

    :param weight: (outputs, inputs) fp32 on a CPU.
    """
    packed: torch.Tensor = _onednn()._reorder_linear_weight(weight, _ROWS)
    return packed


def linear_onednn(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`linear_torch` for a weight of :func:`pack_linear_onednn`."""
    out: torch.Tensor = _onednn()._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def has_onednn() -> bool:
    """Whether this build of torch can do the above."""
    library: Any = torch.backends.mkldnn
    return bool(library.is_available()) and hasattr(_onednn(), "_reorder_linear_weight")


def _onednn() -> Any:
    return torch.ops.mkldnn
