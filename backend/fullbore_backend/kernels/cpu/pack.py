"""Weights in int8 with a scale for each group of inputs, laid out as a product reads them.

Every ``GROUP`` inputs of a row share a scale, as do those of a token's activations. With one scale
a row, as is usual for int8, SmolLM2-135M's perplexity rises by 4.7 %: a few inputs are far larger
than the others. By groups it is unchanged within a fraction of a per cent (docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..quantize_rows import quantize_rows_torch

GROUP = 64
"""Inputs that share a scale."""

PANEL = 32
"""Rows that lie together: two vectors of sixteen."""

_LARGEST = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight for :mod:`.program`.

    :param panels: (rows / 32, inputs / 64, 64 + 2048) uint8: of each group the scales of 32 rows in
        bf16, then their codes plus 128 as (16, 2, 16, 4): four inputs of sixteen rows to a vector.
    :param rows: and :param inputs: of the weight itself; the panels are padded with zeros.
    """

    panels: torch.Tensor
    rows: int
    inputs: int

    def dequantize(self) -> torch.Tensor:
        """(rows, inputs) fp32."""
        count, groups, _ = self.panels.shape
        scales = self.panels[..., : 2 * PANEL].contiguous().view(torch.bfloat16)
        codes = self.panels[..., 2 * PANEL :].view(count, groups, GROUP // 4, 2, 16, 4)
        wide = codes.permute(0, 3, 4, 1, 2, 5).reshape(count, PANEL, groups, GROUP).float() - 128
        weight = wide * scales.float().transpose(1, 2)[..., None]
        return weight.reshape(count * PANEL, groups * GROUP)[: self.rows, : self.inputs]


def pack_weight(weight: torch.Tensor) -> PackedWeight:
    """Quantise and pack (rows, inputs).

    A group's scale is rounded up to bf16, so that its largest magnitude is 127 or a little less.
    """
    rows, inputs = weight.shape
    padded = F.pad(weight.float(), (0, -inputs % GROUP, 0, -rows % PANEL))
    count, groups = padded.shape[0] // PANEL, padded.shape[1] // GROUP
    grouped = padded.view(count, PANEL, groups, GROUP)
    scales = _bf16_above(grouped.abs().amax(-1) / _LARGEST)
    inverse = torch.where(scales > 0, 1.0 / scales.float(), 0.0)
    codes = ((grouped * inverse[..., None]).round() + 128).to(torch.uint8)
    laid_out = codes.view(count, 2, 16, groups, GROUP // 4, 4).permute(0, 3, 4, 1, 2, 5)
    panels = torch.cat(
        (
            scales.transpose(1, 2).contiguous().view(torch.uint8),
            laid_out.reshape(count, groups, PANEL * GROUP),
        ),
        dim=2,
    )
    return PackedWeight(panels=panels, rows=rows, inputs=inputs)


def _bf16_above(x: torch.Tensor) -> torch.Tensor:
    """The least bf16 that is not below a number that is not negative."""
    bits = x.view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def linear_packed_torch(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The twin: ``x @ weight.T + bias`` with ``x`` in int8 by groups.

    :param x: (tokens, inputs) fp32. Returns (tokens, rows) fp32.
    """
    values, scales = quantize_rows_torch(x, torch.int8, GROUP)
    wide = values.float() * scales.repeat_interleave(GROUP, 1)[:, : weight.inputs]
    return F.linear(wide, weight.dequantize(), bias)
