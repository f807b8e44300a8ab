"""One layer's pages of the KV cache, and how they hold numbers narrower than 16 bits.

The pages are those of vLLM's PagedAttention (Kwon et al., 2023): a sequence's token p lies in page
``block_table[p // block_size]`` at offset ``p % block_size``. Who owns which page is not known
here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import ConfigError

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The quantised page dtypes, and the largest magnitude of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPages:
    """Keys and values of one layer, page by page; written to in place.

    :param k: (blocks, block_size, kv_heads, k_dim), fp32, fp16, bf16, float8_e4m3fn or int8.
    :param v: (blocks, block_size, kv_heads, v_dim) of the same dtype; ``v_dim`` may differ from
        ``k_dim``. Latent attention keeps everything in ``k`` and has a ``v_dim`` of 0.
    :param k_scale: and :param v_scale: (blocks, block_size, kv_heads) fp32, given if and only if
        the pages are fp8 or int8: a value is what is stored times the scale of its token and head.
    :raises ConfigError: when dtypes and scales do not go together.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.k.dtype != self.v.dtype:
            raise ConfigError(f"keys are {self.k.dtype} and values {self.v.dtype}: use one dtype.")
        scaled = self.k.dtype in LARGEST
        if scaled != (self.k_scale is not None) or scaled != (self.v_scale is not None):
            raise ConfigError(
                f"{self.k.dtype} pages {'need' if scaled else 'take no'} k_scale and v_scale."
            )

    @classmethod
    def zeros(
        cls,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        *,
        k_dim: int,
        v_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KvPages:
        """Empty pages. On a CPU they take memory only where they are written to."""
        rows = (num_blocks, block_size, kv_heads)
        scaled = dtype in LARGEST
        return cls(
            k=_zeros((*rows, k_dim), dtype, device),
            v=_zeros((*rows, v_dim), dtype, device),
            k_scale=_zeros(rows, torch.float32, device) if scaled else None,
            v_scale=_zeros(rows, torch.float32, device) if scaled else None,
        )

    @property
    def block_size(self) -> int:
        """Tokens in a page."""
        return self.k.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the pages and of their scales."""
        tensors = (self.k, self.v, self.k_scale, self.v_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def token_bytes(kv_heads: int, *, k_dim: int, v_dim: int, dtype: torch.dtype) -> int:
    """What one token takes in the pages of one layer, its scales included."""
    scales = 2 * torch.float32.itemsize if dtype in LARGEST else 0
    return kv_heads * ((k_dim + v_dim) * dtype.itemsize + scales)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take memory only where they are written to, on a CPU.

    numpy asks the system for zeroed pages, which are mapped on first use; ``torch.zeros`` writes
    them. Zeros they must be: attention multiplies what it masks by nothing, and NaN would stay NaN.
    """
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


def quantize_kv(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round keys or values to ``dtype``, with one scale a token and head.

    The scale is the largest magnitude over that of ``dtype``, so nothing overflows and each head
    uses the whole range.

    :param x: (tokens, kv_heads, dim). :param dtype: one of :data:`LARGEST`.
    :returns: what to store, like ``x`` in ``dtype``, and scales (tokens, kv_heads) in fp32.
    """
    largest = LARGEST[dtype]
    wide = x.float()
    if not x.shape[-1]:
        return x.to(dtype), wide.new_zeros(x.shape[:-1])
    scale = wide.abs().amax(-1) / largest
    # A head of zeros has scale 0; what is stored for it is 0 too.
    scaled = wide / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    if dtype == torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-largest, largest).to(dtype), scale
