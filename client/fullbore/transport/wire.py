"""The JSON of OpenAI's API, read straight from bytes, and what an answer grows into.

Owns the shapes (only the fields we use; others are skipped undecoded), the growing
:class:`Answer`, and the reading of error bodies. Knows nothing of connections.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from .. import errors
from .._types import Choice, ToolCall, Usage

logger = logging.getLogger("fullbore.transport")


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None


class WireUsage(msgspec.Struct):
    """``usage`` as endpoints send it; the newer ``input_tokens`` names are read too."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    prompt_cache_hit_tokens: int | None = None  # DeepSeek's name


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: msgspec.Raw = msgspec.Raw()


class WireAnswer(msgspec.Struct):
    """One chunk of a streamed answer, or a whole unstreamed one."""

    choices: list[_Choice] | None = None
    usage: WireUsage | None = None
    model: str | None = None
    service_tier: str | None = None
    error: Any = None


class _AnswerOfUnreadUsage(WireAnswer):
    usage: Any = None


decode = msgspec.json.Decoder(WireAnswer).decode
_decode_without_usage = msgspec.json.Decoder(_AnswerOfUnreadUsage).decode


def read_usage(wire: WireUsage, *, service_tier: str | None = None) -> Usage:
    """Partition reported tokens so that each is counted once; clamp what does not add up."""
    given = wire.prompt_tokens if wire.prompt_tokens is not None else wire.input_tokens
    made = wire.completion_tokens if wire.completion_tokens is not None else wire.output_tokens
    in_details = wire.prompt_tokens_details or wire.input_tokens_details or _Details()
    out_details = wire.completion_tokens_details or wire.output_tokens_details or _Details()
    reported = (
        given or 0,
        in_details.cached_tokens or wire.prompt_cache_hit_tokens or 0,
        in_details.cache_write_tokens or 0,
        made or 0,
        out_details.reasoning_tokens or 0,
    )
    whole_in, whole_out = max(reported[0], 0), max(reported[3], 0)
    cached = min(max(reported[1], 0), whole_in)
    written = min(max(reported[2], 0), whole_in - cached)
    reasoning = min(max(reported[4], 0), whole_out)
    return Usage(
        input_tokens=whole_in,
        cached_tokens=cached,
        cache_write_tokens=written,
        output_tokens=whole_out,
        reasoning_tokens=reasoning,
        service_tier=service_tier,
        clamped=reported != (whole_in, cached, written, whole_out, reasoning),
    )


class _GrowingChoice:
    __slots__ = ("finish_reason", "logprobs", "reasoning", "text", "tools")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.finish_reason: str | None = None
        self.logprobs: list[msgspec.Raw] = []
        self.tools: dict[int, list[str]] = {}  # index → id, name, arguments...

    def add(self, choice: _Choice) -> int:
        """Take in one piece; return how many pieces of text, reasoning or tool call it held."""
        pieces = 0
        message = choice.delta or choice.message
        content = choice.text
        if message is not None:
            content = message.content or message.refusal
            reasoning = message.reasoning_content or message.reasoning
            if reasoning:
                self.reasoning.append(reasoning)
                pieces = 1
            if message.tool_calls:
                self._add_tools(message.tool_calls)
                pieces = 1
        if content:
            self.text.append(content)
            pieces = 1
        if choice.finish_reason:  # some servers send "" until the last chunk
            self.finish_reason = choice.finish_reason
        if len(choice.logprobs) > len(b"null"):
            self.logprobs.append(choice.logprobs.copy())  # a copy, or the whole chunk stays alive
        return pieces

    def _add_tools(self, calls: list[_ToolCall]) -> None:
        for position, call in enumerate(calls):
            index = position if call.index is None else call.index
            tool = self.tools.setdefault(index, ["", ""])
            if call.id:
                tool[0] = call.id
            if call.function is not None:
                tool[1] = call.function.name or tool[1]
                if call.function.arguments:
                    tool.append(call.function.arguments)

    def freeze(self, index: int) -> Choice:
        return Choice(
            index=index,
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            finish_reason=self.finish_reason,
            tool_calls=tuple(
                ToolCall(id=tool[0], name=tool[1], arguments="".join(tool[2:]))
                for _, tool in sorted(self.tools.items())
            ),
            logprobs=_join_logprobs(self.logprobs) if self.logprobs else None,
        )


