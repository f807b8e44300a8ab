"""A tokenizer from GGUF metadata: vocabulary, merges or scores, token types, chat templates.

Two kinds exist in files: ``gpt2``, byte-level BPE with merges, and ``llama``, SentencePiece's BPE,
whose merges follow from the scores of its pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ..errors import ModelError
from ..weights.gguf_config import eos_token_ids
from ..weights.gguf_file import MetadataArray, read_gguf
from .byte_alphabet import BYTE_TO_CHAR, CHAR_TO_BYTE
from .source import TokenizerSource
from .splits import SPLITS

_CONTROL, _USER_DEFINED = 3, 4
_BLANK = "▁"  # SentencePiece's space
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def read_gguf_tokenizer(path: Path) -> TokenizerSource:
    """Build the tokenizer that a file describes.

    :raises ModelError: if the file is broken, or its kind of tokenizer is not supported.
    """
    metadata = _Metadata(path, read_gguf(path).metadata)
    tokens = metadata.strings("tokens")
    types = metadata.numbers("token_type", len(tokens)) or [1] * len(tokens)
    named = metadata.named_ids(len(tokens))
    control = {i for i, kind in enumerate(types) if kind == _CONTROL} | set(named.values())
    control_tokens = {tokens[i] for i in control}
    kind = metadata.get("model")
    try:
        if kind == "gpt2":
            backend, add_bos = _byte_level(metadata, tokens, types, control_tokens)
        elif kind == "llama":
            backend, add_bos = _sentencepiece(metadata, tokens, control_tokens), True
        else:
            raise metadata.error(f"its tokenizer is of the kind {kind!r}; gpt2 and llama are known")
    except ModelError:
        raise
    except Exception as error:  # what the tokenizers library raises for contradictory merges
        raise metadata.error(f"its vocabulary cannot be used: {error}") from error
    _add_tokens(backend, tokens, types, control)
    declared = metadata.get("add_bos_token")
    bos = named.get("bos_token")
    return TokenizerSource(
        backend=backend,
        vocab_size=len(tokens),
        bos_token_id=bos,
        eos_token_ids=tuple(i for i in eos_token_ids(metadata.values) if i < len(tokens)),
        unk_token_id=named.get("unk_token"),
        add_bos=bos is not None and bool(add_bos if declared is None else declared),
        chat_templates=metadata.chat_templates(),
        variables={name: tokens[i] for name, i in named.items()},
    )


def _byte_level(
    metadata: _Metadata, tokens: Sequence[str], types: Sequence[int], control: Collection[str]
) -> tuple[tokenizers.Tokenizer, bool]:
    name = metadata.get("pre", "default")
    split = SPLITS.get(name)
    if split is None:
        raise metadata.error(
            f"it cuts text by the rule {name!r}, which is unknown here (known: "
            f"{', '.join(sorted(SPLITS))}); use the model's safetensors folder instead"
        )
    merges = [merge.split(" ") for merge in metadata.strings("merges")]
    if any(len(pair) != 2 for pair in merges):
        raise metadata.error("one of its merges is not a pair of tokens")
    model = models.BPE(
        vocab={token: i for i, token in enumerate(_spelled_in_bytes(tokens, types))},
        # A merge that ends in a control token would let plain text become one.
        merges=[(left, right) for left, right in merges if left + right not in control],
        ignore_merges=split.ignore_merges,
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _spelled_in_bytes(tokens: Sequence[str], types: Sequence[int]) -> Sequence[str]:
    """Some files spell a few ordinary tokens as text, not as byte characters: respell those."""
    literal = (_CONTROL, _USER_DEFINED)
    ordinary = "".join(t for t, kind in zip(tokens, types, strict=True) if kind not in literal)
    if set(ordinary) <= CHAR_TO_BYTE.keys():
        return tokens
    return [
        token
        if kind in literal or set(token) <= CHAR_TO_BYTE.keys()
        else "".join(BYTE_TO_CHAR[byte] for byte in token.encode("utf-8", "replace"))
        for token, kind in zip(tokens, types, strict=True)
    ]


def _sentencepiece(
    metadata: _Metadata, tokens: Sequence[str], control: Collection[str]
) -> tokenizers.Tokenizer:
    gemma = str(metadata.values.get("general.architecture")).startswith("gemma")
    if gemma:
        # Gemma's files spell runs of blanks as spaces, and its merges follow the order of the
        # vocabulary, not the scores.
        tokens = [_BLANK * len(t) if t and not t.strip(" ") else t for t in tokens]
        scores: Sequence[float] = range(0, -len(tokens), -1)
    else:
        scores = metadata.numbers("scores", len(tokens)) or range(0, -len(tokens), -1)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = metadata.get("unknown_token_id", 0)
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_from_scores(vocabulary, tokens, scores, control),
        fuse_unk=True,
        byte_fallback=True,
        unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
    )
    backend = tokenizers.Tokenizer(model)
    decoder = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        backend.normalizer = normalizers.Replace(" ", _BLANK)
    elif metadata.get("add_space_prefix", True):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        decoder.append(decoders.Strip(" ", 1, 0))
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(decoder)
    return backend


def _merges_from_scores(
    vocabulary: Mapping[str, int],
    tokens: Sequence[str],
    scores: Sequence[float],
    control: Collection[str],
) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first; ties go to the longer left part.

    Control tokens take no part, so that text cannot be merged into one.
    """
    pieces = vocabulary.keys() - set(control)
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token in pieces:
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in pieces and right in pieces:
                    ranked.append((-score, -len(left), -len(right), left, right))
    ranked.sort(key=lambda merge: merge[:3])  # stable: equals stay in the vocabulary's order
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    control: Collection[int],
) -> None:
    """Tokens that are matched in the raw text: control tokens, and those a user defined."""
    backend.add_special_tokens(
        [AddedToken(tokens[i], normalized=False, special=True) for i in sorted(control)]
    )
    defined = [
        AddedToken(token, normalized=False, special=False)
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _USER_DEFINED and i not in control and backend.token_to_id(token) == i
    ]
    if defined:
        backend.add_tokens(defined)


class _Metadata:
    """The tokenizer's part of a file's metadata, checked as it is read."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def error(self, reason: str) -> ModelError:
        return ModelError(f"Cannot build a tokenizer from {self.path}: {reason}.")

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"tokenizer.ggml.{key}", default)

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, MetadataArray) or not value.holds_strings or not len(value):
            raise self.error(f"it has no list of strings tokenizer.ggml.{key}")
        return value.read()

    def numbers(self, key: str, length: int) -> list[Any] | None:
        value = self.get(key)
        if not isinstance(value, MetadataArray) or value.holds_strings:
            return None
        if len(value) != length:
            raise self.error(f"tokenizer.ggml.{key} has {len(value)} entries for {length} tokens")
        return value.read()

    def named_ids(self, num_tokens: int) -> dict[str, int]:
        found = {name: self.get(key) for name, key in _NAMED.items()}
        return {name: i for name, i in found.items() if isinstance(i, int) and 0 <= i < num_tokens}

    def chat_templates(self) -> dict[str, str]:
        names = self.values.get("tokenizer.chat_templates")
        keys = {"default": "tokenizer.chat_template"}
        if isinstance(names, MetadataArray):
            keys |= {str(name): f"tokenizer.chat_template.{name}" for name in names.read()}
        found = {name: self.values.get(key) for name, key in keys.items()}
        return {name: text for name, text in found.items() if isinstance(text, str) and text}
