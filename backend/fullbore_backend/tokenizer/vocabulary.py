"""What bytes each token id stands for."""

from __future__ import annotations

import json

import tokenizers

from ..errors import ModelError
from .byte_alphabet import BYTE_TO_CHAR, CHAR_TO_BYTE

_BLANK = "▁"
_TO_LATIN1 = str.maketrans({char: chr(byte) for char, byte in CHAR_TO_BYTE.items()})


class Vocabulary:
    """Ids to bytes, computed when first asked for and kept.

    ``size`` counts every id, the added ones too. ``special_ids`` are the control tokens.
    ``strips_blank`` tells that text begins with a blank that the encoder put there.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, size: int) -> None:
        """Read the decoder's kind off the backend.

        :raises ModelError: if it is neither byte-level nor SentencePiece's.
        """
        added = backend.get_added_tokens_decoder()
        self.size = size
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        self._backend = backend
        self._bytes: list[bytes | None] = [None] * self.size
        steps = _decoder_steps(backend)
        kinds = {str(step["type"]) for step in steps}
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds & {"ByteFallback", "Metaspace", "Replace"}:
            raise ModelError(
                f"The tokenizer decodes by {sorted(kinds) or 'no rule'}; byte-level and "
                "SentencePiece vocabularies are supported."
            )
        self.strips_blank = any(_strips_blank(step) for step in steps)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that only pads the vocabulary."""
        if not 0 <= token_id < self.size:
            return b""
        found = self._bytes[token_id]
        if found is None:
            found = self._bytes[token_id] = self._compute(token_id)
        return found

    def spelled(self, text: str) -> str:
        """Text in the characters that the vocabulary's tokens are written in."""
        if self._byte_level:
            return "".join(BYTE_TO_CHAR[byte] for byte in text.encode())
        return text.replace(" ", _BLANK)

    def _compute(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        token = self._backend.id_to_token(token_id) if added is None else added
        if token is None:
            return b""
        if self._byte_level:
            if added is None and CHAR_TO_BYTE.keys() >= set(token):
                return token.translate(_TO_LATIN1).encode("latin-1")
            return token.encode()
        if added is None and len(token) == 6 and token.startswith("<0x") and token[-1] == ">":
            return bytes.fromhex(token[3:5])
        return token.replace(_BLANK, " ").encode()


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, object]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _strips_blank(step: dict[str, object]) -> bool:
    if step["type"] == "Strip":
        return step.get("content") == " " and bool(step.get("start"))
    return step["type"] == "Metaspace" and step.get("prepend_scheme") != "never"
