"""What attention must know of a step: whose tokens are whose, and in which pages their past lies.

A step's tokens lie end to end, sequence after sequence. Sequence i has ``query_lens[i]`` new
tokens, the last of its ``context_lens[i]`` tokens; all keys and values, the new ones included, are
in the cache when they are attended to.

Kernels read the device tensors alone. The torch twins work on groups of sequences that can be
attended to in one call; groups and their masks are made on first use and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on ``device``. To a GPU through pinned memory: the host does not wait."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionGroup:
    """Sequences with equally many new tokens, attended to in one call by a torch twin.

    :param rows: the slice of the step's tokens they occupy.
    :param blocks: (sequences · pages,) int32, the pages of each, padded to the same number.
    :param ends: (sequences,) int64, the context length of each.
    :param num_keys: tokens that the pages of one sequence hold.
    """

    rows: slice
    num_seqs: int
    query_len: int
    blocks: torch.Tensor
    ends: torch.Tensor
    num_keys: int
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict, repr=False)

    def mask(self, window: int | None) -> torch.Tensor:
        """(sequences, 1, query_len, keys), True where a query may see a key."""
        found = self._masks.get(window)
        if found is None:
            device = self.ends.device
            keys = torch.arange(self.num_keys, device=device)
            first = self.ends[:, None, None, None] - self.query_len
            queries = first + torch.arange(self.query_len, device=device)[:, None]
            found = keys <= queries
            if window is not None:
                found &= keys > queries - window
            self._masks[window] = found
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBatch:
    """Where a step's tokens are stored and what each may see; made once, used by every layer.

    May be made from tensors that outlive a step, such as the buffers of a CUDA graph: then the
    maxima are bounds, a sequence without new tokens is padding, and so is a negative slot.

    :param slots: (tokens,) int64, the cache slot of each new token.
    :param query_starts: (sequences + 1,) int32, where the new tokens of each begin; the last is
        their number.
    :param context_lens: (sequences,) int32, tokens of each, the new ones included.
    :param block_table: (sequences, pages) int32, the pages of each, padded with 0.
    :param max_query_len: no sequence has more new tokens.
    :param max_context_len: no sequence has more tokens.
    :param num_decodes: so many sequences in front have exactly one new token, as far as the host
        knows; kernels treat them apart from the others.
    :param lens: host copies of the query and context lengths. Without them a twin reads the tensors
        back, and must not be kept for another step.
    """

    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_context_len: int
    num_decodes: int = 0
    lens: tuple[Sequence[int], Sequence[int]] | None = None
    _groups: dict[int, tuple[AttentionGroup, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        *,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device,
    ) -> AttentionBatch:
        """Plan a step. Put sequences in order of (query length, context length): see ``groups``."""
        starts = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        longest = max(context_lens, default=0)
        table = np.zeros((len(query_lens), -(-longest // block_size)), dtype=np.int32)
        for row, context, blocks in zip(table, context_lens, block_tables, strict=True):
            used = -(-context // block_size)
            row[:used] = blocks[:used]
        slots = np.array(_slots(query_lens, context_lens, block_tables, block_size), dtype=np.int64)
        return cls(
            slots=to_device(torch.from_numpy(slots), device),
            query_starts=to_device(torch.from_numpy(starts), device),
            context_lens=to_device(torch.tensor(context_lens, dtype=torch.int32), device),
            block_table=to_device(torch.from_numpy(table), device),
            max_query_len=max(query_lens, default=0),
            max_context_len=longest,
            num_decodes=sum(1 for _ in takewhile(lambda new: new == 1, query_lens)),
            lens=(query_lens, context_lens),
        )

    def groups(self, block_size: int) -> tuple[AttentionGroup, ...]:
        """The sequences that have new tokens, in groups for a torch twin.

        Neighbours with one new token each share a group as long as padding them to the longest
        context costs at most as much again as the contexts themselves; others stand alone.
        """
        found = self._groups.get(block_size)
        if found is None:
            found = self._groups[block_size] = tuple(self._make_groups(block_size))
        return found

    def _make_groups(self, block_size: int) -> list[AttentionGroup]:
        if self.lens is not None:
            query_lens, context_lens = self.lens
        else:
            query_lens, context_lens = self.query_starts.diff().tolist(), self.context_lens.tolist()
        groups = []
        row = first = 0
        while first < len(query_lens):
            last = _group_end(first, query_lens, context_lens)
            query_len, num_seqs = query_lens[first], last - first
            if query_len:
                pages = -(-max(context_lens[first:last]) // block_size)
                groups.append(
                    AttentionGroup(
                        rows=slice(row, row + query_len * num_seqs),
                        num_seqs=num_seqs,
                        query_len=query_len,
                        blocks=self.block_table[first:last, :pages].reshape(-1),
                        ends=self.context_lens[first:last].long(),
                        num_keys=pages * block_size,
                    )
                )
            row, first = row + query_len * num_seqs, last
        return groups


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
    if query_lens[first] != 1:
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
