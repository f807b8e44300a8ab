"""Tables of rotary angles, with the ways in which checkpoints stretch them to longer contexts.

Knows ``linear`` (Chen et al., 2023), ``dynamic`` (NTK-aware, by length; Peng et al., 2023),
``llama3`` (Llama 3.1's blend by wavelength), ``yarn`` (Peng et al., 2023), ``longrope`` (Ding et
al., 2024) and ``factors`` (a divisor per frequency, as GGUF files store it). Anything else is
refused: a model run with the wrong angles fails silently.

``dynamic`` and ``longrope`` change all angles once a sequence is longer than those of training,
while keys in the cache were turned by the old ones. Here the longest sequence that is served
decides, once: up to the length of training nothing is changed, and beyond it the angles are those
that transformers uses for a sequence of that full length, also for shorter ones.
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

    :param max_positions: the longest sequence; see above for the kinds that it changes.
    :param theta: base of the geometric series of wavelengths.
    :param scaling: ``rope_scaling`` of a Hugging Face config, as ``weights/config_json.py`` leaves
        it, or ``None``.
    :raises ModelError: for a kind of scaling that is not known.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / theta**exponents
    magnitude = 1.0
    kind = "default" if not scaling else scaling.get("rope_type", scaling.get("type", "default"))
    if scaling and kind == "linear":
        frequencies = frequencies / float(scaling["factor"])
    elif scaling and kind == "dynamic":
        frequencies = 1.0 / _dynamic_base(theta, head_dim, max_positions, scaling) ** exponents
    elif scaling and kind == "longrope":
        frequencies, magnitude = _longrope(frequencies, max_positions, scaling)
    elif scaling and kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling and kind == "yarn":
        frequencies, magnitude = _yarn(frequencies, head_dim, theta, scaling)
    elif scaling and kind == "factors":
        frequencies = frequencies / torch.as_tensor(scaling["factors"], dtype=torch.float32)
    elif kind != "default":
        raise ModelError(
            f"rope scaling {kind!r} is not supported; known are default, linear, dynamic, llama3, "
            "yarn, longrope and factors."
        )
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return angles.cos() * magnitude, angles.sin() * magnitude


def trained_positions(scaling: Mapping[str, Any] | None) -> int | None:
    """The longest sequence whose angles are those of training, where a longer one changes them."""
    if not scaling or scaling.get("rope_type") not in ("dynamic", "longrope"):
        return None
    return int(scaling["original_max_position_embeddings"])


def _dynamic_base(
    theta: float, head_dim: int, max_positions: int, scaling: Mapping[str, Any]
) -> float:
    """Grows with the length, so that the slowest frequency is interpolated and the fastest kept."""
    original, factor = int(scaling["original_max_position_embeddings"]), float(scaling["factor"])
    stretch = factor * max(max_positions, original) / original - (factor - 1)
    return float(theta * stretch ** (head_dim / (head_dim - 2)))


def _longrope(
    frequencies: torch.Tensor, max_positions: int, scaling: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """A divisor of each frequency, found by search: one set for short sequences, one for long.

    Returns (frequencies, magnitude); the magnitude is one for both."""
    original, factor = int(scaling["original_max_position_embeddings"]), float(scaling["factor"])
    which = "long_factor" if max_positions > original else "short_factor"
    divisors = torch.tensor(scaling[which], dtype=torch.float32)
    if divisors.shape != frequencies.shape:
        raise ModelError(f"{which} has {len(divisors)} numbers for {len(frequencies)} frequencies.")
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return frequencies / divisors, float(magnitude)


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
