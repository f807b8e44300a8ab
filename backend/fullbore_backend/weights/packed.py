"""What formats with several codes to a word share: unpacking, and scales for groups of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import ModelError
from .parts import require, unfit

if TYPE_CHECKING:
    import torch

    from .parts import Weight

WORD = 32
"""Bits of a word."""

BITS = (4, 8)
"""Bits of a code that are read."""


def require_bits(bits: object, where: str) -> None:
    """Raise :class:`ModelError` for codes of another size than :data:`BITS`."""
    if bits not in BITS:
        known = " and ".join(map(str, BITS))
        raise ModelError(f"{where}: weights of {bits} bits are not supported; {known} are.")


def require_words(module: str, parts: Mapping[str, torch.Tensor], part: str) -> torch.Tensor:
    """One part of a module's weight, a matrix of int32.

    :raises ModelError: if it is missing, or something else.
    """
    import torch

    words = require(module, parts, part)
    if words.dtype != torch.int32:
        raise unfit(f"{module}.{part}", words, "codes packed into int32 were expected")
    return words


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """(rows, words) int32 to (rows, words · 32 / bits) uint8; a word's lowest bits come first.

    On a little-endian machine, where that is so of a word's bytes too.
    """
    import torch

    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def grouped_weight(
    name: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    groups: torch.Tensor | None = None,
) -> Weight:
    """``(codes - zeros) · scales``, kept in 4 bits if a kernel knows groups of that size.

    :param name: of the scales, for errors.
    :param codes: (rows, inputs) uint8.
    :param scales: and :param zeros: (rows, groups); no zeros are half the range.
    :param groups: (inputs,) the group of each input; by default they lie in order.
    """
    from ..kernels.linear_int4 import GROUPS, Int4Weight

    (rows, inputs), count = codes.shape, scales.shape[-1]
    if scales.shape != (rows, count) or not count or (groups is None and inputs % count):
        raise unfit(name, scales, f"that does not fit a weight of {(rows, inputs)}")
    if zeros is not None and zeros.shape != scales.shape:
        raise unfit(name, scales, f"there are zeros of shape {tuple(zeros.shape)}")
    size = inputs // count
    if bits == 4 and _in_order(groups, inputs, count):
        # Larger groups are several of a size that is known, with the same scale.
        known = next((group for group in GROUPS if size % group == 0), None)
        if known is not None:
            times = size // known
            return Int4Weight.from_codes(
                codes,
                scales.repeat_interleave(times, 1),
                None if zeros is None else zeros.repeat_interleave(times, 1),
            )
    return _widened(codes, scales, zeros, bits=bits, groups=groups)


def require_groups(name: str, groups: torch.Tensor, inputs: int, count: int) -> None:
    """Raise :class:`ModelError` unless every input has one of the groups."""
    if groups.shape != (inputs,) or not 0 <= int(groups.min()) <= int(groups.max()) < count:
        raise unfit(name, groups, f"{inputs} inputs in {count} groups were expected")


def _in_order(groups: torch.Tensor | None, inputs: int, count: int) -> bool:
    """Whether groups are of one size and lie side by side."""
    import torch

    if groups is None:
        return True
    in_order = torch.arange(inputs, dtype=groups.dtype, device=groups.device) * count // inputs
    return inputs % count == 0 and torch.equal(groups, in_order)


def _widened(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    groups: torch.Tensor | None,
) -> torch.Tensor:
    """(rows, inputs) fp32."""
    size = codes.shape[1] // scales.shape[1]

    def spread(values: torch.Tensor) -> torch.Tensor:
        wide = values.float()
        return wide.repeat_interleave(size, 1) if groups is None else wide[:, groups.long()]

    middle = 1 << (bits - 1)
    return (codes.float() - (middle if zeros is None else spread(zeros))) * spread(scales)
