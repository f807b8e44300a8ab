"""Fixtures of the client's tests: every async test runs on asyncio and on trio."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

# Self-signed for localhost and 127.0.0.1, valid until 2126; guards nothing.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBojCCAUmgAwIBAgIUMtMrR0bjthz7pn+zn5SJVAc2HcgwCgYIKoZIzj0EAwIw
GDEWMBQGA1UEAwwNZnVsbGJvcmUgdGVzdDAgFw0yNjEyMDEwNDAwMTJaGA8yMTI2
MTEwNzA0MDAxMlowGDEWMBQGA1UEAwwNZnVsbGJvcmUgdGVzdDBZMBMGByqGSM49
AgEGCCqGSM49AwEHA0IABP5N3h8SZ0qmXFbDlEpSIvv6cb4yxM6esAVhgOO6QT1C
grLwbZ7S6nePDBWgBqSddxT3FoFsMDLuezek9RBXpoqjbzBtMB0GA1UdDgQWBBR0
bYnH0eQ2JnG8SKVIZSoOdutO4zAfBgNVHSMEGDAWgBR0bYnH0eQ2JnG8SKVIZSoO
dutO4zAPBgNVHRMBAf8EBTADAQH/MBoGA1UdEQQTMBGCCWxvY2FsaG9zdIcEfwAA
ATAKBggqhkjOPQQDAgNHADBEAiA/SPADalPBFVDFFdDT1Y6FlZYByPFY/lG7vheu
1Mr0xwIgAh/V0RPu+QwLdJifCOjRQ895CQGNA7ByrCpLStiTVN4=
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg7N/+uVGX2kfrkAxU
4HO02ZFxcVGFM54A27JiwSLXcY+hRANCAAT+Td4fEmdKplxWw5RKUiL7+nG+MsTO
nrAFYYDjukE9QoKy8G2e0up3jwwVoAaknXcU9xaBbDAy7ns3pPUQV6aK
-----END PRIVATE KEY-----
"""


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


@pytest.fixture
def server_context(tmp_path: Path) -> ssl.SSLContext:
    """A server's TLS context with the test certificate; ALPN is the test's choice."""
    path = tmp_path / "server.pem"
    path.write_text(CERTIFICATE + KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


@pytest.fixture
def client_context() -> ssl.SSLContext:
    """A client's context that trusts the test certificate alone, as for a private CA."""
    return ssl.create_default_context(cadata=CERTIFICATE)
