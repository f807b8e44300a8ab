"""The real model, fetched once into the user's cache folder; and small GGUF files, written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from fullbore_backend.tokenizer import Tokenizer, load_tokenizer
from fullbore_backend.weights import resolve_model

if TYPE_CHECKING:
    import gguf


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    """Its tokenizer, built from the file's metadata."""
    return load_tokenizer(model_path)


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file with the reference writer: metadata, and tensors by name."""

    def write(
        metadata: Mapping[str, Any],
        tensors: Mapping[str, np.ndarray] | None = None,
        *,
        architecture: str = "llama",
        quantisation: gguf.GGMLQuantizationType | None = None,
        name: str = "model.gguf",
    ) -> Path:
        import gguf  # a GPU machine may lack it

        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        for key, value in metadata.items():
            kind = gguf.GGUFValueType.get_type(value)
            if kind is gguf.GGUFValueType.INT32:
                kind = gguf.GGUFValueType.UINT32
            sub_type = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, kind, sub_type)
        for key, tensor in (tensors or {}).items():
            if quantisation is not None and tensor.ndim == 2:
                writer.add_tensor(key, gguf.quantize(tensor, quantisation), raw_dtype=quantisation)
            else:
                writer.add_tensor(key, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of safetensors: a small random Llama whose tokens are bytes."""
    path = tmp_path_factory.mktemp("bytes")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: number for number, letter in enumerate(letters)}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path
