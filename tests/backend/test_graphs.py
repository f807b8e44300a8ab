"""Decode through fixed buffers gives the tokens that it gives without them.

On a CPU nothing is captured: a replay computes anew from the same buffers, so what is tested here
is all but the capture, which the tests marked ``gpu`` add.
"""

from __future__ import annotations

import pytest
import torch

from fullbore_backend import Engine, EngineConfig, SamplingParams
from fullbore_backend.graphs import batch_sizes, eager_capture

CPU = EngineConfig(
    device="cpu", precision="fp32", kv_cache_bytes=2**25, max_num_seqs=6, max_num_batched_tokens=32
)


def test_batch_sizes_end_with_the_largest_and_pad_little() -> None:
    for largest in (1, 2, 5, 8, 64, 100, 256, 1000):
        sizes = batch_sizes(largest)
        assert sizes[-1] == largest
        assert list(sizes) == sorted(set(sizes))
        for count in range(8, largest + 1):
            size = next(size for size in sizes if size >= count)
            assert size - count < max(8, size / 4)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
def test_the_same_tokens_with_fixed_buffers(overlap: bool) -> None:
    """Prompts of many lengths: batches grow, shrink and mix with prompts in between."""
    prompts = [[1000 + 17 * i + j for j in range(size)] for i, size in enumerate((3, 40, 9, 1, 25))]
    params = [
        SamplingParams(temperature=0 if i % 2 else 0.9, seed=i, max_tokens=5 + 3 * i)
        for i in range(len(prompts))
    ]
    engine = Engine(CPU)
    want = [done.token_ids for done in engine.generate(prompts, params)]
    buffered = Engine(
        EngineConfig(
            device="cpu",
            precision="fp32",
            kv_cache_bytes=2**25,
            max_num_seqs=6,
            max_num_batched_tokens=32,
            overlap=overlap,
        )
    )
    buffered.runner.capture_graphs(largest=4, max_context_len=100, capture=eager_capture)
    assert [done.token_ids for done in buffered.generate(prompts, params)] == want


def test_padding_writes_nothing() -> None:
    """A step of three in a graph of four leaves every other slot of the cache alone."""
    engine = Engine(CPU)
    engine.runner.capture_graphs(largest=4, max_context_len=64, capture=eager_capture)
    graphs = engine.runner.graphs
    assert graphs is not None
    with torch.inference_mode():
        graphs.run([5, 6, 7], [0, 17, 3], [[9], [8, 2], [4]])
    written = {
        slot
        for page in range(20)
        for slot in range(16)
        if engine.runner.pages[0].k[page, slot].any()
        for slot in [page * 16 + slot]
    }
    assert written == {9 * 16, 2 * 16 + 1, 4 * 16 + 3}
