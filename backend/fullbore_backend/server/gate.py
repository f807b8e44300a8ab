"""What every request passes first: its id, and the API key if the server asks for one.

Pure ASGI. It does not know the routes, but for the one that stays open.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import HttpError, describe
from .http import header, identify, respond

OPEN_PATHS = frozenset({"/health"})
"""Answered without a key: load balancers have none."""


class Gate:
    """ASGI middleware.

    :param api_key: the key requests must carry as ``Authorization: Bearer``; ``None`` asks none.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http":
            identify(scope)
            if self._expected is not None and scope["path"] not in OPEN_PATHS:
                refusal = self._refusal(header(scope, b"authorization"))
                if refusal is not None:
                    status, body, headers = describe(refusal)
                    await respond(scope, send, status, body, headers=headers)
                    return
        await self._app(scope, receive, send)

    def _refusal(self, authorization: bytes | None) -> HttpError | None:
        assert self._expected is not None
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() == b"bearer":
            # Digests have one length: the comparison tells nothing of the key, not even its size.
            if hmac.compare_digest(_digest(key.strip()), self._expected):
                return None
            message = "The API key is not the one this server asks for."
        else:
            message = "This server asks for an API key; send 'Authorization: Bearer KEY'."
        challenge = ((b"www-authenticate", b"Bearer"),)
        return HttpError(401, message, code="invalid_api_key", headers=challenge)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
