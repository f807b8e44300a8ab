"""How failures are spoken over HTTP: a status, and OpenAI's error object.

Owns the table from the backend's errors to statuses. It does not know which endpoint failed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ..errors import (
    BackendError,
    ContextLengthError,
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
    StepFailedError,
)

Headers = Sequence[tuple[bytes, bytes]]


class HttpError(Exception):
    """A request that is refused before the engine sees it: route, key, size, media type, model."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers


# The most derived class first: the first match decides.
STATUS_OF: tuple[tuple[type[BackendError], int, str | None], ...] = (
    (ContextLengthError, 400, "context_length_exceeded"),
    (InvalidRequestError, 400, None),
    (QueueFullError, 429, "queue_full"),
    (RequestError, 400, None),
    (EngineStoppedError, 503, "engine_stopped"),
    (StepFailedError, 500, "step_failed"),
    (BackendError, 500, None),
)

_TYPE_OF = {401: "authentication_error", 429: "rate_limit_error"}


def describe(error: BackendError | HttpError) -> tuple[int, bytes, Headers]:
    """Status, JSON body and extra headers of the response to a failure."""
    if isinstance(error, HttpError):
        body = error_object(error.status, str(error), param=error.param, code=error.code)
        return error.status, body, error.headers
    status, code = next((s, c) for cls, s, c in STATUS_OF if isinstance(error, cls))
    param = error.param if isinstance(error, RequestError) else None
    headers: Headers = ()
    if isinstance(error, QueueFullError):
        headers = ((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))),)
    return status, error_object(status, str(error), param=param, code=code), headers


def error_object(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> bytes:
    """OpenAI's error object as JSON."""
    kind = _TYPE_OF.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})
