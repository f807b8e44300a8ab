"""Text to token ids and back, and chat messages to the ids of a prompt.

Owns everything about a model's vocabulary: reading it from GGUF metadata or a Hugging Face folder,
encoding, decoding as a stream, chat templates, and the promise that text never becomes a control
token. It does not know what a model computes, and needs neither torch nor transformers.
"""

from __future__ import annotations

from .detokenizer import Detokenizer
from .tokenizer import Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer"]
