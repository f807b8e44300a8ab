"""The tokenizer as the engine and the server use it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2

from ..errors import InvalidRequestError, ModelError
from .chat import ChatTemplate
from .control import ControlSpelling, guard
from .detokenizer import Detokenizer
from .from_folder import read_folder_tokenizer
from .from_gguf import read_gguf_tokenizer
from .source import TokenizerSource
from .vocabulary import Vocabulary

_log = logging.getLogger(__name__)
_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


def load_tokenizer(path: Path, *, clock: Callable[[], datetime] = datetime.now) -> Tokenizer:
    """Read the tokenizer of a GGUF file or a Hugging Face folder.

    :param clock: the time that chat templates may print.
    :raises ModelError: naming what is missing, broken or not supported.
    """
    if path.is_dir():
        return Tokenizer(read_folder_tokenizer(path), clock=clock)
    if path.is_file():
        return Tokenizer(read_gguf_tokenizer(path), clock=clock)
    raise ModelError(f"{path} does not exist. Give a .gguf file or a model folder.")


class Tokenizer:
    """Text to ids and back; safe to use from several threads at once.

    ``eos_token_ids`` has every id that ends a sequence by any of the model's files.
    """

    def __init__(self, source: TokenizerSource, *, clock: Callable[[], datetime]) -> None:
        """Prepare everything, so that no request pays for it."""
        self.bos_token_id = source.bos_token_id
        self.eos_token_ids = source.eos_token_ids
        self._add_bos = source.add_bos
        self._parsing = source.backend
        self._vocabulary = Vocabulary(source.backend, size=source.vocab_size)
        special = self._vocabulary.special_ids
        added = source.backend.get_added_tokens_decoder()
        control = ControlSpelling({added[i].content for i in special}, nonce=secrets.token_hex(16))
        guarded = guard(source.backend, control)
        self._guarded, self._renumbered = guarded.backend, guarded.renumbered
        self._forbidden = guarded.forbidden - {source.unk_token_id}
        self._templates, self._template_fault = _compile(source, control, clock)

    @property
    def vocab_size(self) -> int:
        """How many ids the vocabulary has; a model's output may be padded beyond."""
        return self._vocabulary.size

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`encode_chat` can work."""
        return bool(self._templates)

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        """Ids of a text.

        :param parse_special: control tokens written in the text become their ids; else they are
            plain text.
        :param add_bos: begin with ``bos_token_id``, if there is one.
        """
        if parse_special:
            ids = list(self._parsing.encode(_encodable(text), add_special_tokens=False).ids)
        else:
            ids = self._encode_guarded(text)
        return self._with_bos(ids) if add_bos else ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt: plain text, after one BOS if the model wants it."""
        return self.encode(text, add_bos=self._add_bos)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] = _NO_KWARGS,
    ) -> list[int]:
        """Ids of a conversation, by the model's chat template.

        No text in messages, tools or arguments becomes a control token. The ids begin with BOS
        exactly once, if the model wants it, whether or not the template writes it.

        :raises InvalidRequestError: if there is no template, or it refuses the messages, with the
            template's own message and ``param`` set to ``messages``.
        """
        names = ("tool_use", "default") if tools else ("default", *self._templates)
        template = next((self._templates[name] for name in names if name in self._templates), None)
        if template is None:
            reason = self._template_fault or "The model has no chat template"
            raise InvalidRequestError(
                f"{reason}, so it cannot take messages. Send a prompt to /v1/completions instead.",
                param="messages",
            )
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
        ids = self._encode_guarded(text)
        return self._with_bos(ids) if self._add_bos else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of a whole sequence; bytes that are not UTF-8 become U+FFFD as Python does it."""
        skipped = self._vocabulary.special_ids if skip_special else frozenset[int]()
        bytes_of = self._vocabulary.bytes_of
        text = b"".join([bytes_of(i) for i in ids if i not in skipped]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._vocabulary.strips_blank else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, perhaps part of a character; of a control token, its name."""
        return self._vocabulary.bytes_of(token_id)

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer for one output."""
        return Detokenizer(self._vocabulary)

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.bos_token_id is None or ids[:1] == [self.bos_token_id]:
            return ids
        return [self.bos_token_id, *ids]

    def _encode_guarded(self, text: str) -> list[int]:
        encoded = self._guarded.encode(_encodable(text), add_special_tokens=False).ids
        ids: list[int] = list(encoded)
        if not self._forbidden.isdisjoint(ids):
            ids = self._spelled_out(ids)
        if renumbered := self._renumbered:
            return [renumbered.get(i, i) for i in ids]
        return ids

    def _spelled_out(self, ids: list[int]) -> list[int]:
        """Replace control tokens that a vocabulary's own merges made of text, by its characters."""
        result: list[int] = []
        for token in ids:
            if token not in self._forbidden:
                result.append(token)
                continue
            name = self._vocabulary.spelled(self._vocabulary.bytes_of(token).decode())
            pieces = [piece.id for char in name for piece in self._parsing.model.tokenize(char)]
            result += [piece for piece in pieces if piece not in self._forbidden]
        return result


def _compile(
    source: TokenizerSource, control: ControlSpelling, clock: Callable[[], datetime]
) -> tuple[dict[str, ChatTemplate], str | None]:
    """Compile the templates; a broken one disables chat and is told to whoever asks for it."""
    templates: dict[str, ChatTemplate] = {}
    for name, text in source.chat_templates.items():
        try:
            templates[name] = ChatTemplate(
                text, control=control, variables=source.variables, clock=clock
            )
        except jinja2.TemplateSyntaxError as error:
            fault = f"The model's chat template {name!r} is broken ({error})"
            _log.warning("%s; chat is off, completions work.", fault)
            return {}, fault
    return templates, None


def _encodable(text: str) -> str:
    """Text that has an UTF-8 form: surrogates are paired, or become U+FFFD."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
