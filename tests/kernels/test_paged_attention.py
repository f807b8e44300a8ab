"""The Triton attention over pages against its torch twin, and how it is laid out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fullbore_backend.errors import ConfigError
from fullbore_backend.kernels.attention_batch import AttentionBatch
from fullbore_backend.kernels.kv_pages import KvPages, quantize_kv
from fullbore_backend.kernels.paged_attention import paged_attention_torch
from fullbore_backend.kernels.paged_attention_launch import paged_attention_triton
from fullbore_backend.kernels.paged_attention_tuning import choose_segments
from fullbore_backend.kernels.store_kv import store_kv_torch

MIXED = ([1, 1, 1, 3, 40, 7], [1, 130, 37, 3, 40, 90])
"""Query and context lengths: decodes, prefills from nothing, a chunk with a past."""

Check = Callable[..., torch.Tensor]


@pytest.fixture
def check(
    make_step: Callable[..., Any], assert_as_exact: Callable[..., None]
) -> Callable[..., torch.Tensor]:
    """Run the kernel on a random step and hold it to the rule; returns its result."""

    def run(
        lens: tuple[list[int], list[int]],
        *,
        dtype: torch.dtype = torch.float16,
        stored: torch.dtype | None = None,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (64, 64),
        block_size: int = 16,
        **options: Any,
    ) -> torch.Tensor:
        step = make_step(
            *lens, dtype=dtype, stored=stored, heads=heads, dims=dims, block_size=block_size
        )
        segments = {"segments": options.pop("segments")} if "segments" in options else {}
        options = {"scale": dims[0] ** -0.5, **options}
        got = paged_attention_triton(step.query, step.pages, step.batch, **options, **segments)
        twin = paged_attention_torch(step.query, step.pages, step.batch, **options)
        exact = paged_attention_torch(step.query.double(), step.wide_pages, step.batch, **options)
        assert_as_exact(got, twin, exact)
        return got

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_decodes_prefills_and_chunks_in_one_step(check: Check, dtype: torch.dtype) -> None:
    check(MIXED, dtype=dtype)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_head_dims(check: Check, dim: int) -> None:
    check(([1, 21], [70, 50]), dims=(dim, dim), heads=(2, 1))


def test_values_of_another_size_than_keys(check: Check) -> None:
    check(([1, 21], [70, 50]), dims=(64, 32))


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (20, 1), (40, 1)], ids=str)
def test_heads_that_share_a_kv_head(check: Check, heads: tuple[int, int]) -> None:
    """Also groups that are no power of two, and larger than a decode's block of rows."""
    check(([1, 1, 5], [9, 66, 30]), heads=heads)


@pytest.mark.parametrize("block_size", [1, 16, 48, 256])
def test_page_sizes(check: Check, block_size: int) -> None:
    """Smaller than a tile of keys, larger, and not a divisor of it."""
    check(([1, 21], [300, 50]), block_size=block_size)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_quantised_pages(check: Check, dtype: torch.dtype, stored: torch.dtype) -> None:
    check(MIXED, dtype=dtype, stored=stored)


def test_pages_wider_than_queries_and_narrower(check: Check) -> None:
    check(MIXED, dtype=torch.float16, stored=torch.float32)
    check(MIXED, dtype=torch.float32, stored=torch.float16)


