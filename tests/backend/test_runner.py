"""The runner's own promises: a KV pool costs memory only where it is written to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fullbore_backend.kernels import select_ops
from fullbore_backend.models import build_model
from fullbore_backend.runner import Runner

STATM = Path("/proc/self/statm")


@pytest.mark.skipif(not STATM.exists(), reason="reads Linux's account of this process")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_unused_pool_takes_no_memory_and_reads_as_zeros(dtype: torch.dtype) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    model = build_model(config, select_ops(torch.device("cpu")))
    before = resident()
    runner = Runner(
        model, num_blocks=2**17, block_size=16, kv_dtype=dtype, device=torch.device("cpu")
    )
    pool = sum(pages.nbytes for pages in runner.pages)
    assert pool >= 2**30
    assert resident() - before < pool // 8
    assert {pages.k.dtype for pages in runner.pages} == {dtype}
    assert not runner.pages[1].k[::4096].any()


def resident() -> int:
    """Bytes of memory that this process occupies."""
    return int(STATM.read_text().split()[1]) * 4096
