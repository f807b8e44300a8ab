"""GPTQ (Frantar et al., 2022) as AutoGPTQ and GPTQModel store it.

Of a module: ``qweight`` (inputs · bits / 32, outputs) int32, ``qzeros`` (groups, outputs · bits /
32) int32, ``scales`` (groups, outputs), and ``g_idx`` (inputs,), each input's group. Lowest bits
come first. Zeros are stored less one, but for ``gptq_v2``.

A checkpoint in act-order has its groups all over the inputs; such a weight is widened.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .packed import WORD, grouped_weight, require_bits, require_groups, require_words, unpack
from .parts import Format, require, unfit

if TYPE_CHECKING:
    import torch

    from .parts import Weight

_STORED_LESS = {"gptq": 1, "gptq_v2": 0}
"""By how much each version's zeros are stored too low."""


def gptq(settings: Mapping[str, Any]) -> Format:
    """The format that a ``quantization_config`` describes.

    :raises ModelError: for bits or a layout that are not known.
    """
    layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if layout not in _STORED_LESS:
        known = " and ".join(_STORED_LESS)
        raise ModelError(f"GPTQ's layout {layout!r} is not supported; {known} are.")
    require_bits(settings.get("bits", 4), "GPTQ")
    return Format(
        parts=frozenset({"qweight", "qzeros", "scales", "g_idx"}),
        join=partial(_join, less=_STORED_LESS[layout], symmetric=bool(settings.get("sym", False))),
    )


def _join(module: str, parts: Mapping[str, torch.Tensor], *, less: int, symmetric: bool) -> Weight:
    scales = require(module, parts, "scales")
    qweight, qzeros = (require_words(module, parts, part) for part in ("qweight", "qzeros"))
    count, outputs = scales.shape
    bits = _bits(module, qzeros, scales)
    if qweight.shape[1] != outputs:
        raise unfit(f"{module}.qweight", qweight, f"{outputs} outputs were expected")
    codes, count_of_codes = unpack(qweight.T, bits), 1 << bits
    zeros: torch.Tensor | None = ((unpack(qzeros, bits) + less) & (count_of_codes - 1)).T
    if symmetric and zeros is not None and bool((zeros == count_of_codes // 2).all()):
        zeros = None
    groups = parts.get("g_idx")
    if groups is not None:
        require_groups(f"{module}.g_idx", groups, codes.shape[1], count)
    return grouped_weight(f"{module}.scales", codes, scales.T, zeros, bits=bits, groups=groups)


def _bits(module: str, qzeros: torch.Tensor, scales: torch.Tensor) -> int:
    """Of a code, from the shapes: modules of one checkpoint may differ."""
    count, outputs = scales.shape
    if len(qzeros) != count or qzeros.shape[1] * WORD % outputs:
        raise unfit(
            f"{module}.qzeros", qzeros, f"{count} groups of {outputs} outputs were expected"
        )
    bits = qzeros.shape[1] * WORD // outputs
    require_bits(bits, f"{module}.qzeros")
    return bits