@pytest.mark.parametrize("window", [1, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_window(check: Check, window: int, dtype: torch.dtype) -> None:
    check(MIXED, window=window, dtype=dtype)


@pytest.mark.parametrize("segments", [1, 3], ids="segments{}".format)
def test_cap_and_sinks(check: Check, segments: int, device: torch.device) -> None:
    sinks = torch.tensor([-1.0, 0.0, 2.0, 9.0], device=device)
    got = check(([1, 1, 7], [600, 5, 50]), soft_cap=2.0, sinks=sinks, segments=segments, window=520)
    assert got[:, 3].abs().max() < got[:, 0].abs().max()  # what a sink takes is missing


@pytest.mark.parametrize("segments", [2, 5, 64])
def test_split_keys(check: Check, segments: int) -> None:
    """More segments than there are keys for, sequences of one key, and queries longer than one."""
    check(([1, 1, 1, 4, 30], [1, 257, 1500, 700, 600]), segments=segments)


def test_split_and_quantised_and_windowed(check: Check) -> None:
    check(([1, 1, 9], [800, 20, 500]), segments=4, window=600, stored=torch.int8, heads=(6, 2))


def test_one_segment_does_not_depend_on_neighbours(make_step: Callable[..., Any]) -> None:
    """Unsplit, a sequence's result is the same to the last bit in any batch."""
    step = make_step([1, 1, 1], [700, 40, 300])
    together = paged_attention_triton(step.query, step.pages, step.batch, scale=0.1, segments=1)
    alone = AttentionBatch.build(
        query_lens=[1],
        context_lens=[700],
        block_tables=[step.tables[0]],
        block_size=16,
        device=step.query.device,
    )
    got = paged_attention_triton(step.query[:1], step.pages, alone, scale=0.1, segments=1)
    assert torch.equal(got, together[:1])


def test_queries_in_a_joint_projection(
    make_step: Callable[..., Any], assert_as_exact: Callable[..., None]
) -> None:
    """Rows that lie apart are read where they are; heads that do are copied."""
    step = make_step(*MIXED)
    want = paged_attention_triton(step.query, step.pages, step.batch, scale=0.1)
    wider = step.query.new_full((len(step.query), 8, 64), torch.nan)
    wider[:, :4] = step.query
    got = paged_attention_triton(wider[:, :4], step.pages, step.batch, scale=0.1)
    assert torch.equal(got, want)
    wider[:, ::2] = step.query
    got = paged_attention_triton(wider[:, ::2], step.pages, step.batch, scale=0.1)
    assert torch.equal(got, want)


def test_keys_and_values_of_a_layer_in_one_pool(make_step: Callable[..., Any]) -> None:
    """Pages may lie apart: here a block holds its keys and then its values."""
    step = make_step(*MIXED)
    want = paged_attention_triton(step.query, step.pages, step.batch, scale=0.1)
    pool = torch.stack((step.pages.k, step.pages.v), 1)
    apart = KvPages(k=pool[:, 0], v=pool[:, 1])
    assert torch.equal(paged_attention_triton(step.query, apart, step.batch, scale=0.1), want)


@pytest.mark.parametrize("lens", [([], []), ([0], [0])], ids=["no sequence", "no token"])
def test_nothing_to_do(make_step: Callable[..., Any], lens: tuple[list[int], list[int]]) -> None:
    step = make_step(*lens)
    for attend in (paged_attention_triton, paged_attention_torch):
        assert attend(step.query, step.pages, step.batch, scale=1.0).shape == (0, 4, 64)


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # the rows of padding are whatever memory held
@pytest.mark.parametrize("segments", [1, 2])
def test_buffers_of_a_graph(
    make_step: Callable[..., Any], assert_as_exact: Callable[..., None], segments: int
) -> None:
    """Maxima are bounds, and sequences at the end without new tokens are padding."""
    step = make_step([1, 1, 1], [5, 300, 17])
    device = step.query.device
    table = torch.zeros(5, 64, dtype=torch.int32, device=device)
    table[:3, : step.batch.block_table.shape[1]] = step.batch.block_table
    buffers = AttentionBatch(
        slots=torch.tensor([0, 0, 0, -1, -1], device=device),
        query_starts=torch.tensor([0, 1, 2, 3, 3, 3], dtype=torch.int32, device=device),
        context_lens=torch.tensor([5, 300, 17, 0, 0], dtype=torch.int32, device=device),
        block_table=table,
        max_query_len=1,
        max_context_len=1024,
    )
    query = torch.cat((step.query, torch.full_like(step.query[:2], torch.nan)))
    got = paged_attention_triton(query, step.pages, buffers, scale=0.1, segments=segments)
    twin = paged_attention_torch(query, step.pages, buffers, scale=0.1)
    exact = paged_attention_torch(step.query.double(), step.wide_pages, step.batch, scale=0.1)
    assert_as_exact(got[:3], twin[:3], exact)


def test_stale_pages_are_never_seen(make_step: Callable[..., Any]) -> None:
    """What lies behind a sequence's last token may be anything, NaN too."""
    step = make_step([1, 5], [17, 37])
    want = paged_attention_triton(step.query, step.pages, step.batch, scale=0.1)
    for table, context in zip(step.tables, (17, 37), strict=True):
        step.pages.k[table[-1], context % 16 :] = torch.nan
        step.pages.v[table[-1], context % 16 :] = torch.nan
    got = paged_attention_triton(step.query, step.pages, step.batch, scale=0.1)
    assert torch.equal(got, want)


def test_a_pool_beyond_32_bits(device: torch.device) -> None:
    """The last page of a pool of more than 2^31 elements, mapped but never filled on a CPU."""
    blocks = 2**31 // (16 * 64) + 2
    if device.type != "cpu":
        pytest.skip("maps memory without taking it, which only a CPU does")
    k = torch.empty(blocks, 16, 1, 64, dtype=torch.float16)
    pages = KvPages(k=k, v=torch.empty_like(k))
    pages.k[-1], pages.v[-1] = 1.0, 3.0
    batch = AttentionBatch.build(
        query_lens=[1],
        context_lens=[16],
        block_tables=[[blocks - 1]],
        block_size=16,
        device=device,
    )
    query = torch.ones(1, 1, 64, dtype=torch.float16)
    assert (paged_attention_triton(query, pages, batch, scale=0.1) == 3).all()


@pytest.mark.parametrize(
    ("programs", "keys", "decode", "want"),
    [
        (8, 32768, True, 29),  # one sequence: about as many programs as fit at once
        (128, 8192, True, 2),  # half a GPU: two waves become one
        (256, 8192, True, 1),  # full enough
        (2048, 8192, True, 1),
        (8, 300, True, 1),  # too little to share
        (16, 32768, False, 8),
        (132, 32768, False, 1),
    ],
)
def test_segments_fill_the_gpu(programs: int, keys: int, decode: bool, want: int) -> None:
    got = choose_segments(programs=programs, keys=keys, multiprocessors=132, decode=decode)
    assert got == want


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_quantised_rows_keep_their_scale(stored: torch.dtype) -> None:
    """Large and small rows are as exact as the format, padding is skipped, zeros stay zeros."""
    pages = KvPages(
        k=torch.zeros(2, 4, 1, 8).to(stored),
        v=torch.zeros(2, 4, 1, 8).to(stored),
        k_scale=torch.zeros(2, 4, 1),
        v_scale=torch.zeros(2, 4, 1),
    )
    key = torch.randn(4, 1, 8, generator=torch.Generator().manual_seed(0))
    key *= torch.tensor([1e-6, 1.0, 1e6, 0.0])[:, None, None]
    store_kv_torch(key, -key, pages, torch.tensor([5, -1, 0, 2]))
    assert pages.k_scale is not None
    got = (pages.k.float() * pages.k_scale[..., None]).view(8, 8)
    step = 2**-4 if stored == torch.float8_e4m3fn else 0.5 / 127
    for token, slot in ((0, 5), (2, 0), (3, 2)):
        largest = key[token].abs().max()
        assert ((got[slot] - key[token, 0]).abs() <= 1.01 * step * largest).all()
    assert not got[[1, 3, 4, 6, 7]].any()
    values, scale = quantize_kv(key, stored)
    assert values.dtype == stored
    assert scale.shape == (4, 1)


def test_scales_go_with_quantised_pages() -> None:
    plain = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ConfigError, match="int8 pages need k_scale"):
        KvPages(k=plain.to(torch.int8), v=plain.to(torch.int8))
    with pytest.raises(ConfigError, match="float32 pages take no k_scale"):
        KvPages(k=plain, v=plain, k_scale=plain[..., 0])
    with pytest.raises(ConfigError, match="use one dtype"):
        KvPages(k=plain, v=plain.half())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_steps(check: Check, seed: int, device: torch.device) -> None:
    """Every option against every other, drawn at random."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    query_lens = sorted(draw(1, 1, 2, 17, 70, 130) for _ in range(draw(1, 3, 7)))
    context_lens = [new + draw(0, 1, 15, 100, 700) for new in query_lens]
    kv_heads, group = draw(1, 2, 3), draw(1, 2, 3, 7, 8)
    dtype = draw(torch.float32, torch.float16, torch.bfloat16)
    check(
        (query_lens, context_lens),
        dtype=dtype,
        stored=draw(dtype, torch.float8_e4m3fn, torch.int8),
        heads=(kv_heads * group, kv_heads),
        dims=draw((64, 64), (80, 80), (128, 128), (192, 128), (256, 256)),
        block_size=draw(16, 32, 64, 256),
        window=draw(None, None, 5, 64, 300),
        soft_cap=draw(None, None, 3.0),
        sinks=draw(None, torch.randn(kv_heads * group, generator=generator).to(device)),
        segments=draw(None, 1, 2, 9),
    )
