"""Attention over a paged KV cache: decode, prefill and chunked prefill as one operation.

Token p of a sequence sees its tokens 0..p, or the last ``window`` of them. This is the torch twin;
:mod:`.paged_attention_launch` has the kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .attention_batch import AttentionBatch, AttentionGroup
from .kv_pages import KvPages

__all__ = ["AttentionBatch", "paged_attention_torch"]


def paged_attention_torch(
    query: torch.Tensor,
    pages: KvPages,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each token of a step to its sequence's pages.

    The pages of a group are gathered into one contiguous copy, fp8 and int8 ones are widened, and
    the copy is attended to by torch's own attention.

    :param query: (tokens, heads, k_dim); heads is a multiple of kv_heads, and head h reads KV
        head ``h // (heads / kv_heads)``.
    :param scale: multiplies the scores.
    :param window: how many tokens back a query sees, itself included; ``None`` is all.
    :param soft_cap: scores become ``cap · tanh(score / cap)`` (Gemma 2).
    :param sinks: (heads,) fp32, a score for each head that joins the denominator of the softmax and
        carries no value (gpt-oss; Xiao et al., 2023).
    :returns: (tokens, heads, v_dim), same dtype as ``query``; rows of no sequence are undefined.
    """
    heads, k_dim = query.shape[1:]
    v_dim = pages.v.shape[3]
    out = query.new_empty(query.shape[0], heads, v_dim)
    for group in batch.groups(pages.block_size):
        keys = gather_pages(pages.k, pages.k_scale, group, query.dtype)
        values = gather_pages(pages.v, pages.v_scale, group, query.dtype)
        queries = query[group.rows].view(group.num_seqs, group.query_len, heads, k_dim)
        queries, mask = queries.transpose(1, 2), group.mask(window)
        if soft_cap is None and sinks is None:
            attended = F.scaled_dot_product_attention(
                *(queries, keys, values),
                attn_mask=mask,
                scale=scale,
                enable_gqa=heads != keys.shape[1],
            )
        else:
            attended = _attend(queries, keys, values, mask, scale, soft_cap, sinks)
        out[group.rows] = attended.transpose(1, 2).reshape(-1, heads, v_dim)
    return out


def gather_pages(
    pages: torch.Tensor, scales: torch.Tensor | None, group: AttentionGroup, dtype: torch.dtype
) -> torch.Tensor:
    """A group's keys or values, (sequences, kv_heads, keys, dim)."""
    shape = (group.num_seqs, group.num_keys, *pages.shape[2:])
    if scales is None:
        found = pages.flatten(1).index_select(0, group.blocks).view(shape)
        return found.to(dtype).transpose(1, 2)
    stored = pages.flatten(1).view(torch.uint8).index_select(0, group.blocks).view(pages.dtype)
    scale = scales.flatten(1).index_select(0, group.blocks).view(shape[:-1])
    wide = torch.promote_types(dtype, torch.float32)
    return (stored.view(shape).to(wide) * scale[..., None]).to(dtype).transpose(1, 2)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What torch's own attention does not know: caps and sinks, in fp32 or wider."""
    dtype, wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
    repeats = query.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(repeats, 1).to(wide)
    values = values.repeat_interleave(repeats, 1).to(wide)
    scores = query.to(wide) @ keys.transpose(2, 3) * scale
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=3)
    weights = scores.softmax(3)[..., : keys.shape[2]]
    return (weights @ values).to(dtype)
