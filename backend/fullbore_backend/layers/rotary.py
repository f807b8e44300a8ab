"""Tables of rotary angles, with the ways in which checkpoints stretch them to longer contexts.

Knows ``linear`` (Chen et al., 2023), ``llama3`` (Llama 3.1's blend by wavelength), ``yarn`` (Peng
et al., 2023) and ``factors`` (a divisor per frequency, as GGUF files store it). Anything else is
refused: a model run with the wrong angles fails silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ModelError


def rotary_tables(
    *,
    head_dim: int,
    max_positions: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every angle, each (max_positions, head_dim / 2) in fp32.

    :param theta: base of the geometric series of wavelengths.
    :param scaling: ``rope_scaling`` of a Hugging Face config, or ``None``.
    :raises ModelError: for a kind of scaling that is not known.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / theta**exponents
    magnitude = 1.0
    kind = "default" if not scaling else scaling.get("rope_type", scaling.get("type", "default"))
    if scaling and kind == "linear":
        frequencies = frequencies / float(scaling["factor"])
    elif scaling and kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling and kind == "yarn":
        frequencies, magnitude = _yarn(frequencies, head_dim, theta, scaling)
    elif scaling and kind == "factors":
        frequencies = frequencies / torch.as_tensor(scaling["factors"], dtype=torch.float32)
    elif kind != "default":
        raise ModelError(
            f"rope scaling {kind!r} is not supported; known are default, linear, llama3, yarn "
            "and factors."
        )
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return angles.cos() * magnitude, angles.sin() * magnitude


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    turns = original * frequencies / (2 * math.pi)  # full turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / factor)


def _yarn(
    frequencies: torch.Tensor, head_dim: int, theta: float, scaling: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Interpolate slow frequencies, keep fast ones, ramp between; returns (them, magnitude)."""
    factor = float(scaling["factor"])
    original = float(scaling["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(scaling.get("beta_fast") or 32))
    high = dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    blended = frequencies / factor * ramp + frequencies * (1 - ramp)
    return blended, _yarn_magnitude(factor, scaling)


def yarn_scale(scaling: Mapping[str, Any] | None) -> float:
    """What DeepSeek multiplies its softmax scale by: the square of yarn's ``mscale_all_dim``."""
    weight = scaling.get("mscale_all_dim") if scaling else None
    return _mscale(float(scaling["factor"]), float(weight)) ** 2 if scaling and weight else 1.0


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_magnitude(factor: float, scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    weight, weight_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if weight and weight_all:
        return _mscale(factor, float(weight)) / _mscale(factor, float(weight_all))
    return _mscale(factor, 1.0)
