"""Multi-head latent attention over the paged cache, in its absorbed form (DeepSeek-V2, 2024).

A token's keys and values are one latent vector and one rotated key, shared by all heads. The
projections that would expand them are moved to the query's and the output's side, so attention
reads ``latent + rope`` numbers a token (512 + 64 in DeepSeek-V3) whatever the number of heads: a
decode step of h heads does 2 · h · (2 · latent + rope) operations for every ``latent + rope``
numbers read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .attention_batch import AttentionBatch
from .kv_pages import KvPages
from .paged_attention import gather_pages


def mla_attention_torch(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pages: KvPages,
    batch: AttentionBatch,
    *,
    scale: float,
) -> torch.Tensor:
    """Attend each token of a step to the latents of its sequence's pages.

    It is attention with one KV head, whose values are the first part of its keys.

    :param q_latent: (tokens, heads, latent), queries taken through the keys' projection.
    :param q_rope: (tokens, heads, rope), their rotated part.
    :param pages: ``k`` holds (blocks, block_size, 1, latent + rope); ``v`` is not used.
    :param scale: multiplies the scores.
    :returns: (tokens, heads, latent), weighted sums of latents, same dtype as ``q_latent``.
    """
    latent = q_latent.shape[-1]
    query = torch.cat((q_latent, q_rope), dim=-1)
    out = torch.empty_like(q_latent)
    for group in batch.groups(pages.block_size):
        keys = gather_pages(pages.k, pages.k_scale, group, query.dtype)
        queries = query[group.rows].view(group.num_seqs, group.query_len, *query.shape[1:])
        attended = F.scaled_dot_product_attention(
            *(queries.transpose(1, 2), keys, keys[..., :latent]),
            attn_mask=group.mask(None),
            scale=scale,
            enable_gqa=query.shape[1] > 1,
        )
        out[group.rows] = attended.transpose(1, 2).reshape(-1, *q_latent.shape[1:])
    return out
