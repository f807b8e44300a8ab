"""The C++ decoder against its torch twin, on each of the instruction sets it has code for."""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fullbore_backend.errors import ConfigError
from fullbore_backend.kernels import AttentionBatch, KvPages, Ops
from fullbore_backend.kernels.cpu import build, linear_packed_torch, load_library, pack_weight
from fullbore_backend.kernels.cpu.program import interleave
from fullbore_backend.layers.linear import Linear
from fullbore_backend.models import Decoder, build_model
from fullbore_backend.models.cpu_decoder import CpuDecoder, reason_against

CPU = torch.device("cpu")
# What the compiler is told: this machine's own, AVX2 without VNNI, and neither.
MACHINES = {"native": build.NATIVE, "avx2": "-march=x86-64-v3", "plain": "-march=x86-64"}
BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 192,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "own head, ragged sizes": {
        "vocab_size": 301,
        "hidden_size": 48,
        "intermediate_size": 70,
        "tie_word_embeddings": False,
    },
    "biases": {"model_type": "qwen2", "head_dim": 32},
    "norms of heads": {"model_type": "qwen3", "head_dim": 128},
    "a window": {"model_type": "mistral", "sliding_window": 9},
    "heads of 80": {"head_dim": 80, "num_attention_heads": 4, "num_key_value_heads": 4},
    "heads of 96": {"head_dim": 96, "num_attention_heads": 5, "num_key_value_heads": 1},
    "heads of 256": {"head_dim": 256, "num_attention_heads": 3, "num_key_value_heads": 1},
    "heads of 16": {"head_dim": 16, "num_attention_heads": 7, "num_key_value_heads": 1},
}
# Codes that rounding moves to the neighbour: the twin's sums are in another order.
ALLOWED = 0.01


