"""Every model against transformers': tiny random weights, saved by it and read by us.

Logits obey the rule of the kernels: our largest error against transformers in fp64 is at most twice
that of transformers in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fullbore_backend.errors import ModelError
from fullbore_backend.kernels import AttentionBatch, KvPages, Ops, select_ops
from fullbore_backend.models import MODELS, Decoder, build_model
from fullbore_backend.weights import open_checkpoint

CPU = torch.device("cpu")
BLOCK = 4
VOCAB = 61
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "deepseek": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "gpt_oss": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}


def rope(kind: str, theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {**ROPES.get(kind, {"rope_type": kind}), "rope_theta": theta} | more}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama, own head_dim": ("llama", {"head_dim": 12}),
    "llama, rope linear": ("llama", rope("linear")),
    "llama, rope llama3": ("llama", rope("llama3")),
    "llama, rope yarn": ("llama", rope("yarn")),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2, window from layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, biases, window": (
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**MOE, "num_experts": 8, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3_moe, some layers dense, weights as they are": (
        "qwen3_moe",
        {**MOE, "num_experts": 4, "mlp_only_layers": [0], "norm_topk_prob": False},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma3, caps": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "head_dim": 16,
            **rope("gpt_oss", 150_000.0),
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **MOE,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "head_dim": 16,
            "attention_bias": True,
            **rope("default", partial_rotary_factor=0.5),
        },
    ),
    "deepseek_v3": ("deepseek_v3", {**MOE, **MLA, "q_lora_rank": 20}),
    "deepseek_v3, no query latent": ("deepseek_v3", {**MOE, **MLA, "q_lora_rank": None}),
    "deepseek_v3, rope yarn": (
        "deepseek_v3",
        {**MOE, **MLA, "q_lora_rank": 20, **rope("deepseek")},
    ),
}


def theirs(variant: str) -> Any:
    """transformers' model of a variant."""
    return random_weights(*VARIANTS[variant])


def random_weights(model_type: str, changes: dict[str, Any]) -> Any:
    """transformers' model, every weight and bias random."""
    config = transformers.AutoConfig.for_model(model_type, **{**BASE, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    return model.eval()


def load(folder: Path, ops: Ops | None = None) -> Decoder:
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint.config, ops or select_ops(CPU))
    model.load(checkpoint.tensors(dtype=torch.float32))
    model.init_rotary(128)
    return model


def run_paged(model: Decoder, prompts: list[list[int]], chunk: int) -> list[torch.Tensor]:
    """All logits of each prompt, its tokens taken ``chunk`` at a time, all prompts side by side."""
    kv = model.kv
    shape = (64, BLOCK, kv.kv_heads)
    pages = [
        KvPages(k=torch.zeros(*shape, kv.k_dim), v=torch.zeros(*shape, kv.v_dim))
        for _ in range(kv.layers)
    ]
    free = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[free.pop() for _ in range(-(-len(p) // BLOCK))] for p in prompts]
    out: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        live = [i for i, p in enumerate(prompts) if start < len(p)]
        live.sort(key=lambda i: min(chunk, len(prompts[i]) - start))
        pieces = [prompts[i][start : start + chunk] for i in live]
        batch = AttentionBatch.build(
            query_lens=[len(piece) for piece in pieces],
            context_lens=[start + len(piece) for piece in pieces],
            block_tables=[tables[i] for i in live],
            block_size=BLOCK,
            device=CPU,
        )
        tokens = torch.tensor([token for piece in pieces for token in piece])
        positions = torch.tensor([start + at for piece in pieces for at in range(len(piece))])
        with torch.inference_mode():
            logits = model(tokens, positions, torch.arange(len(tokens)), pages, batch)
        for i, part in zip(live, logits.split([len(piece) for piece in pieces]), strict=True):
            out[i].append(part)
    return [torch.cat(parts) for parts in out]


PROMPTS = [[(7 * i + 3 * j * j) % VOCAB for j in range(size)] for i, size in enumerate((1, 9, 40))]


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder as transformers saves it, with its logits in fp32 and in fp64."""
    model = theirs(request.param)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    with torch.inference_mode():
        narrow = [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
        model.double()
        exact = [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    return folder, narrow, exact


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_logits_are_as_exact_as_transformers(pair: Any, chunk: int) -> None:
    """Through pages and chunks, prompts side by side."""
    folder, narrow, exact = pair
    for got, twin, want in zip(run_paged(load(folder), PROMPTS, chunk), narrow, exact, strict=True):
        assert got.shape == want.shape
        allowed = 2 * (twin.double() - want).abs().max() + 1e-6 * want.abs().max()
        assert (got.double() - want).abs().max() <= allowed


def test_gemma3_caps_its_scores(tmp_path: Path) -> None:
    """transformers' Gemma 3 leaves the cap to the caller; its attention knows how."""
    variant = VARIANTS["gemma3"]
    capped = (variant[0], variant[1] | {"attn_logit_softcapping": 0.5})
    model = random_weights(*capped)
    model.save_pretrained(tmp_path)
    ids = torch.tensor([PROMPTS[-1]])
    with torch.inference_mode():
        want, uncapped = model(ids, softcap=0.5).logits[0], model(ids).logits[0]
    (got,) = run_paged(load(tmp_path), [PROMPTS[-1]], 7)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert (uncapped - want).abs().max() > 0.01


def test_every_model_is_tested() -> None:
    assert {model_type for model_type, _ in VARIANTS.values()} == set(MODELS)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'mamba' is not supported; known are deepseek_v3, gemma"):
        build_model({"model_type": "mamba"}, select_ops(CPU))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks 1 tensors, among them model.norm.weight"),
        (lambda t: t.update({"model.layers.0.x.weight": torch.ones(1)}), "no place for"),
        (lambda t: t.update({"model.layers.3.x.weight": torch.ones(1)}), "no place for"),
        (lambda t: t.update({"model.norm.weight": torch.ones(5)}), r"shape of \(5,\)"),
        (
            lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.ones(32, 47)}),
            r"'model.layers.0.mlp.down_proj.weight' .* \(32, 47\)",
        ),
    ],
    ids=["missing", "unknown", "a layer too many", "norm shape", "linear shape"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    tensors = dict(theirs("llama").state_dict())
    change(tensors)
    with pytest.raises(ModelError, match=message):
        build_model(BASE | {"model_type": "llama"}, select_ops(CPU)).load(tensors.items())


def test_layers_that_predict_further_tokens_are_passed_over() -> None:
    """As many as the configuration names; one too many without it is refused above."""
    tensors = dict(theirs("llama").state_dict()) | {"model.layers.3.eh_proj.weight": torch.ones(2)}
    config = BASE | {"model_type": "llama", "num_nextn_predict_layers": 1}
    build_model(config, select_ops(CPU)).load(tensors.items())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "hidden_act": "gelu"}, "gelu"),
        ({"model_type": "gemma3_text"}, "gelu_pytorch_tanh"),
        ({"model_type": "deepseek_v3"}, "lacks 'qk_nope_head_dim'"),
    ],
    ids=["activation", "gemma's activation", "a missing size"],
)
def test_a_configuration_we_cannot_run_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model({**BASE, **config}, select_ops(CPU))
