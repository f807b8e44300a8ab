"""The application: which path is answered by what. Every failure leaves in OpenAI's error shape."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..async_engine import AsyncEngine
from ..errors import BackendError
from . import metrics
from .chat import read_chat
from .completions import read_completion
from .config import ServerConfig
from .errors import Headers, HttpError, describe
from .fields import Fields
from .gate import Gate
from .generate import Generate
from .http import JSON, respond
from .wire import GenerationRequest

logger = logging.getLogger(__name__)


def create_app(
    engine: AsyncEngine,
    config: ServerConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> Starlette:
    """Build the ASGI application for an engine.

    :param engine: started by the time a request comes; stopping it is the caller's part.
    :param clock: seconds; latencies are measured with it.
    :param wall_clock: seconds since the epoch.
    """
    latencies = metrics.Latencies()
    created = int(wall_clock())

    def generate(read: Callable[[Fields], GenerationRequest], id_prefix: str) -> ASGIApp:
        return Generate(
            engine,
            config,
            latencies,
            read,
            id_prefix=id_prefix,
            fingerprint=_fingerprint(engine),
            clock=clock,
            wall_clock=wall_clock,
        )

    def one_model(scope: Scope) -> Answer:
        name = scope["path_params"]["model"]
        if name != engine.model_name:
            raise HttpError(
                404,
                f"The model {name!r} does not exist here; this server serves "
                f"{engine.model_name!r}.",
                param="model",
                code="model_not_found",
            )
        return Answer(msgspec.json.encode(_model(engine, created)))

    def all_models(scope: Scope) -> Answer:
        models = {"object": "list", "data": [_model(engine, created)]}
        return Answer(msgspec.json.encode(models))

    def prometheus(scope: Scope) -> Answer:
        page = metrics.render(engine.stats(), latencies, model=engine.model_name)
        return Answer(page, content_type=metrics.CONTENT_TYPE)

    posts = {
        "/v1/chat/completions": generate(read_chat, "chatcmpl"),
        "/v1/completions": generate(read_completion, "cmpl"),
    }
    gets = {
        "/v1/models": all_models,
        "/v1/models/{model:path}": one_model,
        "/health": lambda scope: _health(engine),
        "/metrics": prometheus,
    }
    # Handlers return an Answer: Starlette asks no more of a response than to be called.
    handlers: dict[Any, Any] = {
        BackendError: _failed,
        HttpError: _failed,
        HTTPException: _unrouted,
        Exception: _broken,
    }
    app = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(path, Get(answer), methods=["GET"]) for path, answer in gets.items()),
        ],
        middleware=[Middleware(Gate, api_key=config.api_key)],
        exception_handlers=handlers,
    )
    app.router.redirect_slashes = False
    return app


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response; callable as an ASGI application."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: Headers = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await respond(
            scope,
            send,
            self.status,
            self.body,
            content_type=self.content_type,
            headers=self.headers,
        )


class Get:
    """An ASGI application for a path that only reads.

    :param answer: gives the response to a request's scope.
    """

    def __init__(self, answer: Callable[[Scope], Answer]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._answer(scope)(scope, receive, send)


def _health(engine: AsyncEngine) -> Answer:
    if engine.healthy:
        return Answer(b'{"status":"ok"}')
    if engine.death is not None:
        reason = f"the engine died: {type(engine.death).__name__}: {engine.death}"
    else:
        reason = "the engine is not running, or is shutting down"
    return Answer(msgspec.json.encode({"status": "unavailable", "reason": reason}), 503)


def _model(engine: AsyncEngine, created: int) -> dict[str, object]:
    return {
        "id": engine.model_name,
        "object": "model",
        "created": created,
        "owned_by": "fullbore",
        "max_model_len": engine.max_model_len,
    }


def _fingerprint(engine: AsyncEngine) -> str:
    """Changes when the model, or a setting that may change its answers, does."""
    text = f"{engine.model_name}|{engine.max_model_len}|{engine.engine.config!r}"
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _answer(error: BackendError | HttpError) -> Answer:
    status, body, headers = describe(error)
    return Answer(body, status, headers=headers)


async def _failed(request: Request, error: Exception) -> Answer:
    assert isinstance(error, BackendError | HttpError)
    answer = _answer(error)
    if answer.status >= 500:
        logger.error("%s %s: %s", request.method, request.url.path, error)
    return answer


async def _unrouted(request: Request, error: Exception) -> Answer:
    """What the router raises: no such path, or not this method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"There is nothing at {path}."
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 405:
        message = f"{path} does not take {request.method}; it takes {headers.get('allow')}."
    elif error.status_code != 404:
        message = error.detail
    raw = tuple((name.encode(), value.encode()) for name, value in headers.items())
    return _answer(HttpError(error.status_code, message, headers=raw))


async def _broken(request: Request, error: Exception) -> Answer:
    """A fault of ours; it is raised again, and logged, after this was sent."""
    return _answer(HttpError(500, "The server failed at this request; its log says why."))
