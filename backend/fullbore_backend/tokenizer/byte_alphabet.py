"""The printable characters that stand for the 256 bytes in byte-level vocabularies (GPT-2, 2019).

Printable ASCII and Latin-1 stand for themselves; the other bytes take characters from U+0100 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_REST = tuple(byte for byte in range(256) if byte not in _PRINTABLE)

BYTE_TO_CHAR: Mapping[int, str] = MappingProxyType(
    {byte: chr(byte) for byte in _PRINTABLE}
    | {byte: chr(0x100 + index) for index, byte in enumerate(_REST)}
)
CHAR_TO_BYTE: Mapping[str, int] = MappingProxyType(
    {char: byte for byte, char in BYTE_TO_CHAR.items()}
)
