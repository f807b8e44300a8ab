"""An httpx2 client whose every generating request is governed: for other people's libraries.

Owns the governors of the endpoints that such a client meets, one for each.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable
from typing import Any, Literal

import httpx2

from ._governed import GovernedTransport
from ._governor import Governor
from ._opening import Settings, open_governor, wire_timeouts
from ._retry import Retry
from ._types import Timeouts
from .limits import Limiter, Move, Rates
from .pricing import Ledger, Plan


class HTTPClient(httpx2.AsyncClient):
    """An ``httpx2.AsyncClient`` with limits, retries and a ledger inside; see :func:`http_client`.

    :ivar ledger: what has been spent through it, live.
    """

    def __init__(self, transport: _Governors, *, ledger: Ledger, **options: Any) -> None:
        super().__init__(transport=transport, **options)
        self.ledger = ledger
        self._governors = transport

    def limiter(self, url: str) -> Limiter | None:
        """Return the limiter of the endpoint a URL is on, once a request has been sent there."""
        governor = self._governors.met.get(_origin(httpx2.URL(url)))
        return None if governor is None else governor.limiter


class _Governors(GovernedTransport):
    """Sends each request under the governor of its origin, which the first request there makes."""

    def __init__(self, settings: Settings, ledger: Ledger, label: str | None) -> None:
        super().__init__(self._governor_of, label=label)
        self._settings = settings
        self._ledger = ledger
        self.met: dict[httpx2.URL, Governor] = {}

    def _governor_of(self, url: httpx2.URL) -> Governor:
        origin = _origin(url)
        governor = self.met.get(origin)
        if governor is None:
            governor = open_governor(origin, self._settings, ledger=self._ledger)
            self.met[origin] = governor
        return governor

    async def aclose(self) -> None:
        """Close every connection."""
        for governor in self.met.values():
            await governor.endpoint.transport.aclose()


def _origin(url: httpx2.URL) -> httpx2.URL:
    return url.copy_with(raw_path=b"/", fragment=None, username="", password="")


def http_client(
    *,
    concurrency: Literal["auto"] | int = "auto",
    rates: Rates | None = None,
    pricing: Plan | None = None,
    http2: bool | None = None,
    timeout: Timeouts | None = None,
    retry: Retry | None = None,
    on_move: Callable[[Move], object] | None = None,
    verify: ssl.SSLContext | bool = True,
    transport: httpx2.AsyncBaseTransport | None = None,
    limiter: Limiter | None = None,
    ledger: Ledger | None = None,
    label: str | None = None,
    rng: random.Random | None = None,
    **options: Any,
) -> HTTPClient:
    """Return an ``httpx2.AsyncClient`` that governs what other libraries send through it.

    ::

        client = openai.AsyncOpenAI(http_client=fullbore.http_client(), max_retries=0)

    Requests that generate (POSTs to ``…/completions``, ``…/responses``, ``…/embeddings``) wait for
    their turn under one limiter for each endpoint, are retried until their status line is good,
    and are counted in ``client.ledger``. All others go straight through. Set the library's own
    retries to 0, or both will retry.

    It need not be entered as a context manager; close it with ``aclose()`` or let the library.
    Use it in one event loop.

    :param timeout: here ``connect`` and ``total`` hold as in :class:`Client`, the latter until the
        answer begins. The library's own timeouts, or else the longer of ``first_token`` and
        ``stall``, bound each wait for bytes.
    :param label: what the ledger files these calls under.
    :param ledger: one to share with other clients; by default a new one.
    :param options: everything else is httpx2's: ``headers``, ``base_url``, ``event_hooks``, ...
    :raises ConfigError: a setting that cannot work.

    The other parameters are those of :class:`Client`.
    """
    settings = Settings(
        concurrency=concurrency,
        rates=rates,
        pricing=pricing,
        http2=http2,
        timeouts=timeout or Timeouts(),
        retry=retry or Retry(),
        on_move=on_move,
        verify=verify,
        transport=transport,
        limiter=limiter,
        rng=rng or random.Random(),
    )
    ledger = ledger or Ledger()
    options.setdefault("timeout", wire_timeouts(settings.timeouts))
    return HTTPClient(_Governors(settings, ledger, label), ledger=ledger, **options)
