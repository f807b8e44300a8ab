"""The GGUF container's parser: equal to the reference reader, and never fooled by a broken file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullbore_backend.errors import ModelError
from fullbore_backend.tokenizer import load_tokenizer
from fullbore_backend.weights import open_checkpoint
from fullbore_backend.weights.gguf_file import MetadataArray, read_gguf

HEADER = struct.Struct("<4sIQQ")


def header(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    """The fixed first part of a file."""
    return HEADER.pack(magic, version, tensors, keys)


def string(text: bytes) -> bytes:
    """A string as the format has it."""
    return struct.pack("<Q", len(text)) + text


def test_metadata_and_tensors_equal_the_reference_reader(model_path: Path) -> None:
    """Every key and every tensor of the real file."""
    reference = gguf.GGUFReader(model_path)
    file = read_gguf(model_path)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            value = file.metadata[key]
            assert (value.read() if isinstance(value, MetadataArray) else value) == field.contents()
    assert len(file.tensors) == len(reference.tensors)
    for tensor in reference.tensors:
        found = file.tensors[tensor.name]
        assert found.shape == tuple(int(n) for n in tensor.shape[::-1])
        assert (found.type_id, found.offset) == (int(tensor.tensor_type), tensor.data_offset)


def test_every_kind_of_value(write_gguf: Callable[..., Path]) -> None:
    """Scalars, and arrays of numbers, truth values and strings."""
    values: dict[str, Any] = {
        "number": 7,
        "real": 0.5,
        "truth": True,
        "text": "é🙂",
        "numbers": [1, -2, 3],
        "reals": [0.5, -1.0],
        "truths": [True, False],
        "texts": ["a", "", "日本"],
    }
    file = read_gguf(write_gguf(values, {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}))
    for key, value in values.items():
        found = file.metadata[key]
        assert (found.read() if isinstance(found, MetadataArray) else found) == value
    assert file.tensors["x"].shape == (2, 3)


def test_nested_arrays(tmp_path: Path) -> None:
    """The format allows them."""
    inner = struct.pack("<IQ2i", 5, 2, 1, 2)
    data = header(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 9, 2) + inner + inner
    (tmp_path / "x.gguf").write_bytes(data)
    found = read_gguf(tmp_path / "x.gguf").metadata["k"].read()
    assert [array.read() for array in found] == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "Cannot read", id="empty"),
        pytest.param(b"GG", "ends inside its header", id="three bytes"),
        pytest.param(header(magic=b"PK\3\4"), "begins with", id="magic"),
        pytest.param(header(version=1), "version 1", id="version 1"),
        pytest.param(header(version=4), "version 4", id="version 4"),
        pytest.param(header(version=0), "version 0", id="version 0"),
        pytest.param(header(version=3 << 24), "big-endian", id="big-endian"),
        pytest.param(header(keys=2**60), "more than it has bytes for", id="too many keys"),
        pytest.param(header(tensors=2**60), "more than it has bytes for", id="too many tensors"),
        pytest.param(
            header(keys=1) + struct.pack("<Q", 2**63) + bytes(20), "ends inside", id="huge key"
        ),
        pytest.param(
            header(keys=1) + string(b"k") + struct.pack("<I", 13) + bytes(8),
            "unknown type 13",
            id="value type",
        ),
        pytest.param(
            header(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 2**40) + bytes(64),
            "more than it has bytes for",
            id="too many strings",
        ),
        pytest.param(
            header(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 2**62),
            "runs past its end",
            id="a string too long",
        ),
        pytest.param(
            header(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 5, 2**61) + bytes(16),
            "more than it has bytes for",
            id="too many numbers",
        ),
        pytest.param(
            header(keys=1) + string(b"k") + struct.pack("<I" + "IQ" * 9, 9, *[9, 1] * 9),
            "unknown type 9",
            id="nested too deeply",
        ),
        pytest.param(
            header(keys=2) + (string(b"k") + struct.pack("<IB", 0, 1)) * 2,
            "'k' occurs twice",
            id="a key twice",
        ),
        pytest.param(
            header(keys=1) + string(b"general.alignment") + struct.pack("<II", 4, 24),
            "power of two",
            id="alignment",
        ),
        pytest.param(
            header(tensors=1) + string(b"t") + struct.pack("<I", 9) + bytes(24),
            "9 dimensions",
            id="dimensions",
        ),
        pytest.param(
            header(tensors=2) + (string(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2,
            "'t' occurs twice",
            id="a tensor twice",
        ),
        pytest.param(
            header(tensors=1) + string(b"t") + struct.pack("<IQIQ", 1, 1, 0, 5),
            "not aligned",
            id="offset",
        ),
    ],
)
def test_broken_headers_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    """With the reason, and without allocating what they announce."""
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=message):
        read_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("share", [0.0001, 0.002, 0.01, 0.03, 0.5, 0.9999])
def test_a_truncated_model_is_refused(model_path: Path, tmp_path: Path, share: float) -> None:
    """Wherever it was cut off."""
    data = model_path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match="again"):
        open_checkpoint(cut)


@pytest.mark.parametrize(
    ("type_id", "dimension", "message"),
    [
        (31, 32, "storage type 31 is unknown"),
        (999, 32, "storage type 999 is unknown"),
        (24, 32, "type I8 cannot be dequantised"),
        (3, 33, "no multiple of Q4_1's block"),
        (0, 2**61, "truncated"),
    ],
    ids=["removed type", "future type", "integers", "odd row", "huge"],
)
def test_tensors_that_cannot_be_read_are_refused(
    tmp_path: Path, type_id: int, dimension: int, message: str
) -> None:
    """By name and type."""
    key = string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama")
    row = string(b"output_norm.weight") + struct.pack("<IQIQ", 1, dimension, type_id, 0)
    (tmp_path / "x.gguf").write_bytes(header(keys=1, tensors=1) + key + row + bytes(64))
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(tmp_path / "x.gguf")
    assert "output_norm.weight" in str(caught.value)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_flipped_bytes_never_raise_anything_else(
    write_gguf: Callable[..., Path], data: st.DataObject
) -> None:
    """Corruption ends in the model, or in an error of ours."""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a", "b", "ab"],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0],
        "tokenizer.ggml.token_type": [2, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "llama.embedding_length": 4,
        "llama.attention.head_count": 1,
    }
    path = write_gguf(metadata, {"token_embd.weight": np.ones((4, 4), np.float32)})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    for read in (read_gguf, open_checkpoint, load_tokenizer):
        try:
            read(path)
        except ModelError:
            continue
