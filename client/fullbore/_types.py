"""The values users hold: what was asked, what came back, what it took.

All frozen. Times are seconds, prices are US dollars as ``Decimal``. This file knows nothing of
the wire: see ``_wire`` for what JSON they are made from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from .errors import FullboreError

OnError = Literal["return", "raise"]
"""What a failed request becomes: a :class:`Result` with ``error`` set, or an exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits on time, in seconds; ``None`` is no limit.

    :param connect: to open a connection, TLS included.
    :param first_token: from sending a streamed request to its first text. Keep-alive comments do
        not count as text.
    :param stall: between two pieces of a streamed answer; noticed at most an eighth late.
    :param total: from sending the first attempt to the end of the last, waits between attempts
        included. It holds against an answer that trickles. Not counted: the wait for admission
        before the first attempt, and the time in which the consumer of a ``stream`` does not read.
    """

    connect: float | None = 10.0
    first_token: float | None = 300.0
    stall: float | None = 120.0
    total: float | None = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One rendered request.

    :param index: position of the prompt in its input.
    :param input: the prompt as it was given.
    :param path: below the base URL: ``chat/completions`` or ``completions``.
    :param body: the JSON object that is sent.
    :param content: the same, encoded.
    :param stream: whether a streamed answer is asked for.
    :param id: the prompt's own ``custom_id``, if it has one.
    :param label: what the ledger files it under, besides the model.
    """

    index: int
    input: Any
    path: str
    body: Mapping[str, Any]
    content: bytes
    stream: bool
    id: str | None = None
    label: str | None = None

    @property
    def model(self) -> str:
        """The model asked for."""
        return str(self.body.get("model", ""))

    @property
    def estimated_input_tokens(self) -> int:
        """A guess from the size of the body: four bytes a token."""
        return len(self.content) // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one answer, each counted once.

    :param input_tokens: the whole prompt, cached and cache-written tokens included.
    :param cached_tokens: the part of ``input_tokens`` read from a cache.
    :param cache_write_tokens: the part of ``input_tokens`` written to a cache.
    :param output_tokens: everything generated, reasoning included.
    :param reasoning_tokens: the part of ``output_tokens`` spent on reasoning.
    :param service_tier: the tier that answered, where the endpoint says so.
    :param estimated: the endpoint reported no usage; these are guesses.
    :param clamped: the report did not add up (more cached than input tokens, say) and was cut.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    service_tier: str | None = None
    estimated: bool = False
    clamped: bool = False

    @property
    def total_tokens(self) -> int:
        """Input and output together."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where the time of an attempt, or of a whole request, went: seconds.

    :param queue: waiting for admission by the client's own limiter.
    :param first_token: from sending to the first text; ``None`` for an unstreamed answer or if
        none came. Of a whole request: of its last attempt.
    :param total: of an attempt, from sending to its end; of a whole request, from the first wait
        for admission to the end, all attempts and the waits between them included.
    """

    queue: float = 0.0
    first_token: float | None = None
    total: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a request.

    :param status: the HTTP status, ``None`` if none came.
    :param error: why it failed, ``None`` if it did not.
    :param billed: whether it is charged for: ``"maybe"`` when it broke after it was sent.
    """

    timing: Timing
    status: int | None = None
    error: FullboreError | None = None
    billed: Literal["yes", "no", "maybe"] = "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool that the model asks for; ``arguments`` is the JSON text it wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the ``n`` answers to a prompt.

    :param reasoning: the model's reasoning, where the endpoint shows it.
    :param logprobs: as the endpoint sent them, the chunks of a stream joined.
    """

    index: int = 0
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one prompt.

    :param index: position of the prompt in its input.
    :param input: the prompt as it was given.
    :param text: of the first choice; the part that had arrived if ``error`` is set.
    :param error: why the request failed, or ``None``.
    :param usage: tokens of the answer that counts. Those of failed attempts are on the ledger.
    :param cost: price of the answer that counts; ``None`` if the plan has no price for it.
    :param finish_reason: of the first choice: ``stop``, ``length``, ``tool_calls``, ...
    :param choices: all ``n`` of them, with tool calls, reasoning and logprobs.
    :param attempts: every try, the last one last.
    :param model: the model that answered, as the endpoint names it.
    :param id: the prompt's own ``custom_id``.
    :param label: what the ledger files it under.
    """

    index: int
    input: Any
    text: str = ""
    error: FullboreError | None = None
    usage: Usage = Usage()
    cost: Decimal | None = None
    finish_reason: str | None = None
    timing: Timing = Timing()
    choices: tuple[Choice, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    model: str = ""
    id: str | None = None
    label: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the prompt was answered in full."""
        return self.error is None

    @property
    def reasoning(self) -> str:
        """The reasoning of the first choice, where the endpoint shows it."""
        return self.choices[0].reasoning if self.choices else ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the first choice."""
        return self.choices[0].tool_calls if self.choices else ()
