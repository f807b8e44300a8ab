"""A tokenizer from a Hugging Face folder: ``tokenizer.json`` and the settings beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ..errors import ModelError
from ..weights.safetensors import folder_eos_token_ids, read_json
from .source import TokenizerSource

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "cls_token",
    "sep_token",
    "mask_token",
)
_MORE_SPECIAL = ("additional_special_tokens", "extra_special_tokens")


def read_folder_tokenizer(folder: Path) -> TokenizerSource:
    """Read a folder's tokenizer.

    :raises ModelError: naming the file that is missing or broken.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        hint = ""
        if (folder / "tokenizer.model").is_file():
            hint = (
                " The folder has a SentencePiece tokenizer.model, which is not read: convert it "
                "once with transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...))."
            )
        raise ModelError(f"{file} is missing; a model folder needs it.{hint}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"Cannot read {file}: {error}.") from error
    backend.no_truncation()
    backend.no_padding()
    settings = _settings(folder)
    named = {name: text for name in _NAMED if (text := _text(settings.get(name)))}
    _mark_special(backend, [*named.values(), *_more_special(settings)])
    ids = {name: i for name, text in named.items() if (i := backend.token_to_id(text)) is not None}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    end_ids = [*folder_eos_token_ids(folder), *([] if eos is None else [eos])]
    return TokenizerSource(
        backend=backend,
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(end_ids)),
        unk_token_id=ids.get("unk_token"),
        add_bos=bos is not None and _adds_bos(backend, settings, bos),
        chat_templates=_chat_templates(folder, settings),
        variables={name: named[name] for name in ids},
    )


def _settings(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` over the older ``special_tokens_map.json``; both may be missing."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            found = read_json(folder / name)
            settings |= {key: value for key, value in found.items() if value is not None}
    return settings


def _text(token: Any) -> str | None:
    """A token is written as a string, or as an object with its content and flags."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _more_special(settings: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for key in _MORE_SPECIAL:
        value = settings.get(key) or ()
        tokens = value.values() if isinstance(value, Mapping) else value
        found += [text for token in tokens if (text := _text(token))]
    return found


def _mark_special(backend: tokenizers.Tokenizer, names: list[str]) -> None:
    """Make special what the settings call special and ``tokenizer.json`` does not."""
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    missing = [name for name in dict.fromkeys(names) if name not in special]
    known = [name for name in missing if backend.token_to_id(name) is not None]
    if known:
        backend.add_special_tokens([AddedToken(name, normalized=False) for name in known])


def _adds_bos(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], bos: int) -> bool:
    declared = settings.get("add_bos_token")
    if declared is not None:
        return bool(declared)
    # Else the post-processor says: what does it make of nothing?
    return backend.encode("", add_special_tokens=True).ids[:1] == [bos]


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except (OSError, ValueError) as error:
            raise ModelError(f"Cannot read {file}: {error}.") from error
    template = settings.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, Mapping))
        return {str(entry.get("name")): str(entry.get("template")) for entry in named}
    return {}
