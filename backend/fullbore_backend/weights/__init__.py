"""Where a model comes from: names to files, files to configuration and tensors.

Owns fetching, and reading GGUF and safetensors into one form: Hugging Face's names and vocabulary.
It does not know what a model computes (:mod:`fullbore_backend.models`) or how text becomes ids
(:mod:`fullbore_backend.tokenizer`). Importing it does not import torch.
"""

from __future__ import annotations

from .checkpoint import Checkpoint, open_checkpoint
from .resolve import resolve_model
from .wheel import FetchProgress

__all__ = ["Checkpoint", "FetchProgress", "open_checkpoint", "resolve_model"]
