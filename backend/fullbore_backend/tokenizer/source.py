"""What a file tells about a tokenizer: the value that both readers produce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """A vocabulary and what goes with it.

    :param backend: recognises control tokens in text; its special tokens are the control tokens.
    :param vocab_size: one more than the highest id.
    :param bos_token_id: begins a sequence.
    :param eos_token_ids: each ends a sequence.
    :param unk_token_id: stands for text that has no token.
    :param add_bos: the model expects ``bos_token_id`` at the start of every prompt.
    :param chat_templates: by name; ``tool_use``, if there is one, is for requests with tools.
    :param variables: names a template may use for control tokens (``bos_token``), and the tokens.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    unk_token_id: int | None
    add_bos: bool
    chat_templates: Mapping[str, str]
    variables: Mapping[str, str]
