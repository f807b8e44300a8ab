"""GGUF files as checkpoints: values and configuration equal those the files were made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from fullbore_backend.errors import ModelError
from fullbore_backend.weights import open_checkpoint
from fullbore_backend.weights.gguf_types import dequantize, storage_type

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, LAYERS, VOCAB = 4, 2, 8, 32, 64, 2, 96


def metadata(architecture: str = "llama", **extra: Any) -> dict[str, Any]:
    """What a converter writes for the sizes above."""
    values: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 20_000.0,
    }
    values = {**values, **extra}
    return {f"{architecture}.{key}": v for key, v in values.items() if v is not None}


def hf_weights(*, qk_norm: bool = False, bias: bool = False) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for name, rows in sizes.items():
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            if bias:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
            if qk_norm and name != "v":
                shapes[f"{prefix}self_attn.{name}_norm.weight"] = (HEAD_DIM,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (MLP, HIDDEN)
        shapes[f"{prefix}mlp.up_proj.weight"] = (MLP, HIDDEN)
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, MLP)
        shapes[f"{prefix}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (HIDDEN,)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def to_gguf(weights: dict[str, np.ndarray], model: str = "llama") -> dict[str, np.ndarray]:
    """What llama.cpp's converter makes of them: names, and for llama the order of q and k rows."""
    architecture = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}.get(
        model, gguf.MODEL_ARCH.QWEN3
    )
    names = gguf.get_tensor_name_map(architecture, LAYERS)
    result = {}
    for name, values in weights.items():
        if model == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = HEADS if ".q_proj." in name else KV_HEADS
            split = values.reshape(heads, 2, HEAD_DIM // 2, *values.shape[1:])
            values = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)
        result[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return result


WriteGGUF = Callable[..., Path]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("llama", {}, id="llama"),
        pytest.param("llama", {"bias": True}, id="llama with biases"),
        pytest.param("qwen2", {"bias": True}, id="qwen2"),
        pytest.param("qwen3", {"qk_norm": True}, id="qwen3"),
    ],
)
def test_tensors_come_back_as_they_were(
    write_gguf: WriteGGUF, model: str, options: dict[str, bool]
) -> None:
    """Names, order of rows and values."""
    weights = hf_weights(**options)
    path = write_gguf(metadata(model), to_gguf(weights, model), architecture=model)
    checkpoint = open_checkpoint(path)
    found = dict(checkpoint.tensors(dtype=torch.float32))
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        assert torch.equal(found[name], torch.from_numpy(values)), name
    assert checkpoint.config["model_type"] == model
    assert checkpoint.config["attention_bias"] is options.get("bias", False)
    half = dict(checkpoint.tensors(dtype=torch.bfloat16))
    assert all(tensor.dtype == torch.float32 for tensor in half.values()), "it is stored so"


def test_gemma_norms_lose_their_offset(write_gguf: WriteGGUF) -> None:
    """The conversion adds one to the weights of all norms; names differ too."""
    weights = hf_weights(qk_norm=True)
    for layer in range(LAYERS):
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.full(HIDDEN, 0.25, np.float32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, LAYERS)
    converted = {
        names.get_name(name, try_suffixes=(".weight",)): v + ("norm" in name)
        for name, v in weights.items()
    }
    values = metadata(
        "gemma3", **{"attention.key_length": HEAD_DIM, "attention.sliding_window": 64}
    )
    checkpoint = open_checkpoint(write_gguf(values, converted, architecture="gemma3"))
    found = dict(checkpoint.tensors(dtype=torch.float32))
    assert found.keys() == weights.keys()
    for name, expected in weights.items():
        torch.testing.assert_close(found[name], torch.from_numpy(expected))
    config = checkpoint.config
    assert config["model_type"] == "gemma3_text"
    assert config["tie_word_embeddings"] is True
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (64, HEAD_DIM)
    assert config["rope_local_base_freq"] == 10_000.0


def test_configuration_of_the_default_model(model_path: Path) -> None:
    """The numbers published with SmolLM2-135M-Instruct."""
    checkpoint = open_checkpoint(model_path)
    expected = {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "rope_theta": 100_000.0,
        "rope_scaling": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: checkpoint.config[key] for key in expected} == expected
    assert checkpoint.config["rms_norm_eps"] == pytest.approx(1e-5)
    assert checkpoint.eos_token_ids == (2,)


