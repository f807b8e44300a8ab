"""A JSON object read field by field, each with its type; what nobody read is refused.

``null`` is the same as absent, as in OpenAI's API. Every refusal names the field and its value. It
does not know which fields exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import InvalidRequestError

MAX_INT = 2**63 - 1


class Fields:
    """The fields of one JSON object; reading a field takes it out.

    :param values: the object.
    :param where: the object's path in the request, such as ``messages[0]``; empty for the body.
    """

    __slots__ = ("_values", "_where")

    def __init__(self, values: Mapping[str, Any], *, where: str = "") -> None:
        self._values = dict(values)
        self._where = where

    def path(self, name: str) -> str:
        """The full name of a field, as error messages and ``param`` give it."""
        return f"{self._where}.{name}" if self._where else name

    def take(self, name: str) -> Any:
        """The value as it is, or ``None``."""
        return self._values.pop(name, None)

    def refuse(self, name: str, value: object, expected: str) -> InvalidRequestError:
        """The error that says a field's value is not what it must be."""
        path = self.path(name)
        return InvalidRequestError(f"{path} is {shown(value)}; it must be {expected}.", param=path)

    def boolean(self, name: str) -> bool:
        """True or false; false if absent."""
        value = self.take(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.refuse(name, value, "true or false")

    def integer(
        self, name: str, default: int | None = None, *, low: int = -MAX_INT, high: int = MAX_INT
    ) -> int | None:
        """An integer in [low, high]. JSON's ``1.0`` is not one."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, value, "an integer")
        if not low <= value <= high:
            expected = f"at least {low}" if high == MAX_INT else f"between {low} and {high}"
            raise self.refuse(name, value, expected)
        return value

    def number(self, name: str, default: float) -> float:
        """A number; its range is the concern of the reader."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, value, "a number")
        return value

    def string(self, name: str) -> str | None:
        """A string, possibly empty."""
        value = self.take(name)
        if value is None or isinstance(value, str):
            return value
        raise self.refuse(name, value, "a string")

    def strings(self, name: str) -> tuple[str, ...]:
        """A string, or a list of strings; empty if absent."""
        value = self.take(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise self.refuse(name, value, "a string or a list of strings")

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers; empty if absent."""
        value = self.take(name)
        if value is None:
            return ()
        if is_token_ids(value):
            return tuple(value)
        raise self.refuse(name, value, "a list of integers")

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """A JSON object."""
        value = self.take(name)
        if value is None or isinstance(value, dict):
            return value
        raise self.refuse(name, value, "an object")

    def only(self, name: str, *neutral: object) -> None:
        """Accept a field that is not implemented only with a value that asks for nothing."""
        value = self.take(name)
        if value is None or any(value == n and type(value) is type(n) for n in neutral):
            return
        path = self.path(name)
        allowed = " or ".join(["null", *(shown(n) for n in neutral)])
        raise InvalidRequestError(
            f"{path} is {shown(value)}, which this server does not support; leave it out, or send "
            f"{allowed}.",
            param=path,
        )

    def done(self) -> None:
        """Refuse what is left.

        :raises InvalidRequestError: naming a field that nobody read.
        """
        for name in self._values:
            path = self.path(name[:64])
            raise InvalidRequestError(
                f"{path} is not a field this server knows; leave it out.", param=path
            )


def parse_object(body: bytes) -> Fields:
    """Decode a request body.

    :raises InvalidRequestError: it is not a JSON object in UTF-8.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"The request body is {shown(value)}; it must be a JSON object.")
    return Fields(value)


def is_token_ids(value: object) -> bool:
    """Whether this is a list of integers; ``true`` is none."""
    return isinstance(value, list) and all(type(item) is int for item in value)


def shown(value: object) -> str:
    """A JSON value for an error message, cut to a readable length."""
    try:
        text = msgspec.json.encode(value).decode()
    except (msgspec.EncodeError, OverflowError, RecursionError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
