"""Models on the Triton kernels, in Triton's interpreter: as exact as transformers.

What has no kernel yet runs on its twin; what a model asks of the kernels is what counts here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fullbore_backend.kernels import AttentionBatch, KvPages, Ops, triton_ops
from fullbore_backend.models import build_model
from fullbore_backend.weights import open_checkpoint

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the tests of kernels run on the device"
)

CPU = torch.device("cpu")
BLOCK = 16
VOCAB = 61
LENGTHS = (3, 21)
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "gpt_oss": SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": MOE | {"num_experts": 4},
    "gemma3_text": SLIDING,
    "glm4_moe": MOE | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **MOE,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "head_dim": 4,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


def prompts() -> list[torch.Tensor]:
    """One token longer than :data:`LENGTHS`."""
    return [(7 * torch.arange(length + 1) ** 2 + length) % VOCAB for length in LENGTHS]


def run(folder: Path, ops: Ops) -> torch.Tensor:
    """All logits of the prompts side by side: all but the last token of each, then the last."""
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint.config, ops)
    model.load(checkpoint.tensors(dtype=torch.float32))
    model.init_rotary(64)
    kv, out = model.kv, []
    shape = (4, BLOCK, kv.kv_heads)
    pages = [
        KvPages(k=torch.zeros(*shape, kv.k_dim), v=torch.zeros(*shape, kv.v_dim))
        for _ in range(kv.layers)
    ]
    for starts, ends in (
        ((0, 0), LENGTHS),
        (LENGTHS, tuple(length + 1 for length in LENGTHS)),
    ):
        chunks = [range(start, end) for start, end in zip(starts, ends, strict=True)]
        batch = AttentionBatch.build(
            query_lens=[len(chunk) for chunk in chunks],
            context_lens=ends,
            block_tables=[[2], [3, 1]],
            block_size=BLOCK,
            device=CPU,
        )
        positions = torch.tensor([position for chunk in chunks for position in chunk])
        tokens = torch.cat([p[c.start : c.stop] for p, c in zip(prompts(), chunks, strict=True)])
        with torch.inference_mode():
            out.append(model(tokens, positions, torch.arange(len(tokens)), pages, batch))
    return torch.cat(out)


def theirs(model: Any) -> torch.Tensor:
    """What :func:`run` returns, of a model of transformers."""
    with torch.inference_mode():
        logits = [model(prompt[None]).logits[0] for prompt in prompts()]
    return torch.cat([each[:-1] for each in logits] + [each[-1:] for each in logits])


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_on_kernels_are_as_exact_as_transformers(model_type: str, tmp_path: Path) -> None:
    """Against transformers in fp64, our error is at most twice that of transformers in fp32."""
    config = transformers.AutoConfig.for_model(model_type, **{**BASE, **MODELS[model_type]})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.eval().save_pretrained(tmp_path)
    narrow, exact = theirs(model), theirs(model.double())
    allowed = 2 * (narrow.double() - exact).abs().max() + 1e-6 * exact.abs().max()
    assert (run(tmp_path, triton_ops()).double() - exact).abs().max() <= allowed
