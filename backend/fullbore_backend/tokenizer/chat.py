"""Chat messages to the text of a prompt, by the model's own template.

Owns the Jinja environment, the shape messages must have, and turning a template's refusal into a
request error. It does not tokenize; the text it returns spells control tokens as
:class:`~.control.ControlSpelling` says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidRequestError
from .control import ControlSpelling
from .literals import rewrite_literals

Clock = Callable[[], datetime]
Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled template."""

    def __init__(
        self, source: str, *, control: ControlSpelling, variables: Mapping[str, str], clock: Clock
    ) -> None:
        """Compile ``source``.

        :param variables: names for control tokens, such as ``bos_token``, and their texts.
        :param clock: what ``strftime_now`` reads.
        :raises jinja2.TemplateSyntaxError: if it is not a template.
        """
        environment = _environment(clock)
        tree = environment.parse(source)
        rewrite_literals(tree, control.trust)
        self._template = environment.from_string(tree)
        self._control = control
        self._variables = {name: control.secret(token) for name, token in variables.items()}

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """The prompt's text.

        :raises InvalidRequestError: if messages are malformed, or the template refuses them (with
            its own words), or ``template_kwargs`` would replace what the template relies on.
        """
        variables = {
            **self._variables,
            "messages": [self._prepared(index, m) for index, m in enumerate(messages)],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if taken := (variables.keys() - {"documents"}) & template_kwargs.keys():
            raise InvalidRequestError(
                f"chat_template_kwargs sets {', '.join(sorted(taken))}; these names are taken.",
                param="chat_template_kwargs",
            )
        try:
            rendered = self._template.render({**variables, **template_kwargs})
        except jinja2.TemplateError as error:
            message = self._control.reveal(str(error))
            raise InvalidRequestError(message, param="messages") from error
        except (
            Exception
        ) as error:  # a template is a program: its faults are the request's, not ours
            reason = self._control.reveal(f"{type(error).__name__}: {error}")
            raise InvalidRequestError(
                f"The model's chat template cannot render these messages: {reason}.",
                param="messages",
            ) from error
        return self._control.resolve(rendered)

    def _prepared(self, index: int, message: Message) -> dict[str, Any]:
        """A copy as templates expect it: content a string, arguments of tool calls an object."""
        fields: Any = message  # whatever the request held, until checked
        if not isinstance(fields, Mapping) or not isinstance(fields.get("role"), str):
            raise _refuse(index, "must be an object with a string `role`")
        prepared = {**fields, "role": self._control.trust_role(fields["role"])}
        if "content" in message:
            prepared["content"] = _joined_content(index, message["content"])
        if calls := message.get("tool_calls"):
            if not isinstance(calls, Sequence) or isinstance(calls, str):
                raise _refuse(index, "has `tool_calls` that are not a list")
            prepared["tool_calls"] = [_prepared_call(index, call) for call in calls]
        return prepared


def _joined_content(index: int, content: Any) -> str | None:
    """Text parts are joined as they are, with nothing between them."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _refuse(index, "has a `content` that is neither text nor a list of parts")
    texts: list[str] = []
    for part in content:
        text = (
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        )
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise _refuse(index, f"has a content part {kind!r}; this model reads text parts only")
        texts.append(text)
    return "".join(texts)


def _prepared_call(index: int, call: Any) -> dict[str, Any]:
    """The wire carries the arguments of a call as JSON text; templates expect what it means."""
    if not isinstance(call, Mapping):
        raise _refuse(index, "has a tool call that is not an object")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _refuse(index: int, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"messages[{index}] {reason}.", param="messages")


def _environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: clock().strftime(layout)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which models have never seen."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """``{% generation %}`` marks what the model wrote, for training; here its body is all of it."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own convention)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
