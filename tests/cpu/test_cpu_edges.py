"""The C++ step where numbers are extreme and contexts long: against its torch twin."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fullbore_backend.kernels import AttentionBatch, KvPages, Ops
from fullbore_backend.kernels.cpu import linear_packed_torch, load_library, pack_weight
from fullbore_backend.layers.linear import Linear
from fullbore_backend.models import Decoder, build_model
from fullbore_backend.models.cpu_decoder import CpuDecoder

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
MACHINES = ["-march=native", "-march=x86-64"]


@pytest.fixture(params=MACHINES)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    found = load_library(request.param)
    if found is None:
        pytest.skip("no compiler for it")
    return found


def decoder(ops: Ops, scale: float = 0.1) -> Decoder:
    """Weights that are the same each time; ``scale`` is how large they are."""
    model = build_model(CONFIG, ops)
    generator = torch.Generator().manual_seed(1)
    model.embedding.data.normal_(generator=generator)
    model.embedding.data = model.embedding.data.bfloat16().float()
    for module in model.modules():
        if isinstance(module, Linear):
            for part, rows in enumerate(module.parts):
                weight = scale * torch.randn(rows, module.inputs, generator=generator)
                module.load(part, "weight", weight)
            module.pack()
    for name, parameter in model.named_parameters():
        if name.endswith("norm"):
            parameter.data.fill_(1.0)
    model.init_rotary(256)
    return model


def twin(scale: float = 0.1) -> Decoder:
    return decoder(Ops(pack_linear=pack_weight, linear=linear_packed_torch), scale)


def in_cpp(library: ctypes.CDLL, scale: float = 0.1) -> CpuDecoder:
    made = CpuDecoder(decoder(Ops(), scale), library, threads=2)
    made.init_rotary(256)
    return made


def pages(block_size: int, dtype: torch.dtype = torch.float32) -> list[KvPages]:
    return [
        KvPages.zeros(
            *(256 // block_size + 1, block_size, 1), k_dim=32, v_dim=32, dtype=dtype, device=CPU
        )
    ]


def run(model: Decoder | CpuDecoder, steps: list[list[int]], cache: list[KvPages]) -> torch.Tensor:
    """One sequence in steps of so many tokens; the logits of every token."""
    size = cache[0].block_size
    blocks = list(range(len(cache[0].k)))[::-1]
    logits, done = [], 0
    for ids in steps:
        batch = AttentionBatch.build(
            query_lens=[len(ids)],
            context_lens=[done + len(ids)],
            block_tables=[blocks],
            block_size=size,
            device=CPU,
        )
        positions = torch.arange(done, done + len(ids))
        rows = torch.arange(len(ids))
        logits.append(model(torch.tensor(ids), positions, rows, cache, batch).clone())
        done += len(ids)
    return torch.cat(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
def test_long_contexts(library: ctypes.CDLL, block_size: int, dtype: torch.dtype) -> None:
    """Longer than what is fetched ahead, in pages that no vector fits."""
    ids = torch.randint(0, 64, (171,), generator=torch.Generator().manual_seed(0)).tolist()
    steps = [ids[:97], ids[97:98], ids[98:99], ids[99:140], *([each] for each in ids[140:])]
    got = run(in_cpp(library), steps, pages(block_size, dtype))
    want = run(twin(), steps, pages(block_size, dtype))
    assert (got - want).norm() <= 0.01 * want.norm()


def test_gates_beyond_the_range_of_exp(library: ctypes.CDLL) -> None:
    """silu(-200) is 0, although e^200 is not a number of fp32."""
    ids = list(range(40))
    want = run(twin(scale=8.0), [ids], pages(16))
    got = run(in_cpp(library, scale=8.0), [ids], pages(16))
    assert got.isfinite().all()
    assert (got - want).norm() <= 0.01 * want.norm()


def test_a_token_of_zeros(library: ctypes.CDLL) -> None:
    model = decoder(Ops())
    model.embedding.data[7] = 0.0
    made = CpuDecoder(model, library, threads=2)
    made.init_rotary(256)
    assert torch.equal(run(made, [[7]], pages(16)), torch.zeros(1, 64))


def test_nan_stays_nan(library: ctypes.CDLL) -> None:
    """A broken weight is seen, and does not become a plausible token."""
    model = decoder(Ops())
    model.embedding.data[7, 3] = torch.nan
    made = CpuDecoder(model, library, threads=2)
    made.init_rotary(256)
    assert run(made, [[7]], pages(16)).isnan().all()
    assert run(made, [[8]], pages(16)).isfinite().all()


def test_padding_is_not_stored(library: ctypes.CDLL) -> None:
    """A negative slot stands for a token that is no one's."""
    model, cache = in_cpp(library), pages(16)
    batch = AttentionBatch(
        slots=torch.tensor([-1, 5]),
        query_starts=torch.tensor([0, 1, 2], dtype=torch.int32),
        context_lens=torch.tensor([1, 1], dtype=torch.int32),
        block_table=torch.tensor([[1], [0]], dtype=torch.int32),
        max_query_len=1,
        max_context_len=1,
    )
    model(torch.tensor([3, 4]), torch.tensor([0, 0]), torch.arange(2), cache, batch)
    written = cache[0].k.flatten(0, 1).flatten(1).abs().amax(1).nonzero().flatten().tolist()
    assert written == [5]
