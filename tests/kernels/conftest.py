"""How far a kernel may be from the truth, and the device that the tests of kernels run on.

The rule is FlashAttention's: a kernel's largest error against the result in fp64 is at most twice
that of its torch twin in the same precision.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from fullbore_backend.kernels.attention_batch import AttentionBatch
from fullbore_backend.kernels.kv_pages import LARGEST, KvPages, quantize_kv

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU where kernels are interpreted."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="session")
def assert_as_exact() -> Callable[..., None]:
    """``assert_as_exact(got, twin, exact, *, floor=...)``: the rule above."""
    return check_as_exact


def check_as_exact(
    got: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor, *, floor: float | None = None
) -> None:
    """Raise with the worst error and where it is when ``got`` breaks the rule.

    :param got: the kernel's result; :param twin: the twin's, in the same dtype; :param exact: fp64.
    :param floor: an error that always passes, relative to the largest magnitude of ``exact``; the
        default is one unit in the last place of the dtype: the twin may be exact by luck.
    """
    assert got.shape == twin.shape == exact.shape
    assert got.dtype == twin.dtype
    if not exact.numel():
        return
    # Triton's interpreter cuts bf16 off instead of rounding it, which doubles the error.
    factor = 4 if INTERPRETED and got.dtype == torch.bfloat16 else 2
    unit = torch.finfo(got.dtype).eps if floor is None else floor
    errors = (got.double() - exact).abs()
    assert not errors.isnan().any(), "the kernel returned NaN"
    allowed = factor * (twin.double() - exact).abs().max() + unit * exact.abs().max()
    worst = errors.max()
    at = tuple(int(i) for i in torch.unravel_index(errors.argmax(), errors.shape))
    assert worst <= allowed, (
        f"error {worst:.3g} at {at} (got {got[at].item():.6g}, exact {exact[at].item():.6g}); "
        f"allowed {allowed:.3g}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step to attend to. ``wide_pages`` holds the same numbers as ``pages``, in fp64."""

    query: torch.Tensor
    pages: KvPages
    wide_pages: KvPages
    batch: AttentionBatch
    tables: list[list[int]]


@pytest.fixture
def make_step(device: torch.device) -> Callable[..., Step]:
    """Random queries, keys and values, in pages that lie in random order."""

    def make(
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        dtype: torch.dtype = torch.float16,
        stored: torch.dtype | None = None,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (64, 64),
        block_size: int = 16,
    ) -> Step:
        generator = torch.Generator().manual_seed(7)
        counts = [-(-context // block_size) for context in context_lens]
        order = torch.randperm(sum(counts) + 1, generator=generator).tolist()
        tables = [[order.pop() for _ in range(count)] for count in counts]

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        shape = (sum(counts) + 1, block_size, heads[1])
        pages, wide = _pages(
            randn(*shape, dims[0]), randn(*shape, dims[1]), dtype if stored is None else stored
        )
        return Step(
            query=randn(sum(query_lens), heads[0], dims[0]).to(dtype),
            pages=pages,
            wide_pages=wide,
            batch=AttentionBatch.build(
                query_lens=query_lens,
                context_lens=context_lens,
                block_tables=tables,
                block_size=block_size,
                device=device,
            ),
            tables=tables,
        )

    return make


def _pages(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[KvPages, KvPages]:
    """Pages of ``dtype``, and what they hold in fp64."""
    if dtype not in LARGEST:
        plain = KvPages(k=k.to(dtype), v=v.to(dtype))
        return plain, KvPages(k=plain.k.double(), v=plain.v.double())
    (k, k_scale), (v, v_scale) = (
        (values.view(x.shape), scale.view(x.shape[:-1]))
        for x, (values, scale) in ((x, quantize_kv(x.flatten(0, 1), dtype)) for x in (k, v))
    )
    return KvPages(k=k, v=v, k_scale=k_scale, v_scale=v_scale), KvPages(
        k=k.double() * k_scale.double()[..., None], v=v.double() * v_scale.double()[..., None]
    )
