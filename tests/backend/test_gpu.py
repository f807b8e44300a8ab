"""The engine on a GPU: the right tokens from every architecture, and nothing left behind.

Run by `nox -s gpu`, or `python bench/gpu_check.py` where only torch, triton, transformers and
pytest are installed: so no fixture of this folder is used. Without a GPU the same tests run on the
CPU, which shows that they work and nothing more.
"""

from __future__ import annotations

import gc
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from fullbore_backend import Completion, Engine, EngineConfig, SamplingParams
from fullbore_backend.graphs import eager_capture
from fullbore_backend.kernels import AttentionBatch

pytestmark = pytest.mark.gpu

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
VOCAB = 64
STEPS = 32
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_shared_experts": 1}
SLIDING = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma3_text": SLIDING,
    "gpt_oss": SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": MOE | {"num_experts": 8},
    "glm4_moe": MOE | {"n_routed_experts": 8, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **MOE,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "olmo2": {"head_dim": 16},  # has no module of ours: transformers' code on our cache
}
CAPTURED = ("qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3")
GREEDY = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)


def save(model_type: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with random weights, rounded to ``dtype`` and saved in it."""
    config = transformers.AutoConfig.for_model(model_type, **{**BASE, **ARCHITECTURES[model_type]})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.to(dtype).save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model.eval()


def settings(folder: Path, **changes: Any) -> EngineConfig:
    """A small engine: prompts are cut into chunks, and decodes run beside them."""
    return EngineConfig(
        model=str(folder),
        precision="fp32",
        max_num_seqs=8,
        max_num_batched_tokens=48,
        kv_cache_bytes=2**22,
        **changes,
    )


def prompts() -> list[list[int]]:
    """Short and long, some with a common beginning, one that comes twice."""
    first, second = ([(5 * i * i + shift) % VOCAB for i in range(40)] for shift in (1, 2))
    return [[*first, 3], [*first, 7, 9], second * 4, second + [11] * 9, [4, 4, 8], [*first, 3]]


def tokens_of(done: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in done]


def logits_after(model: Any, prompt: list[int], generated: tuple[int, ...]) -> torch.Tensor:
    """What each of the generated tokens was chosen from, if chosen by ``model``; in fp64."""
    ids = torch.tensor([[*prompt, *generated[:-1]]])
    with torch.inference_mode():
        logits: torch.Tensor = model(ids).logits[0, len(prompt) - 1 :]
    return logits.double()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_token_is_the_likeliest(model_type: str, precision: Any, tmp_path: Path) -> None:
    """By transformers in fp64, as far as rounding lets anyone tell.

    Logits may be off by twice what those of transformers are in the same precision, and a token may
    be chosen whose logit is below the best by the errors of both. In fp32 the tokens are those that
    transformers generates.
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = save(model_type, tmp_path, dtype)
    config = replace(settings(tmp_path), precision=precision, kv_cache_bytes=2**20)
    done = tokens_of(Engine(config).generate(prompts(), GREEDY))
    narrow = [logits_after(model, *each) for each in zip(prompts(), done, strict=True)]
    model.double()
    exact = [logits_after(model, *each) for each in zip(prompts(), done, strict=True)]
    error = max(float((a - b).abs().max()) for a, b in zip(narrow, exact, strict=True))
    for tokens, logits in zip(done, exact, strict=True):
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        below = logits.amax(1) - chosen
        assert float(below.max()) <= 4 * error + 1e-5, f"token {int(below.argmax())}"


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("model_type", CAPTURED)
def test_graphs_and_overlap_change_no_token(
    model_type: str, graphs: bool, overlap: bool, tmp_path: Path
) -> None:
    """Greedy and drawn, in a pool so small that some are preempted; against transformers."""
    model = save(model_type, tmp_path)
    engine = Engine(settings(tmp_path, graphs=graphs, overlap=overlap))
    if graphs and not ON_GPU:
        engine.runner.capture_graphs(largest=8, max_context_len=512, capture=eager_capture)
    drawn = SamplingParams(temperature=0.8, max_tokens=STEPS, ignore_eos=True)
    params = [GREEDY if i % 2 else replace(drawn, seed=i) for i in range(len(prompts()))]
    done = tokens_of(engine.generate(prompts(), params))
    for prompt, tokens, each in zip(prompts(), done, params, strict=True):
        if each is GREEDY:
            ids = torch.tensor([prompt])
            want = model.generate(ids, max_new_tokens=STEPS, do_sample=False, use_cache=True)
            assert tokens == tuple(want[0, len(prompt) :].tolist())
    assert tokens_of(engine.generate(prompts(), params)) == done, "seeds give the same again"


@pytest.mark.parametrize("kv_precision", ["bf16", "fp8", "int8"])
def test_narrow_caches_give_again_what_they_were_given(kv_precision: Any, tmp_path: Path) -> None:
    """A cached prefix is read as it was stored, and much of the text is the same as in full."""
    save("qwen3", tmp_path)
    full = tokens_of(Engine(settings(tmp_path)).generate(prompts(), GREEDY))
    engine = Engine(settings(tmp_path, kv_precision=kv_precision))
    first, again = (tokens_of(engine.generate(prompts(), GREEDY)) for _ in range(2))
    assert again == first
    assert engine.stats().prefix_cache_hits > 0
    same = [a[0] == b[0] for a, b in zip(first, full, strict=True)]
    assert sum(same) >= len(same) / 2


def test_nothing_is_left_of_requests_that_ended_or_were_cancelled(tmp_path: Path) -> None:
    """After 200 requests, half of them cancelled at any moment: all blocks, and all memory."""
    save("qwen3", tmp_path)
    engine = Engine(settings(tmp_path, max_waiting=256))
    engine.warm_up()
    load(engine, 40, random.Random(0))
    before = allocated()
    load(engine, 200, random.Random(1))
    stats = engine.stats()
    assert stats.num_blocks_used == 0
    assert stats.num_running == stats.num_waiting == stats.num_paused == 0
    assert stats.requests_finished["cancelled"] > 50
    assert allocated() == before


def load(engine: Engine, count: int, rng: random.Random) -> None:
    """Requests of many kinds, of which every other is cancelled on the way."""
    params = [
        GREEDY,
        SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True),
        SamplingParams(top_p=0.8, top_k=20, max_tokens=7, frequency_penalty=0.5, logprobs=2),
    ]
    for index in range(count):
        ids = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 100))]
        engine.add(f"r{index}", ids, params[index % 3])
    doomed = [f"r{index}" for index in range(0, count, 2)]
    rng.shuffle(doomed)
    while engine.has_work():
        engine.step()
        if doomed and rng.random() < 0.8:
            engine.abort(doomed.pop())


