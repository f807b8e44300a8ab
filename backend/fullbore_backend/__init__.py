"""Fullbore's reference inference engine and OpenAI-compatible server.

::

    from fullbore_backend import Engine, SamplingParams

    engine = Engine()
    for completion in engine.generate(["The sea is"], SamplingParams(max_tokens=16)):
        print(completion.text)

The server is in :mod:`fullbore_backend.server`; nothing here imports it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import EngineConfig
from .errors import (
    BackendError,
    ConfigError,
    ContextLengthError,
    EngineError,
    EngineStoppedError,
    InvalidRequestError,
    ModelError,
    ModelFetchError,
    QueueFullError,
    RequestError,
    StepFailedError,
)
from .request import Completion, Delta, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from .async_engine import AsyncEngine, RequestStream
    from .engine import Engine, EngineStats

__all__ = [
    "AsyncEngine",
    "BackendError",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "EngineStoppedError",
    "InvalidRequestError",
    "ModelError",
    "ModelFetchError",
    "QueueFullError",
    "RequestError",
    "RequestStream",
    "SamplingParams",
    "StepFailedError",
    "TokenLogprobs",
]

# These bring in torch, which takes a second: `fullbore serve --help` should not wait for it.
_LAZY = {
    "AsyncEngine": "async_engine",
    "Engine": "engine",
    "EngineStats": "engine",
    "RequestStream": "async_engine",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
