"""Fixtures of the client's tests: every async test runs on asyncio and on trio."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loop a test runs on."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _no_ambient_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own keys, endpoints and proxies out of the tests."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OXLO_API_KEY", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
