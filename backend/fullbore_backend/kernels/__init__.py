"""The operations a model is made of, one file each, and the one place that picks an implementation.

Every operation ``foo`` has a torch twin ``foo_torch`` of the same signature: the oracle of its
tests, its documentation, and what runs where no faster kernel does. A model receives an
:class:`Ops` and never asks what device it is on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ._triton import HAS_TRITON
from .attention_batch import AttentionBatch
from .cascade import cascade_attention_torch, cascade_attention_triton
from .kv_pages import KvPages
from .linear import (
    has_onednn,
    linear_onednn,
    linear_torch,
    pack_linear_onednn,
    pack_linear_torch,
)
from .linear_quantized import linear_quantized_torch, linear_quantized_triton
from .mla_attention import mla_attention_torch
from .moe import fused_experts_torch, route_torch
from .paged_attention import paged_attention_torch
from .paged_attention_launch import paged_attention_triton
from .rms_norm import (
    add_rms_norm_torch,
    add_rms_norm_triton,
    rms_norm_torch,
    rms_norm_triton,
)
from .rope import rope_torch, rope_triton
from .rope_store_kv import rope_store_kv_torch, rope_store_kv_triton
from .silu_mul import (
    clamped_swiglu_torch,
    clamped_swiglu_triton,
    gelu_mul_torch,
    gelu_mul_triton,
    silu_mul_torch,
    silu_mul_triton,
)
from .store_kv import store_kv_torch, store_kv_triton

logger = logging.getLogger(__name__)

__all__ = ["AttentionBatch", "KvPages", "Ops", "select_ops", "triton_ops"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation of each operation, all for the same device."""

    pack_linear: Callable[[torch.Tensor], torch.Tensor] = pack_linear_torch
    linear: Callable[..., torch.Tensor] = linear_torch
    linear_quantized: Callable[..., torch.Tensor] = linear_quantized_torch
    rms_norm: Callable[..., torch.Tensor] = rms_norm_torch
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = add_rms_norm_torch
    rope: Callable[..., torch.Tensor] = rope_torch
    store_kv: Callable[..., None] = store_kv_torch
    rope_store_kv: Callable[..., torch.Tensor] = rope_store_kv_torch
    paged_attention: Callable[..., torch.Tensor] = paged_attention_torch
    cascade_attention: Callable[..., torch.Tensor] = cascade_attention_torch
    mla_attention: Callable[..., torch.Tensor] = mla_attention_torch
    silu_mul: Callable[..., torch.Tensor] = silu_mul_torch
    gelu_mul: Callable[..., torch.Tensor] = gelu_mul_torch
    clamped_swiglu: Callable[..., torch.Tensor] = clamped_swiglu_torch
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]] = route_torch
    fused_experts: Callable[..., torch.Tensor] = fused_experts_torch


def triton_ops() -> Ops:
    """Triton's, as far as there are any: for CUDA, and for the CPU in Triton's interpreter."""
    return Ops(
        linear_quantized=linear_quantized_triton,
        rms_norm=rms_norm_triton,
        add_rms_norm=add_rms_norm_triton,
        rope=rope_triton,
        store_kv=store_kv_triton,
        rope_store_kv=rope_store_kv_triton,
        paged_attention=paged_attention_triton,
        cascade_attention=cascade_attention_triton,
        silu_mul=silu_mul_triton,
        gelu_mul=gelu_mul_triton,
        clamped_swiglu=clamped_swiglu_triton,
    )


def select_ops(device: torch.device, dtype: torch.dtype = torch.float32) -> Ops:
    """The fastest implementations there are for a device and a dtype."""
    if device.type == "cuda" and HAS_TRITON:
        return triton_ops()
    if device.type == "cuda":
        logger.warning("triton cannot be imported: torch's own operations run, many times slower")
    if device.type != "cpu" or dtype != torch.float32:
        return Ops()
    if not has_onednn():
        logger.info("this build of torch has no oneDNN: matrix products take their plain path")
        return Ops()
    return Ops(pack_linear=pack_linear_onednn, linear=linear_onednn)
