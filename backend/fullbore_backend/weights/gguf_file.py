"""The GGUF container: header, metadata, tensor table (ggml's docs/gguf.md, versions 2 and 3).

Owns the byte layout and its checks, so that a truncated or hostile file ends in an error and never
in a huge allocation. It does not know what a key or a tensor type means. Arrays stay undecoded
until asked for: a vocabulary has tens of thousands of strings, and most readers want only some.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9
_LENGTH = struct.Struct("<Q")
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A row of the tensor table. ``shape`` is row-major: ggml's dimensions, reversed.

    ``type_id`` is ggml's number of the storage type; ``offset`` is in bytes from the file's start.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class MetadataArray:
    """An array of the metadata that is decoded when read."""

    _cursor: _Cursor
    _kind: int
    _count: int
    _offset: int

    def __len__(self) -> int:
        return self._count

    @property
    def holds_strings(self) -> bool:
        """Whether the elements are strings; else they are numbers, truth values or arrays."""
        return self._kind == _STRING

    def read(self) -> list[Any]:
        """Decode every element; bytes that are not UTF-8 become U+FFFD."""
        return _Cursor(self._cursor.path, self._cursor.view, self._offset).values(
            self._kind, self._count
        )


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header over a mapped file. ``view`` is the whole file, read-only."""

    path: Path
    view: mmap.mmap
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_gguf(path: Path) -> GGUFFile:
    """Map a file and parse its header.

    :raises ModelError: if it cannot be opened, is not GGUF, is truncated or contradicts itself.
    """
    try:
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"Cannot read {path}: {error}.") from error
    cursor = _Cursor(path, view, 0)
    num_tensors, num_keys = _read_header(cursor)
    metadata = _read_metadata(cursor, num_keys)
    tensors = _read_tensor_table(cursor, num_tensors, metadata)
    return GGUFFile(path, view, metadata, tensors)


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.take(4)
    if magic != MAGIC:
        raise cursor.error(f"it begins with {magic!r}, a GGUF file begins with {MAGIC!r}")
    version = cursor.scalar("I")
    if version and version & 0xFFFF == 0:
        raise cursor.error("it is big-endian; only little-endian files are supported")
    if version not in SUPPORTED_VERSIONS:
        raise cursor.error(f"it has GGUF version {version}; versions 2 and 3 are supported")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    # The smallest table row takes 24 bytes, the smallest key with its value 13.
    cursor.check_count(num_tensors, 24)
    cursor.check_count(num_keys, 13)
    return num_tensors, num_keys


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in metadata:
            raise cursor.error(f"the key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    return metadata


def _read_tensor_table(
    cursor: _Cursor, count: int, metadata: Mapping[str, Any]
) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment!r}; it must be a power of two")
    rows: list[TensorInfo] = []
    for _ in range(count):
        name = cursor.string()
        num_dimensions = cursor.scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise cursor.error(f"the tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
        rows.append(TensorInfo(name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for row in rows:
        if row.name in tensors:
            raise cursor.error(f"the tensor {row.name!r} occurs twice")
        if row.offset % alignment:
            raise cursor.error(f"the tensor {row.name!r} is not aligned to {alignment} bytes")
        tensors[row.name] = TensorInfo(row.name, row.shape, row.type_id, data_start + row.offset)
    return tensors


class _Cursor:
    """A read position in the file; every step is checked against the file's end."""

    __slots__ = ("end", "path", "position", "view")

    def __init__(self, path: Path, view: mmap.mmap, position: int) -> None:
        self.path = path
        self.view = view
        self.position = position
        self.end = len(view)

    def error(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} is not a usable GGUF file: {reason}.")

    def take(self, size: int) -> bytes:
        start, stop = self.position, self.position + size
        if stop > self.end:
            raise self.error(f"it ends inside its header, at byte {self.end}; download it again")
        self.position = stop
        return self.view[start:stop]

    def scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack(self.take(layout.size))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def check_count(self, count: int, element_size: int) -> None:
        if count * element_size > self.end - self.position:
            raise self.error(
                f"it announces {count} elements, more than it has bytes for; download it again"
            )

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read one value; an array is skipped over and returned undecoded."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= _MAX_NESTING:
            raise self.error(f"it has a metadata value of unknown type {kind}")
        element, count = self.scalar("I"), self.scalar("Q")
        start = self.position
        if element in _SCALARS:
            self.take_array(element, count)
        elif element == _STRING:
            self.skip_strings(count)
        else:
            self.check_count(count, 12)
            for _ in range(count):
                self.value(element, depth + 1)
        return MetadataArray(self, element, count, start)

    def take_array(self, kind: int, count: int) -> bytes:
        self.check_count(count, struct.calcsize("<" + _SCALARS[kind]))
        return self.take(count * struct.calcsize("<" + _SCALARS[kind]))

    def skip_strings(self, count: int) -> None:
        self.check_count(count, _LENGTH.size)
        view, unpack, position = self.view, _LENGTH.unpack_from, self.position
        last = self.end - _LENGTH.size
        for _ in range(count):
            if position > last:
                raise self.error("a list of strings runs past its end; download it again")
            position += 8 + unpack(view, position)[0]
        if position > self.end:
            raise self.error("a list of strings runs past its end; download it again")
        self.position = position

    def values(self, kind: int, count: int) -> list[Any]:
        """Decode ``count`` elements that :meth:`value` has stepped over once, hence in bounds."""
        if kind in _SCALARS:
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self.take_array(kind, count)))
        if kind != _STRING:
            return [self.value(kind) for _ in range(count)]
        view, unpack, position = self.view, _LENGTH.unpack_from, self.position
        strings: list[str] = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(view, position)[0]
            strings.append(view[start:position].decode("utf-8", "replace"))
        return strings
