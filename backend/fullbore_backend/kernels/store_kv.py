"""Write new keys and values into the paged cache."""

from __future__ import annotations

import torch


def store_kv_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store token i's key and value in slot ``slots[i]``; changes the caches in place.

    :param key: and :param value: (tokens, kv_heads, head_dim).
    :param k_cache: and :param v_cache: (blocks, block_size, kv_heads, head_dim).
    :param slots: (tokens,) int64, each ``block · block_size + offset``; all distinct.
    """
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, key)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, value)
