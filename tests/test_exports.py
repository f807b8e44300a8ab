"""The public face of both packages: ``__all__`` is what there is, and all of it is documented."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

PACKAGES = ("fullbore", "fullbore_backend")


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def test_all_is_sorted(package: ModuleType) -> None:
    """A sorted list merges without conflicts and is quick to read."""
    assert list(package.__all__) == sorted(package.__all__)


def test_all_is_what_there_is(package: ModuleType) -> None:
    """Nothing public is missing from ``__all__``, and nothing in it is missing from the package."""
    for name in package.__all__:
        assert hasattr(package, name), name
    unlisted = [
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and name not in package.__all__
        if not isinstance(value, ModuleType) and not _borrowed(value, package)
    ]
    assert not unlisted


def _borrowed(value: object, package: ModuleType) -> bool:
    """Whether the package only uses this name: it is from elsewhere, like ``typing.Any``."""
    home = getattr(value, "__module__", None)
    if home is None:
        return value is TYPE_CHECKING
    return home.partition(".")[0] != package.__name__


def test_every_public_name_is_documented(package: ModuleType) -> None:
    """Classes and functions say what they are, in words of their own."""
    assert package.__doc__
    silent = []
    for name in package.__all__:
        value = getattr(package, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        made_by_dataclass = (value.__doc__ or "").startswith(f"{name}(")
        if not value.__doc__ or made_by_dataclass:
            silent.append(name)
    assert not silent


def test_every_public_method_is_documented(package: ModuleType) -> None:
    """So do the public methods and properties of the public classes."""
    silent = [
        f"{name}.{attribute}"
        for name in package.__all__
        if inspect.isclass(value := getattr(package, name))
        for attribute, member in vars(value).items()
        if not attribute.startswith("_")
        if isinstance(member, property | staticmethod | classmethod) or inspect.isfunction(member)
        if not member.__doc__
    ]
    assert not silent