class Answer:
    """An answer as it grows.

    ``parts`` holds the pieces of text of the first choice, in order of arrival; ``pieces`` counts
    pieces of text, reasoning and tool calls of all choices, about one a token when streamed.
    """

    __slots__ = ("_first", "_others", "done", "model", "parts", "pieces", "tier", "usage")

    def __init__(self) -> None:
        self._first = _GrowingChoice()
        self._others: dict[int, _GrowingChoice] = {}
        self.parts = self._first.text
        self.pieces = 0
        self.usage: Usage | None = None
        self.model = ""
        self.tier: str | None = None
        self.done = False
        """Whether the end mark (``[DONE]``, or the whole of an unstreamed answer) has come."""

    @property
    def text(self) -> str:
        """The text of the first choice so far."""
        return "".join(self.parts)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing: the end mark, or a finish reason for every choice."""
        if self.done:
            return True
        return self._first.finish_reason is not None and all(
            choice.finish_reason for choice in self._others.values()
        )

    @property
    def estimated_output_tokens(self) -> int:
        """A guess for when the endpoint does not say: a token a piece, or four letters."""
        letters = sum(
            sum(map(len, choice.text)) + sum(map(len, choice.reasoning))
            for choice in (self._first, *self._others.values())
        )
        return max(self.pieces, letters // 4)

    def add(self, data: bytes) -> None:
        """Take in the JSON of a chunk, or of a whole answer.

        :raises AnswerFailedError: it is an error object.
        :raises MalformedAnswerError: it is not of the expected shape.
        """
        try:
            wire = decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            wire = self._decode_rest(data, exc)
        if wire.error is not None:
            raise read_answer_error(wire.error, partial=self.text)
        for choice in wire.choices or ():
            growing = self._first if choice.index == 0 else self._other(choice.index)
            self.pieces += growing.add(choice)
        if wire.service_tier:
            self.tier = wire.service_tier
        if wire.usage is not None:
            self.usage = read_usage(wire.usage, service_tier=self.tier)
        if wire.model and not self.model:
            self.model = wire.model

    def _decode_rest(self, data: bytes, exc: Exception) -> WireAnswer:
        """Read what cannot be read whole: an answer is not thrown away because of its usage."""
        try:
            wire: WireAnswer = _decode_without_usage(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise errors.MalformedAnswerError(
                f"The endpoint sent something that is no answer ({exc}): {_start(data)}",
                partial=self.text,
            ) from exc
        logger.warning("The endpoint reports usage that cannot be read (%s): estimated.", exc)
        wire.usage = None
        return wire

    def _other(self, index: int) -> _GrowingChoice:
        return self._others.setdefault(index, _GrowingChoice())

    def choices(self) -> tuple[Choice, ...]:
        """Return the choices as they are now."""
        return (
            self._first.freeze(0),
            *(choice.freeze(index) for index, choice in sorted(self._others.items())),
        )


def _join_logprobs(pieces: list[msgspec.Raw]) -> Mapping[str, Any]:
    joined: dict[str, Any] = {}
    for piece in pieces:
        for name, value in msgspec.json.decode(piece, type=dict[str, Any]).items():
            if isinstance(value, list) and isinstance(joined.get(name), list):
                joined[name] += value
            elif value is not None or name not in joined:
                joined[name] = value
    return joined


def read_answer_error(error: Any, *, partial: str = "") -> errors.AnswerFailedError:
    """Turn an error object found inside a 200 answer into the exception it means."""
    fields = error if isinstance(error, Mapping) else {"message": str(error)}
    message = fields.get("message") or "no message"
    return errors.AnswerFailedError(
        f"The endpoint reported an error inside its answer: {message}",
        partial=partial,
        code=_text(fields.get("code")),
        type=_text(fields.get("type")),
    )


def read_error_event(data: bytes, *, partial: str = "") -> errors.AnswerFailedError:
    """Turn the data of an ``event: error`` into the exception it means, whatever its shape."""
    return read_answer_error(_error_fields(data) or _start(data), partial=partial)


_QUOTA_CODES = frozenset({"insufficient_quota", "billing_hard_limit_reached"})
_STATUS_CLASSES: dict[int, type[errors.StatusError]] = {
    400: errors.BadRequestError,
    413: errors.BadRequestError,
    422: errors.BadRequestError,
    401: errors.AuthenticationError,
    403: errors.AuthenticationError,
    404: errors.NotFoundError,
    429: errors.RateLimitError,
    503: errors.OverloadedError,
    529: errors.OverloadedError,
}


def read_status_error(
    status: int, headers: Mapping[str, str], body: bytes, *, retry_after: float | None
) -> errors.StatusError:
    """Turn an error status and its body into the exception it means.

    Reads OpenAI's error object and the shapes that FastAPI (``detail``) and others use.
    """
    fields = _error_fields(body)
    code, type_ = _text(fields.get("code")), _text(fields.get("type"))
    kind = _STATUS_CLASSES.get(status)
    if kind is None:
        kind = errors.ServerError if status >= 500 else errors.StatusError
    if status == 429 and (code in _QUOTA_CODES or type_ in _QUOTA_CODES):
        kind = errors.QuotaExceededError
    message = fields.get("message") or _start(body) or "no body"
    hint = " Does the base URL lack '/v1'?" if status in (404, 405) else ""
    if 300 <= status < 400:
        hint = f" It redirects to {headers.get('location')!r}: use that as the base URL."
    should_retry = {"true": True, "false": False}.get(headers.get("x-should-retry", ""))
    return kind(
        f"The endpoint answered {status}: {message}{hint}",
        status=status,
        code=code,
        type=type_,
        param=_text(fields.get("param")),
        body=_start(body, 2000),
        request_id=headers.get("x-request-id"),
        retry_after=retry_after,
        should_retry=should_retry,
    )


def _error_fields(body: bytes) -> Mapping[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    if not isinstance(value, Mapping):
        return {}
    for name in ("error", "detail"):
        inner = value.get(name)
        if isinstance(inner, Mapping):
            return inner
        if inner:
            return {"message": str(inner)}
    return value


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _start(data: bytes, limit: int = 300) -> str:
    text = data[: limit + 1].decode("utf-8", "replace").strip()
    return text if len(text) <= limit else text[:limit] + "…"
