"""AWQ (Lin et al., 2023) in the layout that AutoAWQ calls ``gemm``.

Of a module: ``qweight`` (inputs, outputs / 8) int32, ``qzeros`` (groups, outputs / 8) int32 and
``scales`` (groups, outputs). Eight outputs share a word, the even ones before the odd ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .packed import WORD, grouped_weight, require_words
from .parts import Format, require, unfit

if TYPE_CHECKING:
    import torch

    from .parts import Weight

_BITS = 4
_LARGEST = (1 << _BITS) - 1
_IN_A_WORD = WORD // _BITS
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output of eight a word has where, from its lowest bits."""


def awq(settings: Mapping[str, Any]) -> Format:
    """The format that a ``quantization_config`` describes.

    :raises ModelError: for bits or a layout that are not known.
    """
    layout = settings.get("version") or settings.get("format") or "gemm"
    if str(layout).lower() != "gemm":
        raise ModelError(f"AWQ's layout {layout!r} is not supported; gemm is.")
    bits = settings.get("bits", settings.get("w_bit", _BITS))
    if bits != _BITS:
        raise ModelError(f"AWQ with {bits} bits is not supported; {_BITS} are.")
    return Format(parts=frozenset({"qweight", "qzeros", "scales"}), join=_join)


def _join(module: str, parts: Mapping[str, torch.Tensor]) -> Weight:
    scales = require(module, parts, "scales")
    codes = _outputs_first(module, parts, "qweight", scales)
    zeros = _outputs_first(module, parts, "qzeros", scales)
    return grouped_weight(f"{module}.scales", codes, scales.T, zeros, bits=_BITS)


def _outputs_first(
    module: str, parts: Mapping[str, torch.Tensor], part: str, scales: torch.Tensor
) -> torch.Tensor:
    """(rows, outputs / 8) words to (outputs, rows) uint8."""
    import torch

    words = require_words(module, parts, part)
    groups, outputs = scales.shape
    rows = groups if part == "qzeros" else words.shape[0]
    if words.shape != (rows, outputs // _IN_A_WORD) or outputs % _IN_A_WORD:
        raise unfit(f"{module}.{part}", words, f"{outputs} outputs with 4 bits each were expected")
    turned = words.T.contiguous()
    codes = torch.empty(len(turned), _IN_A_WORD, rows, dtype=torch.uint8, device=words.device)
    for place, output in enumerate(_ORDER):
        codes[:, output] = (turned >> _BITS * place) & _LARGEST
    return codes.view(outputs, rows)
