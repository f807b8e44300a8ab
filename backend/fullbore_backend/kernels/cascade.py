"""Attention of sequences that begin alike: what they share is read once for all of them.

All queries of a run of sequences attend to the shared pages as if they were one sequence, which
makes a product of matrices out of many products with a vector; then each sequence attends to the
rest of its own. The two are joined by their log-sum-exp (Juravsky et al., Hydragen, 2024; Ye et
al., Cascade Inference in FlashInfer, 2024).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .attention_batch import AttentionBatch
from .kv_pages import KvPages
from .paged_attention import paged_attention_torch
from .paged_attention_launch import Attention, Partials, Span, spans
from .paged_attention_tuning import MAX_SEGMENTS

MAX_SHARED_SEGMENTS = 32
"""The most segments of the shared pages: together with those of a sequence's own, the merge has no
more to join than it has room for."""


def cascade_attention_torch(
    query: torch.Tensor,
    pages: KvPages,
    batch: AttentionBatch,
    shared_pages: int,
    *,
    scale: float,
    run: range | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each token of a step to its sequence's pages, of which some sequences share the first.

    The result is that of ordinary attention, and the twin computes it as such.

    :param shared_pages: so many pages, all full, begin the block table of every sequence of the
        run; each sequence has at least one token more.
    :param run: the sequences that share them, neighbours; all unless given. Others are attended to
        as usual.
    :returns: (tokens, heads, v_dim), same dtype as ``query``.
    """
    return paged_attention_torch(query, pages, batch, scale=scale, soft_cap=soft_cap, sinks=sinks)


def cascade_attention_triton(
    query: torch.Tensor,
    pages: KvPages,
    batch: AttentionBatch,
    shared_pages: int,
    *,
    scale: float,
    run: range | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`cascade_attention_torch` on the GPU.

    Reads the shared keys and values once for each block of 128 rows of all the run's queries,
    where :func:`.paged_attention_launch.paged_attention_triton` reads them for each sequence.
    """
    out = query.new_empty(*query.shape[:2], pages.v.shape[3])
    if not query.shape[0]:
        return out
    num_seqs = batch.context_lens.shape[0]
    run = range(num_seqs) if run is None else run
    attention = Attention(
        query=query, pages=pages, batch=batch, scale=scale, soft_cap=soft_cap, sinks=sinks
    )
    _cascade(attention, out, run, shared_pages * pages.block_size)
    for others in (range(run.start), range(run.stop, num_seqs)):
        for span in spans(query.shape[0], batch, others):
            attention.attend(out, span)
    return out


def _cascade(attention: Attention, out: torch.Tensor, run: range, shared: int) -> None:
    """Attend the sequences of ``run``, which share their first ``shared`` tokens."""
    own = [
        replace(span, context_len=span.context_len - shared)
        for span in spans(out.shape[0], attention.batch, run)
    ]
    if not own:
        return
    tokens = sum(span.tokens for span in own)
    whole = Span(
        first_seq=run.start,
        num_seqs=len(run),
        first_row=own[0].first_row,
        tokens=tokens,
        query_len=tokens,
        context_len=shared,
    )
    launch = attention.choose(tokens, partial=True)
    segments = min(attention.segments(launch, replace(whole, num_seqs=1)), MAX_SHARED_SEGMENTS)
    launches = [attention.choose(span.query_len, partial=True) for span in own]
    own_segments = max(map(attention.segments, launches, own))
    own_segments = min(own_segments, MAX_SEGMENTS - MAX_SHARED_SEGMENTS)
    parts = Partials.empty(attention.query, segments + own_segments, out.shape[2])
    plain = replace(attention, sinks=None)
    plain.launch(launch, parts, whole, segments=segments, shared=shared, as_one=True)
    for span_launch, span in zip(launches, own, strict=True):
        plain.launch(span_launch, parts, span, segments=own_segments, slot=segments, shared=shared)
    parts.merge(out, attention.sinks, whole.rows)
