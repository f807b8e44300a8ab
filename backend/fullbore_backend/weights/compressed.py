"""What llm-compressor writes, in the formats of ``compressed-tensors``.

``pack-quantized``: ``weight_packed`` (outputs, inputs · bits / 32) int32, lowest bits first, of
codes from which half the range is to be taken; ``weight_scale`` (outputs, groups), perhaps
``weight_zero_point`` (outputs · bits / 32, groups) int32 and ``weight_g_idx`` (inputs,), and
``weight_shape``. ``int-quantized`` and ``float-quantized``: ``weight`` in int8 or float8, and
``weight_scale``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .fp8 import scaled_float8
from .packed import BITS, WORD, grouped_weight, require_bits, require_groups, require_words, unpack
from .parts import Format, require, unfit

if TYPE_CHECKING:
    import torch

    from .parts import Weight

_FORMATS = frozenset(
    {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense"}
)
_MIDDLE = 128
"""Between a signed byte and its unsigned code."""

_PARTS = ("weight", "weight_packed", "weight_shape")
_SCALES = ("weight_scale", "weight_zero_point", "weight_g_idx")


def compressed(settings: Mapping[str, Any]) -> Format:
    """The format that a ``quantization_config`` describes.

    :raises ModelError: for one that is not known, or sparse weights.
    """
    for each in _formats(settings):
        if each not in _FORMATS:
            known = ", ".join(sorted(_FORMATS))
            raise ModelError(f"compressed-tensors' {each!r} is not supported; known are {known}.")
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ModelError(f"compressed-tensors' sparse {sparsity!r} is not supported.")
    if settings.get("transform_config"):
        raise ModelError("compressed-tensors with rotated activations are not supported.")
    blocks = set()
    for group in _groups(settings):
        weights = group.get("weights") or {}
        require_bits(weights.get("num_bits", 8), "compressed-tensors")
        if weights.get("block_structure"):
            blocks.add(tuple(weights["block_structure"]))
    if len(blocks) > 1:
        raise ModelError("blocks of several sizes in one checkpoint are not supported.")
    return Format(
        parts=frozenset({*_PARTS, *_SCALES}),
        join=partial(_join, block=next(iter(blocks), None)),
    )


def _groups(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from (settings.get("config_groups") or {}).values()


def _formats(settings: Mapping[str, Any]) -> Iterator[str]:
    """Of the whole, or of each group where the whole is a mixture."""
    whole = settings.get("format") or "dense"
    if whole != "mixed-precision":
        yield whole
    yield from (group["format"] for group in _groups(settings) if group.get("format"))


def _join(module: str, parts: Mapping[str, torch.Tensor], *, block: Sequence[int] | None) -> Weight:
    import torch

    scales = require(module, parts, "weight_scale", dims=None)
    if "weight_packed" in parts:
        return _packed(module, parts, scales)
    weight = require(module, parts, "weight")
    if weight.dtype == torch.int8:
        return _whole_bytes(module, weight, scales, parts.get("weight_zero_point"))
    return scaled_float8(module, weight, f"{module}.weight_scale", scales, block)


def _packed(module: str, parts: Mapping[str, torch.Tensor], scales: torch.Tensor) -> Weight:
    words = require_words(module, parts, "weight_packed")
    shape = require(module, parts, "weight_shape", dims=1).tolist()
    rows, inputs = shape if len(shape) == 2 else (0, 0)
    bits = next((each for each in BITS if words.shape == (rows, -(-inputs * each // WORD))), None)
    if bits is None:
        raise unfit(
            *(f"{module}.weight_packed", words),
            f"{tuple(shape)} codes of 4 or 8 bits were expected",
        )
    scales = _by_row(scales, rows)
    zeros, groups = None, parts.get("weight_g_idx")
    if "weight_zero_point" in parts:
        zeros = require_words(module, parts, "weight_zero_point")
        if zeros.shape != (-(-rows * bits // WORD), scales.shape[1]):
            raise unfit(f"{module}.weight_zero_point", zeros, f"{rows} outputs were expected")
        zeros = unpack(zeros.T, bits)[:, :rows].T
    if groups is not None:
        require_groups(f"{module}.weight_g_idx", groups, inputs, scales.shape[1])
    return grouped_weight(
        *(f"{module}.weight_scale", unpack(words, bits)[:, :inputs], scales, zeros),
        bits=bits,
        groups=groups,
    )


def _whole_bytes(
    module: str, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> Weight:
    """int8 with a scale for each output, or the whole, stays so; groups and zeros are widened."""
    import torch

    from ..kernels.linear_int8 import Int8Weight

    rows = len(weight)
    scales = _by_row(scales, rows)
    if scales.shape == (rows, 1) and (zeros is None or not zeros.any()):
        return Int8Weight(values=weight, scales=scales.float()[:, 0].contiguous())
    codes = weight.view(torch.uint8) ^ _MIDDLE
    if zeros is not None:
        zeros = _by_row(zeros.to(torch.int16) + _MIDDLE, rows)
    return grouped_weight(f"{module}.weight_scale", codes, scales, zeros, bits=8)


def _by_row(scales: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales of each row, or one of all, as (rows, groups)."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, 1)
    return scales[:, None] if scales.dim() == 1 else scales
