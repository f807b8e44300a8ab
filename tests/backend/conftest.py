"""The real model, fetched once into the user's cache folder; and small GGUF files, written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from fullbore_backend.tokenizer import Tokenizer, load_tokenizer
from fullbore_backend.weights import resolve_model


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
