"""One live server for the tests of the whole: the default model, in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fullbore_backend.server import BackgroundServer

# As `fullbore serve` does: torch's threads share the cores with servers and clients here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The address of ``fullbore serve``, without a path; it serves ``smollm2-135m``."""
    with BackgroundServer(["--kv-cache-memory", "256MiB"]) as server:
        yield server.url
