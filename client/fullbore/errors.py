"""Everything the client raises on purpose.

::

    FullboreError
    ├── ConfigError                  a setting that cannot work; raised before anything is sent
    ├── ClientStateError             the client is used when or where it cannot be
    │   ├── ClientClosedError        it is not open yet, or closed already
    │   └── WrongLoopError           it was opened in another event loop or thread
    ├── PromptError                  a prompt that is not one of the accepted shapes
    └── RequestError                 one request failed; ``partial`` holds the text it had yielded
        ├── ConnectionFailedError    no connection: refused, DNS, TLS, proxy
        │   └── ConnectTimeoutError  ... within the time allowed
        ├── ConnectionLostError      reset or closed before the answer was complete
        ├── DeadlineError            one of our own limits on time
        │   ├── FirstTokenTimeoutError
        │   ├── StallTimeoutError
        │   └── TotalTimeoutError
        ├── StatusError              the endpoint answered with an error status
        │   ├── BadRequestError          400, 413, 422
        │   ├── AuthenticationError      401, 403
        │   ├── NotFoundError            404
        │   ├── RateLimitError           429
        │   │   ├── QuotaExceededError       ... and waiting will not help
        │   │   └── RetryAfterTooLongError   ... for longer than the request may take
        │   └── ServerError              5xx
        │       └── OverloadedError          503, 529
        ├── AnswerFailedError        an error object inside a 200 answer
        ├── IncompleteStreamError    the stream ended without its end mark
        └── MalformedAnswerError     neither the JSON nor the event stream that was expected

Catch :class:`RequestError` for "this request failed", :class:`FullboreError` for everything.
All of them can be pickled. No message and no field ever holds an API key.
"""

from __future__ import annotations


class FullboreError(Exception):
    """Base class of every error this package raises on purpose."""


class ConfigError(FullboreError, ValueError):
    """A setting that cannot work."""


class ClientStateError(FullboreError, RuntimeError):
    """The client is used when, or where, it cannot be."""


class ClientClosedError(ClientStateError):
    """The client is not open yet, or closed already."""


class WrongLoopError(ClientStateError):
    """The client was opened in another event loop or thread."""


class PromptError(FullboreError, ValueError):
    """A prompt that is neither a string, nor a list of messages, nor a mapping of fields."""


class RequestError(FullboreError):
    """One request failed.

    ``partial`` is the text that had arrived before it failed, ``""`` if none had.
    """

    def __init__(self, message: str = "", *, partial: str = "") -> None:
        super().__init__(message)
        self.partial = partial

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed when sent again."""
        return False

    @property
    def may_be_billed(self) -> bool:
        """Whether the endpoint may charge for the attempt all the same."""
        return True


class ConnectionFailedError(RequestError):
    """No connection could be made, so nothing was sent."""

    @property
    def retryable(self) -> bool:
        """A later attempt may find the endpoint up."""
        return True

    @property
    def may_be_billed(self) -> bool:
        """Nothing was sent."""
        return False


class ConnectTimeoutError(ConnectionFailedError):
    """No connection within ``Timeouts.connect``."""


class ConnectionLostError(RequestError):
    """The connection was reset or closed before the answer was complete.

    ``answered`` tells whether any part of the answer, if only its status line, had come.
    """

    def __init__(self, message: str = "", *, partial: str = "", answered: bool = False) -> None:
        super().__init__(message, partial=partial)
        self.answered = answered

    @property
    def retryable(self) -> bool:
        """Another connection may hold."""
        return True


class DeadlineError(RequestError):
    """One of our own limits on time."""


class FirstTokenTimeoutError(DeadlineError):
    """No text within ``Timeouts.first_token`` of sending the request."""

    @property
    def retryable(self) -> bool:
        """Another attempt may meet a shorter queue."""
        return True


class StallTimeoutError(DeadlineError):
    """No text for ``Timeouts.stall`` in the middle of an answer."""

    @property
    def retryable(self) -> bool:
        """Another attempt may meet a healthier server."""
        return True


class TotalTimeoutError(DeadlineError):
    """The request, all attempts together, took longer than ``Timeouts.total``."""


class StatusError(RequestError):
    """The endpoint answered with an error status.

    :param status: the HTTP status.
    :param code: ``error.code`` of the body, as text.
    :param type: ``error.type`` of the body.
    :param param: ``error.param`` of the body: the request field at fault.
    :param body: the start of the body, as text.
    :param request_id: the ``x-request-id`` header, for the provider's support.
    :param retry_after: seconds the endpoint asks to wait.
    :param should_retry: the ``x-should-retry`` header, where the endpoint sends it.
    """

    def __init__(
        self,
        message: str = "",
        *,
        partial: str = "",
        status: int = 0,
        code: str | None = None,
        type: str | None = None,
        param: str | None = None,
        body: str = "",
        request_id: str | None = None,
        retry_after: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message, partial=partial)
        self.status = status
        self.code = code
        self.type = type
        self.param = param
        self.body = body
        self.request_id = request_id
        self.retry_after = retry_after
        self.should_retry = should_retry

    @property
    def retryable(self) -> bool:
        """408, 409, 425, 429 and 5xx, unless the endpoint's ``x-should-retry`` says otherwise."""
        if self.should_retry is not None:
            return self.should_retry
        return self.status in (408, 409, 425, 429) or self.status >= 500

    @property
    def may_be_billed(self) -> bool:
        """Only where a gateway gave up on a server that may still have worked."""
        return self.status in (408, 504, 524)


class BadRequestError(StatusError):
    """The endpoint refuses the request as it is (400, 413, 422)."""


class AuthenticationError(StatusError):
    """The API key is missing, wrong, or not allowed to do this (401, 403)."""


class NotFoundError(StatusError):
    """No such model or path (404)."""


class RateLimitError(StatusError):
    """Too many requests or tokens (429)."""


class QuotaExceededError(RateLimitError):
    """The account's quota or credit is used up: waiting will not help (429)."""

    @property
    def retryable(self) -> bool:
        """Only money helps."""
        return False


class RetryAfterTooLongError(RateLimitError):
    """The endpoint asks to wait for longer than the request may take; not waited for."""

    @property
    def retryable(self) -> bool:
        """Not within this request's time."""
        return False


class ServerError(StatusError):
    """The endpoint failed (5xx)."""


class OverloadedError(ServerError):
    """The endpoint has no capacity at the moment (503, 529)."""


class AnswerFailedError(RequestError):
    """The endpoint sent an error object inside a 200 answer.

    ``code`` and ``type`` are its fields, as text.
    """

    def __init__(
        self,
        message: str = "",
        *,
        partial: str = "",
        code: str | None = None,
        type: str | None = None,
    ) -> None:
        super().__init__(message, partial=partial)
        self.code = code
        self.type = type

    @property
    def retryable(self) -> bool:
        """Unless it says that the request itself is at fault."""
        code = self.code or ""
        if code.isdigit() and 400 <= int(code) < 500:
            return int(code) in (408, 409, 425, 429)
        return "invalid" not in (self.type or "") and "BadRequest" not in (self.type or "")


class IncompleteStreamError(RequestError):
    """The stream ended without a finish reason and without ``[DONE]``."""

    @property
    def retryable(self) -> bool:
        """The server cut it short; another attempt may be whole."""
        return True


class MalformedAnswerError(RequestError):
    """The answer is neither the JSON nor the event stream that was expected."""
