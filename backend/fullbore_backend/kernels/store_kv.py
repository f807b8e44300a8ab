"""Write new keys and values into the paged cache."""

from __future__ import annotations

import torch

from .kv_pages import LARGEST, KvPages, quantize_kv


def store_kv_torch(
    key: torch.Tensor, value: torch.Tensor, pages: KvPages, slots: torch.Tensor
) -> None:
    """Store token i's key and value in slot ``slots[i]``; changes the pages in place.

    Reads and writes each new key and value once. Into fp8 or int8 pages they are rounded with a
    scale of their own for each token and head (:func:`.kv_pages.quantize_kv`).

    :param key: (tokens, kv_heads, k_dim). :param value: (tokens, kv_heads, v_dim).
    :param slots: (tokens,) int64, each ``block · block_size + offset``, all distinct; a token whose
        slot is negative is padding and is skipped.
    """
    if not slots.numel():
        return
    if int(slots.min()) < 0:
        kept = slots >= 0
        key, value, slots = key[kept], value[kept], slots[kept]
    _store(key, pages.k, pages.k_scale, slots)
    _store(value, pages.v, pages.v_scale, slots)


def _store(
    new: torch.Tensor, pages: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor
) -> None:
    if not pages.shape[3]:
        return  # latent attention keeps no values
    rows = pages.view(-1, *pages.shape[2:])
    if scales is None:
        rows.index_copy_(0, slots, new.to(pages.dtype))
        return
    assert pages.dtype in LARGEST
    values, scale = quantize_kv(new, pages.dtype)
    # Byte by byte: torch does not index fp8 on every device.
    rows.view(torch.uint8).index_copy_(0, slots, values.view(torch.uint8))
    scales.view(-1, scales.shape[2]).index_copy_(0, slots, scale)
