"""A KV cache narrower than the activations: its size, and what it changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fullbore_backend import Engine, EngineConfig, SamplingParams
from fullbore_backend.config import KvPrecision
from fullbore_backend.evaluate.scoring import Scorer

TEXT = b"The rabbit ran. Alice ran after it, down and down and down, and never looked back."
# Each layer keeps 2 heads of 8 keys and 8 values.
BYTES: dict[KvPrecision, int] = {"auto": 128, "bf16": 64, "fp16": 64, "fp8": 48, "int8": 48}
# The largest change of a log-probability: a random model is far more easily moved than a real one.
ALLOWED: dict[KvPrecision, float] = {
    "auto": 1e-4,
    "bf16": 0.2,
    "fp16": 0.03,
    "fp8": 1.5,
    "int8": 0.4,
}


def engine_of(folder: Path, precision: KvPrecision) -> Engine:
    return Engine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            precision="fp32",
            kv_precision=precision,
            block_size=8,
            kv_cache_bytes=2 * 8 * 64 * BYTES[precision],
        )
    )


@pytest.mark.parametrize("precision", BYTES)
def test_pages_are_that_small_and_nearly_as_good(byte_model: Path, precision: KvPrecision) -> None:
    engine = engine_of(byte_model, precision)
    assert engine.scheduler.blocks.num_blocks == 64
    assert sum(pages.nbytes for pages in engine.runner.pages) == 2 * 8 * 64 * BYTES[precision]
    exact = Scorer(engine_of(byte_model, "auto").runner).logprobs(list(TEXT))
    got = Scorer(engine.runner).logprobs(list(TEXT))
    change = (torch.tensor(got) - torch.tensor(exact)).abs().max().item()
    assert change <= ALLOWED[precision]
    assert (change > 0) == (precision != "auto")


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_requests_run_on_it(byte_model: Path, precision: KvPrecision) -> None:
    """With cached prefixes: what was stored is read back as it was."""
    engine = engine_of(byte_model, precision)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    first, again = (engine.generate([list(TEXT[:40])], params)[0] for _ in range(2))
    assert again.num_cached > 0
    assert again.token_ids == first.token_ids
