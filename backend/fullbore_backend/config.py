"""Settings, each component's own: frozen values, checked by :meth:`EngineConfig.validate`, no I/O.

Sizes are in tokens, blocks or bytes as each name says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
"""The model served when none is named: SmolLM2-135M-Instruct."""

Precision = Literal["auto", "fp32", "bf16", "fp16", "int8", "fp8", "int4"]
KvPrecision = Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler needs to know.

    :param num_blocks: blocks in the KV pool.
    :param block_size: tokens a block holds.
    :param max_model_len: the most tokens a request may have, prompt and output together.
    :param max_num_seqs: the most requests that run at once.
    :param max_num_batched_tokens: the token budget of one step.
    :param max_waiting: the most requests that may wait; one more is refused.
    :param prefix_caching: reuse the blocks of earlier requests that share a prefix.
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int = 8192
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_waiting: int = 2048
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an :class:`~fullbore_backend.Engine` is built from.

    :param model: a built-in name (``smollm2-135m``), a ``.gguf`` file, a folder of safetensors, or
        a Hugging Face hub id.
    :param served_name: the name requests use; ``None`` derives it from ``model``.
    :param precision: of weights and activations; ``auto`` is bf16 on a GPU, and on a CPU int8 where
        the model and the machine allow it, else fp32. int8 and fp8 are of the weights of linear
        maps, the output head's apart, and of what they are multiplied with; int4 is of weights
        alone. Everything else is bf16 on a GPU and fp32 on a CPU then. On a CPU int8 goes by groups
        of 64, the output head included. A checkpoint that is quantised stays as it is with
        ``auto`` (but for a CPU's int8); what else is named here, it is widened or quantised to.
    :param kv_precision: of the KV cache; ``auto`` is that of the activations, and bf16 beside int8
        weights. fp8 (e4m3) and int8 have a scale for each token and head.
    :param device: ``auto``, ``cpu`` or ``cuda``.
    :param kv_cache_bytes: size of the KV pool; ``None`` takes a share of the memory available.
    :param max_model_len: tokens; ``None`` takes the model's own limit, or that of its training if
        longer sequences change the angles of all (rope scaling ``dynamic`` and ``longrope``).
    :param overlap: schedule and launch a step while the one before is computed; ``None`` does so on
        a GPU.
    :param graphs: on a GPU, capture decode steps as CUDA graphs before the first request.
    :param cache_dir: where fetched models are kept; ``None`` is the user's cache folder.
    :param num_threads: CPU threads for torch; ``None`` leaves torch's choice.
    """

    model: str = DEFAULT_MODEL
    served_name: str | None = None
    precision: Precision = "auto"
    kv_precision: KvPrecision = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kv_cache_bytes: int | None = None
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_waiting: int = 2048
    prefix_caching: bool = True
    overlap: bool | None = None
    graphs: bool = True
    cache_dir: Path | None = None
    num_threads: int | None = None

    def validate(self) -> None:
        """Check what can be checked without loading anything.

        :raises ConfigError: naming the setting, its value and what is allowed.
        """
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}; it must be a power of two.")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        for name in ("kv_cache_bytes", "max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1, or left out.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}): running requests could not all get a token each step. "
                "Raise the first or lower the second."
            )
