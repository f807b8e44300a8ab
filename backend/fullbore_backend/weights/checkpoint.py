"""What every model file offers, and which reader opens it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ModelError

if TYPE_CHECKING:
    import torch

    from .parts import Weight


class Checkpoint(Protocol):
    """A model's configuration and weights, in Hugging Face's vocabulary whatever the file format.

    ``config`` has the keys of a ``config.json``, normalised (:mod:`.config_json` lists them), so
    that a model class reads one form. ``eos_token_ids`` holds every id that ends a sequence.
    """

    @property
    def path(self) -> Path:
        """The file or folder that was opened."""

    @property
    def model_type(self) -> str:
        """What kind of model it is, in transformers' words."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The normalised configuration, read-only.

        :raises ModelError: when it does not have the keys that our models need. One that
            transformers runs may name them otherwise.
        """

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every end-of-sequence id the files name, in the order found."""

    @property
    def quantization(self) -> str | None:
        """How weights are quantised, if :meth:`tensors` yields them so."""

    def tensors(self, *, dtype: torch.dtype) -> Iterator[tuple[str, Weight]]:
        """Yield ``(name, tensor)`` on the CPU, one at a time, in file order.

        Names are Hugging Face's (``model.layers.0.self_attn.q_proj.weight``) and so is the layout:
        ``(out_features, in_features)``, rotary halves not interleaved. Each tensor is a fresh copy.
        Floats come as they are stored, and weights in few bits as they can be multiplied with.

        :param dtype: what is widened here is in.
        :raises ModelError: if the data cannot be read.
        """


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a ``.gguf`` file or a folder of safetensors; weights are read later, by ``tensors``.

    :raises ModelError: naming the file that is missing, broken or of an unknown kind.
    """
    if path.is_dir():
        from .safetensors import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path)
    if path.is_file():
        from .gguf import GGUFCheckpoint

        return GGUFCheckpoint(path)
    raise ModelError(f"{path} does not exist. Give a .gguf file or a folder of safetensors.")
