"""Models without a module of ours, run by transformers' code on our paged cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fullbore_backend.errors import ModelError
from fullbore_backend.kernels import select_ops
from fullbore_backend.models.any_causal import AnyCausalModel

CPU = torch.device("cpu")
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
SERVED: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": 7},
    "olmo2": {},
    "starcoder2": {"sliding_window": None},
    "cohere": {},
    "cohere2": {"sliding_window": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
    "granite": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"state_size": 4}, "mamba models cannot be served"),
    "t5": ({"d_model": 32, "d_kv": 8, "num_layers": 1}, "have an encoder"),
    "doge": ({}, "makes an attention mask of its own"),
    "llama4_text": (  # of chunks longer than what is tried when it is loaded
        {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 64},
        "layers of kind chunked_attention",
    ),
    "stablelm": ({"num_key_value_heads": 4}, "does not pass on what our attention needs"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "bloom models cannot be served"),
}


def save(model_type: str, changes: dict[str, Any], folder: Path) -> None:
    config = transformers.AutoConfig.for_model(model_type, **{**BASE, **changes})
    torch.manual_seed(0)
    auto = (
        transformers.AutoModelForSeq2SeqLM
        if config.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    model = auto.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


@pytest.mark.parametrize("model_type", SERVED)
def test_it_says_what_transformers_says(model_type: str, tmp_path: Path) -> None:
    """The model checks itself when it is loaded: in chunks, against eager attention."""
    save(model_type, SERVED[model_type], tmp_path)
    model = AnyCausalModel(tmp_path, select_ops(CPU), dtype=torch.float32, device=CPU)
    assert (model.kv.layers, model.vocab_size) == (2, 61)


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_served_is_refused(model_type: str, tmp_path: Path) -> None:
    changes, message = REFUSED[model_type]
    save(model_type, changes, tmp_path)
    with pytest.raises(ModelError, match=message):
        AnyCausalModel(tmp_path, select_ops(CPU), dtype=torch.float32, device=CPU)


def test_a_wrong_answer_is_found_out(tmp_path: Path) -> None:
    """The check can fail: attention that forgets its scale is not served."""
    save("olmo2", {}, tmp_path)
    ops = select_ops(CPU)

    def unscaled(*args: Any, scale: float, **options: Any) -> torch.Tensor:
        return ops.paged_attention(*args, scale=1.0, **options)

    with pytest.raises(ModelError, match="logits differ by"):
        AnyCausalModel(
            tmp_path, replace(ops, paged_attention=unscaled), dtype=torch.float32, device=CPU
        )


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.norm.weight"),
            "lacks 1 tensors, among them model.norm",
        ),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}), "cannot load"),
    ],
    ids=["missing", "shape"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    """transformers would make up what is missing."""
    save("olmo2", {}, tmp_path)
    change_weights(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        AnyCausalModel(tmp_path, select_ops(CPU), dtype=torch.float32, device=CPU)


def test_code_in_a_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anybody asked whether it should be."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    save("olmo2", {}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "theirs.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(ModelError, match="contains custom code"):
        AnyCausalModel(tmp_path, select_ops(CPU), dtype=torch.float32, device=CPU)
    assert not asked


@pytest.mark.parametrize("original", [16, 64])
def test_longrope_ends_where_its_angles_change(original: int, tmp_path: Path) -> None:
    """Beyond the original context a sequence would change the angles of its neighbours."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": original,
    }
    changes = {"rope_parameters": rope, "original_max_position_embeddings": original}
    save("phi3", {**changes, "sliding_window": None}, tmp_path)
    if original < 21:  # shorter than what is tried
        with pytest.raises(ModelError, match="logits differ by"):
            AnyCausalModel(tmp_path, select_ops(CPU), dtype=torch.float32, device=CPU)
        return
    model = AnyCausalModel(tmp_path, select_ops(CPU), dtype=torch.float32, device=CPU)
    assert model.max_positions == original
