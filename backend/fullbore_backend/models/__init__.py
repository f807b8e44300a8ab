"""The models this engine runs, by Hugging Face ``model_type``: one short module each."""

from __future__ import annotations

from ..errors import ModelError
from .llama import Llama

MODELS: dict[str, type[Llama]] = {"llama": Llama, "mistral": Llama}


def model_class(model_type: str) -> type[Llama]:
    """The class that runs ``model_type``.

    :raises ModelError: when there is none.
    """
    try:
        return MODELS[model_type]
    except KeyError:
        known = ", ".join(sorted(MODELS))
        raise ModelError(
            f"model type {model_type!r} is not supported; known are {known}."
        ) from None
