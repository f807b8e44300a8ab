"""Push LLM endpoints to full throughput: an async client for OpenAI-compatible APIs.

Importing this package imports neither ``openai`` nor ``rich`` nor ``genai_prices``: each is
loaded when it is first needed.
"""

from __future__ import annotations

from ._client import Client
from ._hedge import Hedge
from ._http_client import HTTPClient, http_client
from ._map import MapRun
from ._moves import MoveStream
from ._prompt import Prompt
from ._retry import Retry
from ._stats import Observer, Quantiles, RunStats
from ._stream import TextStream
from ._types import Attempt, Choice, Request, Result, Timeouts, Timing, ToolCall, Usage
from .errors import (
    AnswerFailedError,
    AuthenticationError,
    BadRequestError,
    ClientClosedError,
    ClientStateError,
    ConfigError,
    ConnectionFailedError,
    ConnectionLostError,
    ConnectTimeoutError,
    DeadlineError,
    FirstTokenTimeoutError,
    FullboreError,
    IncompleteStreamError,
    MalformedAnswerError,
    NotFoundError,
    OverloadedError,
    PromptError,
    QuotaExceededError,
    RateLimitError,
    RequestError,
    RetryAfterTooLongError,
    ServerError,
    StallTimeoutError,
    StatusError,
    TotalTimeoutError,
    WrongLoopError,
)
from .limits import Move, Rates
from .pricing import Ledger, PerRequest, PerToken, Plan, Subscription, Totals, oxlo
from .progress import ProgressBar

__version__ = "0.1.0"

__all__ = [
    "AnswerFailedError",
    "Attempt",
    "AuthenticationError",
    "BadRequestError",
    "Choice",
    "Client",
    "ClientClosedError",
    "ClientStateError",
    "ConfigError",
    "ConnectTimeoutError",
    "ConnectionFailedError",
    "ConnectionLostError",
    "DeadlineError",
    "FirstTokenTimeoutError",
    "FullboreError",
    "HTTPClient",
    "Hedge",
    "IncompleteStreamError",
    "Ledger",
    "MalformedAnswerError",
    "MapRun",
    "Move",
    "MoveStream",
    "NotFoundError",
    "Observer",
    "OverloadedError",
    "PerRequest",
    "PerToken",
    "Plan",
    "ProgressBar",
    "Prompt",
    "PromptError",
    "Quantiles",
    "QuotaExceededError",
    "RateLimitError",
    "Rates",
    "Request",
    "RequestError",
    "Result",
    "Retry",
    "RetryAfterTooLongError",
    "RunStats",
    "ServerError",
    "StallTimeoutError",
    "StatusError",
    "Subscription",
    "TextStream",
    "Timeouts",
    "Timing",
    "ToolCall",
    "TotalTimeoutError",
    "Totals",
    "Usage",
    "WrongLoopError",
    "__version__",
    "http_client",
    "oxlo",
]
