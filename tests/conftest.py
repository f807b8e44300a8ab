"""One live server for the tests of the whole: the default model, in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# As `fullbore serve` does: torch's threads share the cores with servers and clients here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Without an NVIDIA driver the Triton kernels run in Triton's interpreter. It is asked for before
# anything imports `fullbore_backend.kernels`, where the kernels are defined.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The address of ``fullbore serve``, without a path; it serves ``smollm2-135m``."""
    from fullbore_backend.server import BackgroundServer  # a GPU machine may lack starlette

    with BackgroundServer(["--kv-cache-memory", "256MiB"]) as server:
        yield server.url