def test_tensors_of_the_default_model_equal_transformers(model_path: Path) -> None:
    """Every one, to the last bit."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    checkpoint = open_checkpoint(model_path)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**checkpoint.config))
    reference = load_gguf_checkpoint(str(model_path), return_tensors=True, model_to_load=model)
    found = dict(checkpoint.tensors(dtype=torch.float32))
    assert found.keys() == reference["tensors"].keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, reference["tensors"][name]), name


QUANTISED = [
    kind
    for kind in gguf.GGMLQuantizationType
    if kind.name in gguf.quants._type_traits or kind in gguf.quants._type_traits
]


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_every_storage_type_that_gguf_dequantises(kind: gguf.GGMLQuantizationType) -> None:
    """Random blocks, more than fit one piece, against one call for all."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 3, max(block, (1 << 16) // block * block)
    data = np.random.default_rng(1).integers(0, 256, (rows, columns // block * size), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data, kind)
    stored = storage_type(int(kind))
    assert stored.num_bytes((rows, columns)) == data.size
    found = dequantize(data.reshape(-1), stored, (rows, columns))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_files_round_trip(write_gguf: WriteGGUF, name: str) -> None:
    """Through a whole file, within the type's own error."""
    kind = gguf.GGMLQuantizationType[name]
    weights = hf_weights()
    path = write_gguf(metadata(), to_gguf(weights), quantisation=kind)
    half = dict(open_checkpoint(path).tensors(dtype=torch.bfloat16))
    assert (half["model.embed_tokens.weight"].dtype == torch.float32) == (name == "F32")
    for tensor_name, tensor in open_checkpoint(path).tensors(dtype=torch.float32):
        original = torch.from_numpy(weights[tensor_name])
        bound = {"F32": 0.0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 0.02}.get(name, 0.35)
        assert (tensor - original).abs().max() <= bound * original.abs().max(), tensor_name


def test_rope_factors_become_configuration(write_gguf: WriteGGUF) -> None:
    """How a file carries Llama 3's scaling; it is no tensor of the model."""
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    tensors = {**to_gguf(hf_weights()), "rope_freqs.weight": factors}
    checkpoint = open_checkpoint(write_gguf(metadata(), tensors))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "factors", "factors": list(factors)}
    assert "rope_freqs.weight" not in dict(checkpoint.tensors(dtype=torch.float32))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        pytest.param({"rope.scaling.type": "none"}, None, id="none"),
        pytest.param(
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
            id="linear",
        ),
        pytest.param(
            {"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}, id="old linear"
        ),
        pytest.param(
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
            },
            id="yarn",
        ),
    ],
)
def test_rope_scaling(write_gguf: WriteGGUF, extra: dict[str, Any], expected: Any) -> None:
    """In Hugging Face's words."""
    checkpoint = open_checkpoint(write_gguf(metadata(**extra), to_gguf(hf_weights())))
    assert checkpoint.config["rope_scaling"] == expected


def test_an_output_head_of_its_own(write_gguf: WriteGGUF) -> None:
    """Is yielded, and the embeddings are not tied."""
    head = np.ones((VOCAB, HIDDEN), np.float32)
    tensors = {**to_gguf(hf_weights()), "output.weight": head}
    checkpoint = open_checkpoint(write_gguf(metadata(), tensors))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in dict(checkpoint.tensors(dtype=torch.float32))


def without(name: str) -> dict[str, np.ndarray]:
    """A model that lacks a tensor."""
    return {key: value for key, value in to_gguf(hf_weights()).items() if key != name}


@pytest.mark.parametrize(
    ("values", "tensors", "message"),
    [
        pytest.param(
            metadata(),
            without("blk.1.ffn_up.weight"),
            "lacks 1 .*blk.1.ffn_up",
            id="tensor missing",
        ),
        pytest.param(
            metadata(), without("token_embd.weight"), "no token embedding", id="embedding"
        ),
        pytest.param(
            metadata(),
            {**to_gguf(hf_weights()), "blk.0.ffn_gate_inp.weight": np.ones((4, 4), np.float32)},
            "'blk.0.ffn_gate_inp.weight', which a llama model has no place for",
            id="experts",
        ),
        pytest.param(
            metadata(**{"attention.head_count": 8}),
            to_gguf(hf_weights()),
            "blk.0.attn_k.weight is .* contradicts itself",
            id="heads do not fit",
        ),
        pytest.param(
            metadata(**{"attention.head_count": 3}),
            to_gguf(hf_weights()),
            "multiple",
            id="odd heads",
        ),
        pytest.param(
            metadata(block_count=None),
            to_gguf(hf_weights()),
            "lacks num_hidden_layers",
            id="layers",
        ),
        pytest.param(
            metadata(**{"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}),
            to_gguf(hf_weights()),
            "rope scaling 'longrope'",
            id="rope scaling",
        ),
        pytest.param(
            {**metadata(), "split.count": 3}, to_gguf(hf_weights()), "one of 3 parts", id="a part"
        ),
        pytest.param(
            metadata(),
            {**without("output_norm.weight"), "output_norm.weight": np.ones(HIDDEN, np.int32)},
            "type I32 cannot be dequantised",
            id="integer tensor",
        ),
    ],
)
def test_what_no_model_can_be_made_of_is_refused(
    write_gguf: WriteGGUF, values: dict[str, Any], tensors: dict[str, np.ndarray], message: str
) -> None:
    """When the file is opened, before any weight is read."""
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(write_gguf(values, tensors))
    assert "model.gguf" in str(caught.value)


def test_an_unknown_architecture_is_refused(write_gguf: WriteGGUF) -> None:
    """Naming it and those that are known."""
    with pytest.raises(ModelError, match=r"architecture 'mamba'.*gemma3, llama, qwen2, qwen3"):
        open_checkpoint(write_gguf({}, architecture="mamba"))
