"""Attention of sequences that share their first pages, against ordinary attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fullbore_backend.kernels.attention_batch import AttentionBatch
from fullbore_backend.kernels.cascade import cascade_attention_torch, cascade_attention_triton


def share(step: Any, run: range, shared_pages: int) -> AttentionBatch:
    """The same step, with the first pages of its run those of the first sequence of the run."""
    query_lens, context_lens = step.batch.lens
    tables = [list(table) for table in step.tables]
    for seq in run:
        tables[seq][:shared_pages] = tables[run.start][:shared_pages]
    return AttentionBatch.build(
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=tables,
        block_size=step.pages.block_size,
        device=step.query.device,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("query_lens", "context_lens", "shared_pages", "run"),
    [
        ([1] * 5, [50, 33, 48, 200, 49], 2, None),
        ([1, 1, 5, 40], [700, 601, 605, 640], 37, None),
        ([1, 1, 1, 1, 3, 20], [9, 80, 65, 99, 68, 25], 4, range(1, 5)),
        ([1, 1, 4, 4, 6], [9, 80, 70, 68, 70], 4, range(2, 4)),
        ([1], [17], 1, None),
        ([1, 1], [17, 18], 0, None),
        ([1, 1], [17, 18], 1, range(1, 1)),
    ],
    ids=["decodes", "long", "a run of both", "prefills amid", "one", "nothing shared", "no run"],
)
def test_cascade(
    make_step: Callable[..., Any],
    assert_as_exact: Callable[..., None],
    query_lens: list[int],
    context_lens: list[int],
    shared_pages: int,
    run: range | None,
    dtype: torch.dtype,
) -> None:
    step = make_step(query_lens, context_lens, dtype=dtype)
    everyone = range(len(query_lens))
    batch = share(step, everyone if run is None else run, shared_pages)
    options: dict[str, Any] = {"scale": 0.2, "run": run}
    got = cascade_attention_triton(step.query, step.pages, batch, shared_pages, **options)
    twin = cascade_attention_torch(step.query, step.pages, batch, shared_pages, **options)
    exact = cascade_attention_torch(
        step.query.double(), step.wide_pages, batch, shared_pages, **options
    )
    assert_as_exact(got, twin, exact)


@pytest.mark.parametrize("stored", [torch.float16, torch.int8], ids=str)
def test_with_caps_sinks_and_quantised_pages(
    make_step: Callable[..., Any],
    assert_as_exact: Callable[..., None],
    device: torch.device,
    stored: torch.dtype,
) -> None:
    """A sink joins the sum once, not once for each part."""
    step = make_step([1, 1, 3], [40, 300, 41], stored=stored)
    batch = share(step, range(3), 2)
    options: dict[str, Any] = {
        "scale": 0.2,
        "soft_cap": 2.0,
        "sinks": torch.tensor([-1.0, 0.0, 2.0, 5.0], device=device),
    }
    got = cascade_attention_triton(step.query, step.pages, batch, 2, **options)
    twin = cascade_attention_torch(step.query, step.pages, batch, 2, **options)
    exact = cascade_attention_torch(step.query.double(), step.wide_pages, batch, 2, **options)
    assert_as_exact(got, twin, exact)


def test_nothing_to_do(make_step: Callable[..., Any]) -> None:
    step = make_step([], [])
    for attend in (cascade_attention_torch, cascade_attention_triton):
        assert attend(step.query, step.pages, step.batch, 0, scale=1.0).shape == (0, 4, 64)