def runs(machine: str) -> bool:
    """Whether this processor has what code for `machine` uses."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    info = Path("/proc/cpuinfo")
    return machine == "plain" or (info.exists() and " avx2 " in info.read_text())


@pytest.fixture(params=MACHINES)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    if request.param != "native" and not runs(request.param):
        pytest.skip("another kind of processor")
    found = load_library(MACHINES[request.param])
    assert found is not None, "the tests need a C++ compiler"
    return found


@pytest.fixture
def native() -> ctypes.CDLL:
    found = load_library()
    assert found is not None, "the tests need a C++ compiler"
    return found


def decoder(config: Mapping[str, Any], ops: Ops) -> Decoder:
    """With weights that are the same each time."""
    model = build_model({**BASE, **config}, ops)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1, generator=generator)
    for module in model.modules():
        if isinstance(module, Linear):
            for part, rows in enumerate(module.parts):
                weight = 0.1 * torch.randn(rows, module.inputs, generator=generator)
                module.load(part, "weight", weight)
            module.pack()
    if model.head is None:
        model.tied_head = model.ops.pack_linear(model.embedding.data)
        if ops.linear is linear_packed_torch:  # tokens are looked up in the head
            model.embedding.data = model.tied_head.dequantize()
    elif ops.linear is linear_packed_torch:
        model.embedding.data = model.embedding.data.bfloat16().float()
    model.init_rotary(64)
    return model


def twin(config: Mapping[str, Any]) -> Decoder:
    return decoder(config, Ops(pack_linear=pack_weight, linear=linear_packed_torch))


def cpu_decoder(config: Mapping[str, Any], library: ctypes.CDLL, threads: int = 2) -> CpuDecoder:
    made = CpuDecoder(decoder(config, Ops()), library, threads=threads)
    made.init_rotary(64)
    return made


def conversation(
    model: Decoder | CpuDecoder, dtype: torch.dtype = torch.float32
) -> Iterator[torch.Tensor]:
    """Logits of every token of steps that mix prompts, pieces of prompts and single tokens."""
    kv = model.kv
    pages = [
        KvPages.zeros(
            *(32, 8, kv.kv_heads), k_dim=kv.k_dim, v_dim=kv.v_dim, dtype=dtype, device=CPU
        )
        for _ in range(kv.layers)
    ]
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(32, generator=generator).tolist()
    tables = [order[10 * i : 10 * i + 8] for i in range(3)]
    lengths = [0, 0, 0]
    for new in ([1, 5, 21], [1, 1, 9], [1, 1, 1], [7, 1, 2]):
        turn = sorted(range(3), key=lambda i: (new[i], lengths[i] + new[i]))
        ends = [lengths[i] + new[i] for i in range(3)]
        batch = AttentionBatch.build(
            query_lens=[new[i] for i in turn],
            context_lens=[ends[i] for i in turn],
            block_tables=[tables[i] for i in turn],
            block_size=8,
            device=CPU,
        )
        ids = torch.randint(0, model.vocab_size, (sum(new),), generator=generator)
        positions = torch.cat([torch.arange(lengths[i], ends[i]) for i in turn])
        yield model(ids, positions, torch.arange(sum(new)), pages, batch).clone()
        lengths = ends


def difference(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    a, b = torch.cat(list(got)), torch.cat(list(want))
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_its_twin_does(
    name: str, dtype: torch.dtype, library: ctypes.CDLL
) -> None:
    got = list(conversation(cpu_decoder(MODELS[name], library), dtype))
    want = list(conversation(twin(MODELS[name]), dtype))
    assert difference(got, want) <= ALLOWED


def test_it_is_near_the_model_in_fp32(native: ctypes.CDLL) -> None:
    got = list(conversation(cpu_decoder({}, native)))
    assert difference(got, list(conversation(decoder({}, Ops())))) <= 0.04


def test_the_number_of_threads_changes_no_bit(native: ctypes.CDLL) -> None:
    runs = [list(conversation(cpu_decoder({}, native, threads))) for threads in (1, 2, 3)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_a_token_does_not_depend_on_its_neighbours(native: ctypes.CDLL) -> None:
    """Of single tokens, bit by bit: how many there are decides how products are cut."""
    model = cpu_decoder({}, native)

    def step(sequences: Sequence[int]) -> torch.Tensor:
        pages = [
            KvPages.zeros(64, 8, 2, k_dim=64, v_dim=64, dtype=torch.bfloat16, device=CPU)
            for _ in range(2)
        ]
        batch = AttentionBatch.build(
            query_lens=[1] * len(sequences),
            context_lens=[1] * len(sequences),
            block_tables=[[i] for i in range(len(sequences))],
            block_size=8,
            device=CPU,
        )
        ids, count = torch.tensor(sequences), len(sequences)
        return model(ids, torch.zeros_like(ids), torch.arange(count), pages, batch).clone()

    many = step(range(20, 57))
    for at in (0, 5, 36):
        assert torch.equal(step([20 + at])[0], many[at])


def test_only_the_wanted_rows(native: ctypes.CDLL) -> None:
    model = cpu_decoder({}, native)
    pages = [
        KvPages.zeros(8, 8, 2, k_dim=64, v_dim=64, dtype=torch.float32, device=CPU)
        for _ in range(2)
    ]
    batch = AttentionBatch.build(
        query_lens=[5], context_lens=[5], block_tables=[[3]], block_size=8, device=CPU
    )
    ids, positions = torch.arange(5), torch.arange(5)
    every = model(ids, positions, torch.arange(5), pages, batch).clone()
    some = model(ids, positions, torch.tensor([4, 1]), pages, batch)
    assert torch.equal(some, every[[4, 1]])
    assert model(ids, positions, torch.empty(0, dtype=torch.int64), pages, batch).shape == (0, 300)


def test_pages_it_cannot_read_are_refused(native: ctypes.CDLL) -> None:
    with pytest.raises(ConfigError, match="float16"):
        list(conversation(cpu_decoder({}, native), torch.float16))


@pytest.mark.parametrize("shape", [(32, 64), (1, 1), (70, 200), (33, 576)])
def test_a_weight_comes_back(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.0
    packed = pack_weight(weight)
    back = packed.dequantize()
    assert back.shape == weight.shape
    groups = torch.nn.functional.pad(weight, (0, -shape[1] % 64)).view(shape[0], -1, 64)
    step = groups.abs().amax(-1) / 127
    allowed = step.repeat_interleave(64, 1)[:, : shape[1]] * 0.51
    assert ((back - weight).abs() <= allowed + 1e-9).all()


def test_gate_and_up_lie_in_turn() -> None:
    rows = torch.arange(40.0).view(40, 1)  # gate 0 to 19, up 20 to 39
    turned = interleave(rows, 20)[:, 0].tolist()
    assert turned[:16] == list(range(16))
    assert turned[16:32] == list(range(20, 36))
    assert turned[32:48] == [16, 17, 18, 19] + [0] * 12


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"head_dim": 48}, "48 dimensions"),
        ({"hidden_size": 40}, "hidden size is 40"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 32},
            "dense",
        ),
    ],
)
def test_what_it_cannot_run_is_known_beforehand(config: dict[str, Any], message: str) -> None:
    reason = reason_against(build_model({**BASE, **config}, Ops()))
    assert reason is not None
    assert message in reason


def test_without_a_compiler_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    with caplog.at_level(logging.WARNING):
        assert load_library("-DNO_SUCH_BUILD") is None
    assert "torch's own operations" in caplog.text
    assert not list(tmp_path.rglob("*.so"))


def test_what_was_compiled_is_found_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO):
        assert load_library.__wrapped__("-O0") is not None
        assert "compiled in" in caplog.text
        caplog.clear()
        assert load_library.__wrapped__("-O0") is not None
        assert "compiled in" not in caplog.text
    assert len(list(tmp_path.rglob("*.so"))) == 1
