"""Hugging Face folders as checkpoints, written by transformers and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fullbore_backend.errors import ModelError
from fullbore_backend.weights import open_checkpoint

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": 64,
}


def folder(path: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """Write a `config.json`, and other JSON files with `_` for `.` and `-`."""
    (path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("shard_size", ["5GB", "10KB"], ids=["one file", "shards"])
def test_what_transformers_saves_comes_back(tmp_path: Path, shard_size: str) -> None:
    """Names, values, configuration and end ids, from one file or several."""
    import transformers

    config = transformers.LlamaConfig(
        **{key: value for key, value in CONFIG.items() if key != "model_type"},
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
        eos_token_id=7,
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [5, 7]
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "10KB")
    checkpoint = open_checkpoint(tmp_path)
    found = dict(checkpoint.tensors(dtype=torch.float32))
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert checkpoint.eos_token_ids == (5, 7)
    assert checkpoint.config["rope_theta"] == 5000.0
    assert checkpoint.config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("value", "expected"), [(3, (3,)), ([3, 4], (3, 4)), (None, ())], ids=["one", "two", "none"]
)
def test_end_ids_of_config_alone(tmp_path: Path, value: Any, expected: tuple[int, ...]) -> None:
    """Without a `generation_config.json`."""
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert open_checkpoint(folder(tmp_path, {"eos_token_id": value})).eos_token_ids == expected


def test_floats_come_as_they_are_stored(tmp_path: Path) -> None:
    """So that a place in fp32 loses nothing; any other rounds by itself."""
    stored = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_file(stored, tmp_path / "model.safetensors")
    found = dict(open_checkpoint(folder(tmp_path)).tensors(dtype=torch.float16))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "a": torch.float32,
        "b": torch.bfloat16,
    }


def test_missing_files_are_named(tmp_path: Path) -> None:
    """One after the other, until the folder is whole."""
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)
    folder(tmp_path)
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="convert them to safetensors"):
        open_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    with pytest.raises(ModelError, match=r"two\.safetensors is missing; the index"):
        open_checkpoint(tmp_path)
    save_file({"c": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match=r"two\.safetensors lacks 'b'"):
        list(open_checkpoint(tmp_path).tensors(dtype=torch.float32))
    with pytest.raises(ModelError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", r"Cannot read .*config\.json"),
        ("config.json", "[]", "must be a JSON object"),
        ("config.json", "{}", "no model_type"),
        ("config.json", '{"model_type": "llama"}', "lacks hidden_size"),
        ("model.safetensors", "not a header", r"Cannot read .*model\.safetensors"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    """With what is wrong."""
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (folder(tmp_path) / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.config
        list(checkpoint.tensors(dtype=torch.float32))


def test_an_index_cannot_point_outside(tmp_path: Path) -> None:
    """Only file names count, no folders."""
    index = {"weight_map": {"a": "../../etc/passwd"}}
    folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="passwd is missing") as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path / "passwd") in str(caught.value)


def test_unknown_quantisation_is_refused(tmp_path: Path) -> None:
    """Naming the method."""
    with pytest.raises(ModelError, match=r"with quip, which .* known are awq, compressed-"):
        open_checkpoint(folder(tmp_path, {"quantization_config": {"quant_method": "quip"}}))
