"""Attention over a paged KV cache: decode, prefill and chunked prefill as one operation.

A step's tokens lie end to end, sequence after sequence. Sequence i has ``query_lens[i]`` new
tokens, the last of its ``context_lens[i]`` tokens; all keys and values, the new ones included, are
in the cache already. Token p of a sequence sees its tokens 0..p (or the last ``window`` of them).

The pages are those of vLLM's PagedAttention (Kwon et al., 2023): a sequence's token p lies in block
``block_table[p // block_size]`` at offset ``p % block_size``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Sequences with equally many new tokens, attended to in one call.

    ``rows`` is the slice of the step's tokens they occupy. ``blocks`` (sequences · pages,) int64
    lists the pages of each, padded to the same number. ``masks[window]`` (sequences, 1, query_len,
    keys) is True where a query may see a key.
    """

    rows: slice
    num_seqs: int
    query_len: int
    blocks: torch.Tensor
    masks: dict[int | None, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Where a step's tokens are stored and what each may see; made once, used by every layer.

    :param slots: (tokens,) int64, the cache slot of each new token.
    """

    slots: torch.Tensor
    groups: tuple[AttentionGroup, ...]

    @classmethod
    def build(
        cls,
        *,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device,
        windows: Sequence[int | None] = (None,),
    ) -> AttentionBatch:
        """Plan a step.

        Neighbours with equal query lengths share a group as long as padding them to the longest
        context costs at most as much again as the contexts themselves, so put sequences in order of
        (query length, context length).

        :param windows: every sliding-window length that some layer uses; ``None`` is full
            attention.
        """
        slots = _slots(query_lens, context_lens, block_tables, block_size)
        groups = []
        row = first = 0
        while first < len(query_lens):
            last = _group_end(first, query_lens, context_lens)
            stop = row + query_lens[first] * (last - first)
            groups.append(
                _group(
                    slice(row, stop),
                    query_lens[first],
                    context_lens[first:last],
                    block_tables[first:last],
                    block_size,
                    device,
                    windows,
                )
            )
            row, first = stop, last
        return cls(
            slots=torch.tensor(slots, dtype=torch.int64, device=device), groups=tuple(groups)
        )


def _slots(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
) -> list[int]:
    return [
        table[position // block_size] * block_size + position % block_size
        for new, context, table in zip(query_lens, context_lens, block_tables, strict=True)
        for position in range(context - new, context)
    ]


def _group_end(first: int, query_lens: Sequence[int], context_lens: Sequence[int]) -> int:
    """The end of the group that starts at ``first``: prefills stand alone, decodes share."""
    if query_lens[first] > 1:
        return first + 1
    longest = total = context_lens[first]
    last = first + 1
    while last < len(query_lens) and query_lens[last] == 1:
        longest = max(longest, context_lens[last])
        total += context_lens[last]
        if longest * (last - first + 1) > 2 * total:
            break
        last += 1
    return last


def _group(
    rows: slice,
    query_len: int,
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
    windows: Sequence[int | None],
) -> AttentionGroup:
    pages = -(-max(context_lens) // block_size)
    blocks: list[int] = []
    for table in block_tables:
        used = table[:pages]
        blocks += used
        blocks += [0] * (pages - len(used))
    keys = torch.arange(pages * block_size, device=device)
    ends = torch.tensor(context_lens, device=device)[:, None, None, None]
    queries = ends - query_len + torch.arange(query_len, device=device)[:, None]
    causal = keys <= queries
    masks = {
        window: causal if window is None else causal & (keys > queries - window)
        for window in windows
    }
    return AttentionGroup(
        rows=rows,
        num_seqs=len(context_lens),
        query_len=query_len,
        blocks=torch.tensor(blocks, dtype=torch.int64, device=device),
        masks=masks,
    )


def paged_attention_torch(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend each token of a step to its sequence's pages.

    The pages of a group are gathered into one contiguous copy, then attended to by torch's own
    attention.

    :param query: (tokens, heads, head_dim); heads is a multiple of kv_heads, and head h reads KV
        head ``h // (heads / kv_heads)``.
    :param k_cache: and :param v_cache: (blocks, block_size, kv_heads, head_dim).
    :param scale: multiplies the scores.
    :param window: how many tokens back a query sees, itself included; ``None`` is all.
    :returns: (tokens, heads, head_dim), same dtype as ``query``.
    """
    out = torch.empty_like(query)
    heads, head_dim = query.shape[1:]
    kv_heads = k_cache.shape[2]
    for group in batch.groups:
        shape = (group.num_seqs, -1, kv_heads, head_dim)
        keys = k_cache.flatten(1).index_select(0, group.blocks).view(shape).transpose(1, 2)
        values = v_cache.flatten(1).index_select(0, group.blocks).view(shape).transpose(1, 2)
        queries = query[group.rows].view(group.num_seqs, group.query_len, heads, head_dim)
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys,
            values,
            attn_mask=group.masks[window],
            scale=scale,
            enable_gqa=heads != kv_heads,
        )
        out[group.rows] = attended.transpose(1, 2).reshape(-1, heads, head_dim)
    return out
