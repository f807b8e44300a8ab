"""Everything the backend raises on purpose.

::

    BackendError
    ├── ConfigError            a setting that cannot work; raised before anything starts
    ├── ModelError             a model that cannot be found, read or run
    │   └── ModelFetchError    the download failed or its checksum differs
    ├── RequestError           one request is at fault; the engine goes on
    │   ├── InvalidRequestError    a field is out of range (HTTP 400)
    │   ├── ContextLengthError     it can never fit the context or the KV cache (HTTP 400)
    │   └── QueueFullError         too many requests wait; retry later (HTTP 429)
    └── EngineError            the engine is at fault
        ├── EngineStoppedError     it is stopping or has stopped (HTTP 503)
        └── StepFailedError        the step that carried this request raised (HTTP 500)

Messages say what happened, why, and how to fix it.
"""

from __future__ import annotations


class BackendError(Exception):
    """Base class of every error this package raises on purpose."""


class ConfigError(BackendError):
    """A setting that cannot work."""


class ModelError(BackendError):
    """A model that cannot be found, read or run."""


class ModelFetchError(ModelError):
    """A model download failed or its checksum differs from the expected one."""


class RequestError(BackendError):
    """One request is at fault; the engine goes on.

    ``param`` names the request field at fault, as OpenAI's error object does, or is ``None``.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(RequestError):
    """A request field has the wrong type or is out of range."""


class ContextLengthError(InvalidRequestError):
    """A request can never fit the model's context or the KV cache."""


class QueueFullError(RequestError):
    """Too many requests wait already.

    ``retry_after`` is the number of seconds after which a retry is likely to be admitted.
    """

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(BackendError):
    """The engine is at fault, not the request."""


class EngineStoppedError(EngineError):
    """The engine is stopping or has stopped and takes no requests."""


class StepFailedError(EngineError):
    """The step that carried this request raised; its blocks are freed, the engine goes on."""
