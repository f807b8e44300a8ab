"""A batch to token ids: tensors in, the model, sampling.

Owns the model and the pages of the KV cache. It does not know why a batch looks as it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from .graphs import Capture, DecodeGraphs
from .kernels import AttentionBatch, KvPages
from .kernels.attention_batch import to_device
from .models import Model
from .sampling import Sampled, SamplingState, Started, start_sampling
from .scheduler.batch import Batch, Chunk
from .scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step that has been started.

    :param rows: which of its samples is each sequence's.
    :param decides_the_next: some request's next token depends on this step's in other ways than
        through the model (penalties), so the next step cannot be launched before it is taken in.
    """

    batch: Batch
    rows: Mapping[Sequence, int]
    started: Started | None
    decides_the_next: bool = False

    def wait(self) -> list[Sampled]:
        """One token per chunk that samples, in the batch's order."""
        return [] if self.started is None else self.started.wait()


class Runner:
    """Runs batches on one device.

    :param model: weights filled in, on ``device``, angle tables made.
    :param num_blocks: pages of the KV cache, ``block_size`` tokens each; allocated here.
    :param kv_dtype: of the pages.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.device = device
        self.graphs: DecodeGraphs | None = None
        kv = model.kv
        self.pages = [
            KvPages.zeros(
                *(num_blocks, block_size, kv.kv_heads),
                k_dim=kv.k_dim,
                v_dim=kv.v_dim,
                dtype=kv_dtype,
                device=device,
            )
            for _ in range(kv.layers)
        ]

    @torch.inference_mode()
    def capture_graphs(self, *, largest: int, max_context_len: int, capture: Capture) -> None:
        """Make graphs of decode steps, so that from now on they are replayed.

        :param largest: the most sequences in a step; larger ones run without a graph.
        """
        self.graphs = DecodeGraphs(
            self.model,
            self.pages,
            block_size=self.block_size,
            max_context_len=max_context_len,
            largest=largest,
            device=self.device,
            capture=capture,
        )

    @torch.inference_mode()
    def launch(
        self, batch: Batch, states: SequenceOf[SamplingState], before: Launched | None = None
    ) -> Launched:
        """Start a step; batches run in the order in which they are launched.

        :param states: one per chunk that samples, in the batch's order.
        :param before: the step under way, if this batch was scheduled ahead of its tokens.
        """
        chunks = sorted(batch.chunks, key=_shape)
        logits = self._forward(chunks, before)
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        if not sampling:
            return Launched(batch=batch, rows={}, started=None)
        row = {chunk.sequence: at for at, chunk in enumerate(c for c in chunks if c.samples)}
        order = [row[chunk.sequence] for chunk in sampling]
        if order != list(range(len(order))):
            logits = logits.index_select(0, self._tensor(order))
        return Launched(
            batch=batch,
            rows={chunk.sequence: at for at, chunk in enumerate(sampling)},
            started=start_sampling(logits, states),
            decides_the_next=any(state.depends_on_tokens for state in states),
        )

    def _forward(self, chunks: SequenceOf[Chunk], before: Launched | None) -> torch.Tensor:
        """Logits of the chunks that sample, in this order, (sampling, vocab_size) fp32."""
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        unknown = _Unknown(before)
        for chunk in chunks:
            tokens += chunk.sequence.token_ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            if len(tokens) < len(positions):
                unknown.add(len(tokens), chunk.sequence)
                tokens.append(0)
            if chunk.samples:
                rows.append(len(tokens) - 1)
        tables = [chunk.sequence.block_ids for chunk in chunks]
        graphs = self.graphs
        if (
            graphs is not None
            and len(tokens) == len(rows) == len(chunks)
            and len(rows) <= graphs.sizes[-1]
        ):
            return graphs.run(tokens, positions, tables, place=unknown.place)
        attention = AttentionBatch.build(
            query_lens=[chunk.num_tokens for chunk in chunks],
            context_lens=[chunk.end for chunk in chunks],
            block_tables=tables,
            block_size=self.block_size,
            device=self.device,
        )
        token_ids = self._tensor(tokens)
        unknown.place(token_ids)
        logits: torch.Tensor = self.model(
            token_ids, self._tensor(positions), self._tensor(rows), self.pages, attention
        )
        return logits

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self.device)


class _Unknown:
    """Tokens that the step before samples: known to the device, not yet to the host."""

    def __init__(self, before: Launched | None) -> None:
        self._before = before
        self._places: list[int] = []
        self._rows: list[int] = []

    def add(self, place: int, sequence: Sequence) -> None:
        """The token at ``place`` is what the step before samples for ``sequence``."""
        assert self._before is not None, "only a batch scheduled ahead lacks a token"
        self._places.append(place)
        self._rows.append(self._before.rows[sequence])

    def place(self, token_ids: torch.Tensor) -> None:
        """Fill them in, on the device."""
        if self._before is not None and self._before.started is not None and self._places:
            places = to_device(torch.tensor(self._places), token_ids.device)
            rows = to_device(torch.tensor(self._rows), token_ids.device)
            token_ids.index_copy_(0, places, self._before.started.tokens.index_select(0, rows))


def _shape(chunk: Chunk) -> tuple[int, int]:
    """Decodes first, short contexts first: neighbours then share attention groups."""
    return chunk.num_tokens, chunk.end
