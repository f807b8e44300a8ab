"""Our Llama against transformers' on tiny random weights, through pages and chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from fullbore_backend.errors import ModelError
from fullbore_backend.kernels import AttentionBatch, select_ops
from fullbore_backend.layers.rotary import rotary_tables
from fullbore_backend.models.llama import Llama

CPU = torch.device("cpu")
BLOCK = 4
BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "multi-head": ("llama", {"num_key_value_heads": 4}),
    "own head_dim": ("llama", {"head_dim": 12}),
    "rope linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "rope llama3": ("llama", {"rope_scaling": LLAMA3_ROPE}),
    "rope yarn": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": 16}),
}


def pair(name: str) -> tuple[torch.nn.Module, Llama]:
    kind, changes = VARIANTS[name]
    settings = BASE | changes
    cls = transformers.LlamaConfig if kind == "llama" else transformers.MistralConfig
    hf_settings = dict(settings)
    theta, scaling = hf_settings.pop("rope_theta"), hf_settings.pop("rope_scaling", None)
    hf_settings["rope_parameters"] = {
        "rope_type": "default",
        **(scaling or {}),
        "rope_theta": theta,
    }
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        cls(**hf_settings), attn_implementation="eager"
    ).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = Llama.from_config(settings, select_ops(CPU))
    ours.load(theirs.state_dict().items())
    ours.init_rotary(128)
    return theirs, ours


def run_paged(model: Llama, prompts: list[list[int]], chunk: int) -> list[torch.Tensor]:
    """All logits of each prompt, its tokens taken ``chunk`` at a time, all prompts side by side."""
    layers, kv_heads, head_dim = model.kv_shape()
    shape = (64, BLOCK, kv_heads, head_dim)
    cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(layers)]
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
            windows=model.windows,
        )
        tokens = [token for piece in pieces for token in piece]
        positions = [start + at for piece in pieces for at in range(len(piece))]
        with torch.inference_mode():
            logits = model(
                torch.tensor(tokens),
                torch.tensor(positions),
                torch.arange(len(tokens)),
                cache,
                batch,
            )
        for i, part in zip(live, logits.split([len(piece) for piece in pieces]), strict=True):
            out[i].append(part)
    return [torch.cat(parts) for parts in out]


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, chunk: int) -> None:
    theirs, ours = pair(variant)
    prompts = [[(7 * i + 3 * j * j) % 61 for j in range(size)] for i, size in enumerate((1, 9, 40))]
    for prompt, got in zip(prompts, run_paged(ours, prompts, chunk), strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)


def test_unknown_rope_scaling_is_refused() -> None:
    with pytest.raises(ModelError, match="rope scaling 'ntk-by-ear'"):
        rotary_tables(head_dim=8, max_positions=4, theta=1e4, scaling={"rope_type": "ntk-by-ear"})


def test_factors_divide_the_frequencies() -> None:
    cos, _ = rotary_tables(
        head_dim=4,
        max_positions=3,
        theta=100.0,
        scaling={"rope_type": "factors", "factors": [1.0, 4.0]},
    )
    want = torch.outer(torch.arange(3.0), torch.tensor([1.0, 0.1 / 4])).cos()
    torch.testing.assert_close(cos, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks 1 tensors, among them model.norm.weight"),
        (lambda t: t.update({"model.layers.9.x.weight": torch.ones(1)}), "no place for"),
        (lambda t: t.update({"model.norm.weight": torch.ones(5)}), r"shape \(5,\)"),
        (
            lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.ones(32, 47)}),
            r"\(32, 47\) does not fit",
        ),
    ],
    ids=["missing", "unknown", "norm shape", "linear shape"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    theirs, _ = pair("plain")
    tensors = dict(theirs.state_dict())
    change(tensors)
    with pytest.raises(ModelError, match=message):
        Llama.from_config(BASE, select_ops(CPU)).load(tensors.items())


def test_an_activation_we_do_not_have_is_refused() -> None:
    with pytest.raises(ModelError, match="gelu"):
        Llama.from_config(BASE | {"hidden_act": "gelu"}, select_ops(CPU))
