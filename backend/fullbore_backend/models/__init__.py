"""The models this engine runs, by Hugging Face ``model_type``: one short module each.

What has none here is run by transformers' code on our paged cache: see :mod:`.any_causal`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ModelError
from ..kernels import Ops
from .any_causal import AnyCausalModel
from .cpu_decoder import CpuDecoder
from .decoder import Decoder, KvLayout
from .deepseek_v3 import deepseek_v3
from .gemma3 import gemma3
from .glm4_moe import glm4_moe
from .gpt_oss import gpt_oss
from .llama import llama
from .qwen import qwen2, qwen3

__all__ = ["MODELS", "AnyCausalModel", "CpuDecoder", "Decoder", "KvLayout", "Model", "build_model"]

Model = Decoder | CpuDecoder | AnyCausalModel

MODELS: Mapping[str, Callable[[Mapping[str, Any], Ops], Decoder]] = {
    "deepseek_v3": deepseek_v3,
    "gemma3_text": gemma3,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "llama": llama,
    "mistral": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3,
}


def build_model(config: Mapping[str, Any], ops: Ops) -> Decoder:
    """The model that a configuration describes, its weights not yet filled in.

    :raises ModelError: when there is none of its type, or for settings that it does not know.
    """
    model_type = str(config.get("model_type"))
    try:
        build = MODELS[model_type]
    except KeyError:
        known = ", ".join(sorted(MODELS))
        raise ModelError(
            f"model type {model_type!r} is not supported; known are {known}."
        ) from None
    try:
        return build(config, ops)
    except KeyError as error:
        raise ModelError(f"the configuration of this {model_type} model lacks {error}.") from None
