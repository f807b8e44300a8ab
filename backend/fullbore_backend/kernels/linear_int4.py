"""``x @ weight.T`` with a weight in 4 bits and activations as they are.

A weight is ``(code - zero) · scale``; 32, 64 or 128 inputs of a row share a scale and a zero
(Frantar et al., "GPTQ", 2022; Lin et al., "AWQ", 2023). How a checkpoint orders its bits is for its
reader to know: here come plain codes, and they are laid out for the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

GROUPS = (128, 64, 32)
"""How many inputs may share a scale."""

MIDDLE = 8
"""The zero of a weight that has no zeros of its own."""

CHUNK = 128
"""Inputs packed together, as 16 words of 32 bits; inputs that are no multiple of it are padded.

Bits ``4 i`` to ``4 i + 3`` of word ``w`` are input ``32 i + 2 w`` for ``i < 4``; those 16 bits
higher are the input after it. So two neighbours come out of a word at once, by one shift and mask.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """A weight of ``(codes - zeros) · scales``. Made by :meth:`from_codes`.

    :param values: (rows, inputs / 2 rounded up to 64) uint8, two codes of 0 to 15 each.
    :param scales: (rows, inputs / group) fp32, bf16 or fp16, whose rows lie side by side.
    :param zeros: like ``scales``; uint8 if all are whole; ``None`` is 8 throughout.
    """

    values: torch.Tensor
    scales: torch.Tensor
    inputs: int
    zeros: torch.Tensor | None = None

    @classmethod
    def from_codes(
        cls, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
    ) -> Int4Weight:
        """Pack.

        :param codes: (rows, inputs) uint8, each of 0 to 15.
        :param scales: (rows, inputs / group), a group being one of :data:`GROUPS`.
        :raises ValueError: when the shapes do not fit each other.
        """
        rows, inputs = codes.shape
        if inputs not in [group * scales.shape[1] for group in GROUPS] or len(scales) != rows:
            raise ValueError(
                f"scales of shape {tuple(scales.shape)} do not fit codes of {(rows, inputs)}: "
                f"groups of {GROUPS} inputs of a row can share one."
            )
        if zeros is not None and zeros.shape != scales.shape:
            raise ValueError(
                f"zeros of shape {tuple(zeros.shape)} do not fit scales of {tuple(scales.shape)}."
            )
        return cls(
            values=_pack(codes),
            scales=_side_by_side(scales),
            inputs=inputs,
            zeros=None if zeros is None else _side_by_side(_narrow(zeros)),
        )

    @property
    def rows(self) -> int:
        """Outputs."""
        return self.values.shape[0]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.inputs // self.scales.shape[1]

    def codes(self) -> torch.Tensor:
        """(rows, inputs) uint8, of 0 to 15."""
        return _unpack(self.values)[:, : self.inputs]

    def dequantize(self) -> torch.Tensor:
        """(rows, inputs) fp32."""
        codes = self.codes().reshape(self.rows, -1, self.group).float()
        zeros = MIDDLE if self.zeros is None else self.zeros.float()[..., None]
        weight = (codes - zeros) * self.scales.float()[..., None]
        return weight.view(self.rows, self.inputs)

    def to(self, device: torch.device) -> Int4Weight:
        """The same weight there."""
        return Int4Weight(
            values=self.values.to(device),
            scales=self.scales.to(device),
            inputs=self.inputs,
            zeros=None if self.zeros is None else self.zeros.to(device),
        )

    def joins(self, other: object) -> bool:
        """Whether ``other`` can follow it in :meth:`concat`."""
        return (
            isinstance(other, Int4Weight)
            and other.group == self.group
            and other.scales.dtype == self.scales.dtype
            and (other.zeros is None) == (self.zeros is None)
        )

    @classmethod
    def concat(cls, parts: Sequence[Int4Weight]) -> Int4Weight:
        """One weight with the outputs of all, in order."""
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return cls(
            values=torch.cat([part.values for part in parts]),
            scales=torch.cat([part.scales.T for part in parts], 1).T,
            inputs=parts[0].inputs,
            zeros=torch.cat([each.T for each in zeros], 1).T if zeros else None,
        )


def _side_by_side(scales: torch.Tensor) -> torch.Tensor:
    """The same (rows, groups), the rows of a group next to each other: a kernel reads many rows."""
    return scales.T.contiguous().T


def _narrow(zeros: torch.Tensor) -> torch.Tensor:
    """The same, as uint8 if that changes none; below 128, as the kernel needs them."""
    whole = zeros.to(torch.uint8)
    return whole if torch.equal(whole.clamp(max=127).to(zeros.dtype), zeros) else zeros


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """(rows, inputs) to bytes, (rows, chunks · 64). The halves of a word have four codes each."""
    padded = F.pad(codes, (0, -codes.shape[1] % CHUNK))
    halves = padded.view(len(codes), -1, 4, CHUNK // 4).movedim(2, 3)  # (rows, chunks, 32, 4)
    low = halves[..., 0] | halves[..., 1] << 4
    high = halves[..., 2] | halves[..., 3] << 4
    return torch.stack((low, high), -1).view(len(codes), -1)


def _unpack(values: torch.Tensor) -> torch.Tensor:
    """Undo :func:`_pack`, but for the padding."""
    halves = values.view(len(values), -1, CHUNK // 4, 2)  # (rows, chunks, 32, 2 bytes)
    codes = torch.stack((halves & 15, halves >> 4), -1).flatten(3)
    return codes.movedim(3, 2).reshape(len(values), -1)


def quantize_int4(weight: torch.Tensor, group: int = 128) -> Int4Weight:
    """Quantise (rows, inputs), each group between its least and its largest, zero included.

    :param group: one of :data:`GROUPS` that divides the inputs.
    """
    grouped = weight.float().reshape(len(weight), -1, group)
    least, largest = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = (largest - least) / 15
    # A group of zeros is given a scale of one, to be divided by.
    scales = torch.where(scales > 0, scales, 1.0)
    zeros = (-least / scales).round()
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return Int4Weight.from_codes(codes.to(torch.uint8).view(weight.shape), scales, zeros)


def linear_int4_torch(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply.

    :param x: (tokens, inputs) of any float dtype; :param bias: (rows,) or none.
    :returns: (tokens, rows), same dtype as ``x``, which the weight is rounded to.
    """
    return F.linear(x, weight.dequantize().to(x.dtype), None if bias is None else bias.to(x.dtype))
