"""Every architecture through the engine: greedy tokens are transformers', however they are made.

The prompts share prefixes, are computed in chunks beside each other, and the pool is so small that
requests are preempted and start again from what the prefix cache has kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from fullbore_backend import Engine, EngineConfig, SamplingParams

VOCAB = 61
STEPS = 64
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "n_shared_experts": 1}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "olmo2": {"head_dim": 8},  # has no module of ours
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},  # and its own words
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**MOE, "num_experts": 4},
    "gemma3_text": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20},
    "glm4_moe": {**MOE, "n_routed_experts": 4, "first_k_dense_replace": 1},
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


def save(model_type: str, folder: Path) -> Any:
    """A model with random weights, and a tokenizer with a letter for each id."""
    config = transformers.AutoConfig.for_model(model_type, **{**BASE, **ARCHITECTURES[model_type]})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model.eval()


def token_bytes(config: Any) -> int:
    """What one token takes in the cache, in fp32."""
    width = 2 * config.hidden_size if config.model_type == "gpt2" else 0
    width = width or 2 * config.num_key_value_heads * config.head_dim
    if config.model_type == "deepseek_v3":
        width = config.kv_lora_rank + config.qk_rope_head_dim
    return int(config.num_hidden_layers * width * 4)


def prompts() -> list[list[int]]:
    """Two families with a long common beginning, one that stands alone, one that comes twice."""
    first, second = ([(5 * i * i + shift) % VOCAB for i in range(24)] for shift in (1, 2))
    return [[*first, 3], [*first, 7, 9], second, second + [11] * 9, [4, 4, 8], [*first, 3]]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(
    model_type: str, overlap: bool, tmp_path: Path
) -> None:
    model = save(model_type, tmp_path)
    asked = prompts()
    want = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        done = model.generate(ids, max_new_tokens=STEPS, do_sample=False, use_cache=True)
        want.append(tuple(done[0, len(prompt) :].tolist()))
    engine = Engine(
        EngineConfig(
            model=str(tmp_path),
            device="cpu",
            precision="fp32",
            block_size=8,
            max_num_batched_tokens=13,
            max_num_seqs=6,
            kv_cache_bytes=30 * 8 * token_bytes(model.config),
            overlap=overlap,
        )
    )
    got = engine.generate(asked, SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True))
    assert [done.token_ids for done in got] == want
    assert engine.scheduler.num_preemptions > 0
    assert engine.stats().prefix_cache_hits > 0