def allocated() -> int:
    """Bytes of the device in use."""
    gc.collect()
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    return int(torch.cuda.memory_allocated())


@pytest.mark.parametrize("model_type", CAPTURED)
@torch.inference_mode()
def test_the_same_step_gives_the_same_bits(model_type: str, tmp_path: Path) -> None:
    """Fifty times, while another stream takes turns in disturbing the order of things."""
    save(model_type, tmp_path, torch.bfloat16)
    runner = Engine(replace(settings(tmp_path), precision="bf16")).runner
    steps = [
        step_of(runner.block_size, [1, 1, 1, 5, 70], [300, 17, 1, 40, 70]),
        step_of(runner.block_size, [1] * 7, [33, 160, 16, 250, 9, 64, 301]),
    ]
    for batch, ids, positions in steps:

        def run(batch: Any = batch, ids: Any = ids, positions: Any = positions) -> torch.Tensor:
            rows = torch.arange(len(ids), device=DEVICE)
            logits: torch.Tensor = runner.model(ids, positions, rows, runner.pages, batch)
            return logits

        want = run()
        assert want.isfinite().all()
        for turn in range(50):
            disturb(turn)
            assert torch.equal(run(), want)


def step_of(
    block_size: int, query_lens: list[int], context_lens: list[int]
) -> tuple[AttentionBatch, torch.Tensor, torch.Tensor]:
    """A step of sequences whose pages lie one behind the other; its ids, its positions."""
    tables, first = [], 0
    for context in context_lens:
        count = -(-context // block_size)
        tables.append(range(first, first + count))
        first += count
    spans = zip(query_lens, context_lens, strict=True)
    positions = [at for new, context in spans for at in range(context - new, context)]
    batch = AttentionBatch.build(
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=tables,
        block_size=block_size,
        device=DEVICE,
    )
    at = torch.tensor(positions, device=DEVICE)
    return batch, at * 7 % VOCAB, at


def disturb(turn: int) -> None:
    """Give the device something else to do, more or less of it."""
    if not ON_GPU:
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        noise = torch.randn(256 * (1 + turn % 8), 1024, device=DEVICE)
        (noise @ noise.T).sum()


SANITIZED = """
import torch
from fullbore_backend.kernels import AttentionBatch, KvPages, triton_ops

device, ops = torch.device("cuda"), triton_ops()
def randn(*shape): return torch.randn(*shape, device=device).bfloat16()
x = randn(5, 96)
ops.add_rms_norm(x, x, randn(96), 1e-6)
ops.silu_mul(randn(5, 200))
pages = KvPages(k=randn(40, 16, 2, 64), v=randn(40, 16, 2, 64))
batch = AttentionBatch.build(
    query_lens=[1, 1, 37], context_lens=[3, 500, 40],
    block_tables=[[0], list(range(1, 33)), [33, 34, 35]], block_size=16, device=device,
)
angle = torch.randn(39, 32, device=device)
query = ops.rope_store_kv(randn(39, 8, 64), angle.cos(), angle.sin(), pages, batch.slots, heads=4)
ops.paged_attention(query, pages, batch, scale=0.1)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.skipif(
    not (ON_GPU and shutil.which("compute-sanitizer")), reason="needs compute-sanitizer"
)
def test_kernels_neither_stray_nor_race(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor has an allocation of its own, so that reading beyond one is seen."""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    done = subprocess.run(
        [
            *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
            *(sys.executable, "-c", SANITIZED),
        ],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
