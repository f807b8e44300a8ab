"""Where quantised and fp32 weights end up: experts, latent projections, norms, a whole engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fullbore_backend import Engine, EngineConfig, SamplingParams
from fullbore_backend.config import Precision
from fullbore_backend.errors import ConfigError
from fullbore_backend.kernels import Ops
from fullbore_backend.kernels.linear_fp8 import BLOCK, quantize_fp8
from fullbore_backend.kernels.linear_quantized import QuantizedWeight
from fullbore_backend.kernels.rms_norm import rms_norm_torch
from fullbore_backend.layers.linear import Linear
from fullbore_backend.models import build_model
from fullbore_backend.weights.config_json import normalise

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def random_model(kind: str, **changes: Any) -> tuple[dict[str, Any], Any]:
    """transformers' model, every weight random, and its configuration."""
    config = transformers.AutoConfig.for_model(kind, **{**BASE, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return config.to_dict(), model


def saved(kind: str, folder: Path, **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A configuration and the tensors of its checkpoint, as transformers saves them."""
    _, model = random_model(kind, **changes)
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    return normalise(raw, source="config.json"), load_file(folder / "model.safetensors")


def quantised(
    tensors: dict[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    """Every matrix that a checkpoint in fp8 has quantised, experts and all."""
    for name, tensor in tensors.items():
        is_map = name.endswith("_proj.weight")
        yield name, quantize_fp8(tensor, BLOCK) if is_map else tensor


def widened(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor if isinstance(tensor, torch.Tensor) else tensor.dequantize()
        for name, tensor in quantised(tensors)
    }


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3_moe", {**MOE, "num_experts": 4, "head_dim": 16}),
        ("deepseek_v3", {**MOE, **MLA}),
    ],
)
def test_experts_and_latent_projections_are_widened(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Into exactly what a wide checkpoint fills them with; linear maps stay as they are."""
    config, tensors = saved(kind, tmp_path, **changes)
    model, wide = build_model(config, Ops()), build_model(config, Ops())
    model.load(quantised(tensors))
    wide.load(widened(tensors).items())
    kept = dict(model.named_parameters())
    for name, parameter in wide.named_parameters():
        assert torch.equal(kept[name], parameter), name
    maps = [module for module in model.modules() if isinstance(module, Linear)]
    assert any(module.is_quantized for module in maps)


def in_bf16(config: Any, tensors: dict[str, torch.Tensor]) -> Any:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = build_model(config, Ops())
    finally:
        torch.set_default_dtype(default)
    model.load(tensors.items())
    return model


def test_what_is_stored_in_fp32_is_not_rounded_on_its_way(tmp_path: Path) -> None:
    """Routers and their biases are fp32 in a model that runs in bf16."""
    config, tensors = saved("deepseek_v3", tmp_path, **MOE, **MLA)
    moe = in_bf16(config, tensors).blocks[1].mlp
    gate = "model.layers.1.mlp.gate"
    assert torch.equal(moe.router, tensors[f"{gate}.weight"])
    assert torch.equal(moe.selection_bias, tensors[f"{gate}.e_score_correction_bias"])
    assert moe.gate_up.dtype == torch.bfloat16


def test_gemmas_norms_are_those_of_transformers_in_bf16(tmp_path: Path) -> None:
    """One plus a weight, and its product, are taken in fp32: the same to the last bit."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    config, tensors = saved("gemma3_text", tmp_path, head_dim=16)
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    model = in_bf16(config, tensors)
    block = model.blocks[0]
    x = torch.randn(5, 32).bfloat16()
    for weight, name in (
        (model.norm, "model.norm"),
        (block.norms["attention_in"], "model.layers.0.input_layernorm"),
        (block.attention.q_norm, "model.layers.0.self_attn.q_norm"),
    ):
        stored = tensors[f"{name}.weight"]
        theirs = Gemma3RMSNorm(len(stored), eps=1e-6)
        theirs.weight.data = stored
        wide = x[:, : len(stored)]
        assert torch.equal(rms_norm_torch(wide, weight, 1e-6), theirs(wide)), name


@pytest.fixture(scope="module")
def folders(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model over bytes: its weights in AWQ's 4 bits, and the same weights wide."""
    path = tmp_path_factory.mktemp("engines")
    tokenizer = byte_model / "tokenizer.json"
    config, model = random_model("llama", vocab_size=256, intermediate_size=64, eos_token_id=0)
    wide = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    packed = dict(wide)
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in wide if name.endswith("_proj.weight")]:
        stem, (rows, inputs) = name.removesuffix(".weight"), wide[name].shape
        # With all codes of a word alike, no order of them matters; another file tests orders.
        codes = torch.randint(16, (inputs, rows // 8), generator=generator)
        zeros = torch.full((inputs // 32, rows // 8), 8)
        scales = torch.rand(inputs // 32, rows, generator=generator).half() * 0.1
        wide[name] = (
            (codes.repeat_interleave(8, 1) - 8) * scales.float().repeat_interleave(32, 0)
        ).T.contiguous()
        del packed[name]
        for part, values in (("qweight", codes), ("qzeros", zeros)):
            words = values * 0x11111111
            packed[f"{stem}.{part}"] = torch.where(words < 1 << 31, words, words - (1 << 32)).int()
        packed[f"{stem}.scales"] = scales
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    found = {"wide": path / "wide", "awq": path / "awq"}
    for kind, tensors, extra in (
        ("wide", wide, {}),
        ("awq", packed, {"quantization_config": settings}),
    ):
        found[kind].mkdir()
        save_file(tensors, found[kind] / "model.safetensors")
        (found[kind] / "config.json").write_text(json.dumps(config | extra))
        shutil.copy(tokenizer, found[kind])
    return found


def generated(folder: Path, precision: Precision) -> list[list[int]]:
    engine = Engine(EngineConfig(model=str(folder), precision=precision, device="cpu"))
    prompts = [[5, 6, 7, 8], [200, 100, 50], list(range(40, 70))]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return [list(each.token_ids) for each in engine.generate(prompts, params)]


def test_an_engine_says_the_same_with_weights_in_4_bits(folders: dict[str, Path]) -> None:
    """Kept as they are, widened, or stored wide: greedy tokens do not change."""
    want = generated(folders["wide"], "fp32")
    assert generated(folders["awq"], "int4") == want
    assert generated(folders["awq"], "fp32") == want


@pytest.mark.parametrize("precision", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize("kind", ["wide", "awq"])
def test_every_precision_runs(folders: dict[str, Path], kind: str, precision: Precision) -> None:
    assert all(len(tokens) == 12 for tokens in generated(folders[kind], precision))


def test_a_model_of_transformers_is_not_quantised(tmp_path: Path, byte_model: Path) -> None:
    """Its own code multiplies with its own weights."""
    config = transformers.AutoConfig.for_model("gpt_neox", **{**BASE, "vocab_size": 256})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    shutil.copy(byte_model / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigError, match="precision int4 is for models with code of ours"):
        Engine(EngineConfig(model=str(tmp_path), precision="int4", device="cpu"))
