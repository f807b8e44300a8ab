"""Root-mean-square layer norm (Zhang and Sennrich, 2019), alone and fused with a residual add."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension.

    The mean is taken in fp32 whatever the dtype of ``x``.

    :param x: (..., size); :param weight: (size,). Returns a tensor like ``x``.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps)
    return normed.to(x.dtype) * weight


def add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``x`` to ``residual``, and norm the sum. Returns (normed, sum), each like ``x``."""
    total = residual + x
    return rms_norm_torch(total, weight, eps), total
