"""What users open: joins endpoint, limiter, prices and ledger, and starts calls on them."""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence, Sized
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio
import httpx2

from ._attempt import Call
from ._background import Background
from ._clock import loop_token
from ._governed import NO_KEY, GovernedTransport
from ._governor import Governor
from ._hedge import Hedge
from ._map import Job, MapRun
from ._moves import MoveStream
from ._opening import Settings, default_plan, open_governor, wire_timeouts
from ._prompt import Prompt, render
from ._retry import Retry
from ._stats import Observer, RunStats
from ._stream import TextStream
from ._types import OnError, Result, Timeouts
from .errors import ClientClosedError, ConfigError, WrongLoopError
from .limits import Limiter, Move, Rates
from .pricing import CatalogPlan, Ledger, Plan
from .progress import ProgressBar
from .transport.connect import find_api_key, parse_base_url
from .transport.user_client import user_transport

if TYPE_CHECKING:
    import httpx
    from openai import AsyncOpenAI


class Client:
    """A client of one OpenAI-compatible endpoint; open it with ``async with``.

    ::

        async with fullbore.Client("http://127.0.0.1:8000/v1", model="smollm2-135m") as client:
            results = await client.map(prompts)

    Everything sent through one client (``map``, ``complete``, ``stream`` and ``openai``) shares
    one limiter, one connection pool and one ledger.

    :param base_url: of the endpoint, ``/v1`` included; ``OPENAI_BASE_URL`` or OpenAI's if left out.
    :param model: for requests that name none.
    :param api_key: sent as a bearer token. If left out: ``OPENAI_API_KEY`` for api.openai.com and
        the host of ``OPENAI_BASE_URL``, ``OXLO_API_KEY`` for api.oxlo.ai, and none for any other
        host.
    :param concurrency: requests in flight at most, or ``"auto"`` to have it found.
    :param rates: requests and tokens a minute and a day that the endpoint allows. By default those
        of the plan, if it has any. What response headers say is heeded in any case.
    :param pricing: how calls are priced. By default list prices for api.openai.com, else nothing.
    :param http2: ``None`` speaks HTTP/2 to ``https`` endpoints that offer it, and HTTP/1.1 to all
        others; ``True`` speaks HTTP/2 to ``http`` endpoints too, which have to know it (our own
        server does); ``False`` never speaks it.
    :param timeout: limits on time.
    :param retry: how failures are retried.
    :param hedge: send a request twice when its first token is late; off if left out. Refused with
        a plan that charges for each request.
    :param on_move: called with each move of an adaptive limit and its reason; see also ``events``.
    :param headers: sent with every request.
    :param defaults: request fields for every request, such as ``{"temperature": 0}``.
    :param verify: a TLS context for a custom certificate authority; ``False`` checks nothing.
    :param http_client: send through this client instead, httpx2's or httpx's; it stays yours to
        close.
    :param transport: send through this transport instead; closed with the client.
    :param limiter: a limiter of your own instead of ``concurrency``.
    :param keep_entries: have the ledger keep every call, not only totals.
    :param rng: source of retry jitter.
    :raises ConfigError: a setting that cannot work.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        model: str,
        api_key: str | None = None,
        concurrency: Literal["auto"] | int = "auto",
        rates: Rates | None = None,
        pricing: Plan | None = None,
        http2: bool | None = None,
        timeout: Timeouts | None = None,
        retry: Retry | None = None,
        hedge: Hedge | None = None,
        on_move: Callable[[Move], object] | None = None,
        headers: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        verify: ssl.SSLContext | bool = True,
        http_client: httpx2.AsyncClient | httpx.AsyncClient | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        limiter: Limiter | None = None,
        keep_entries: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        if http_client is not None and transport is not None:
            raise ConfigError("Pass http_client or transport, not both: each says how to send.")
        self._base_url = parse_base_url(base_url)
        self._api_key = find_api_key(self._base_url, api_key)
        plan = pricing or default_plan(self._base_url)
        if isinstance(plan, CatalogPlan):
            plan.plan_for(model)  # the look-up is slow: now, not in the first call
        self._settings = Settings(
            concurrency=concurrency,
            rates=rates,
            pricing=plan,
            http2=http2,
            timeouts=timeout or Timeouts(),
            retry=retry or Retry(),
            hedge=hedge,
            on_move=on_move,
            verify=verify,
            limiter=limiter,
            transport=transport if http_client is None else user_transport(http_client),
            rng=rng or random.Random(),
        )
        self._headers = headers
        self._defaults = {"model": model, **(defaults or {})}
        self._background: Background | None = None
        self._governor: Governor | None = None
        self._loop: object = None
        self._openai: AsyncOpenAI | None = None
        self.ledger = Ledger(keep_entries=keep_entries)
        """What has been spent, live."""

    async def __aenter__(self) -> Self:
        if self._background is not None:
            raise ClientClosedError("A client is opened once; make another one.")
        self._loop = loop_token()
        governor = open_governor(
            self._base_url,
            self._settings,
            ledger=self.ledger,
            api_key=self._api_key,
            headers=self._headers,
        )
        self._background = Background()
        await self._background.open()
        self._governor = governor
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cut off what is still running, wait until it has ended, close the connections."""
        if self._background is None:
            return
        self._check_loop()
        governor, self._governor = self._governor, None
        await self._background.close()
        if governor is not None:
            governor.moves.end()
            with anyio.move_on_after(5, shield=True):
                await governor.endpoint.transport.aclose()

    def map(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        ordered: bool = False,
        on_error: OnError = "return",
        stream: bool = True,
        buffer: int | None = None,
        total: int | None = None,
        label: str | None = None,
        progress: bool | Observer | Sequence[Observer] = False,
        **fields: Any,
    ) -> MapRun:
        """Answer many prompts at once: await the list of results, or iterate as they finish.

        :param prompts: any iterable or async iterable; pulled lazily. A plain one is advanced in
            the event loop, so it must not block. What a prompt may be: :data:`Prompt`.
        :param ordered: iterate in input order instead of as they finish.
        :param on_error: ``"return"`` puts failures into results, ``"raise"`` raises the first one
            and cuts off the rest.
        :param stream: ask for streamed answers, which is what the time to first token needs.
        :param buffer: finished results kept for a slow reader before pulling stops. By default
            twice the concurrency, and at least 64.
        :param total: how many prompts there are, for the progress bar; ``len(prompts)`` if it has
            one.
        :param label: what the ledger files these calls under.
        :param progress: show a bar on standard error; or your own observers.
        :param fields: request fields for all of these prompts, such as ``max_tokens=100``.
        """
        governor, background = self._require_open()
        if buffer is not None and buffer < 1:
            raise ConfigError(f"buffer is {buffer}; it must hold at least 1 result.")
        if isinstance(prompts, str | Mapping):
            raise ConfigError("map takes many prompts; for a single one use complete or stream.")
        if total is None and isinstance(prompts, Sized):
            total = len(prompts)
        merged = {**self._defaults, **fields}
        limiter = governor.limiter
        job = Job(
            governor,
            prompts,
            lambda prompt, index: render(prompt, merged, index=index, stream=stream, label=label),
            RunStats(
                time.monotonic, total=total, limit=lambda: limiter.limit, why=governor.moves.words
            ),
            ordered=ordered,
            on_error=on_error,
            buffer=buffer,
            observers=_observers(progress, label),
        )
        return MapRun(background, job)

    async def complete(
        self,
        prompt: Prompt,
        *,
        on_error: OnError = "raise",
        stream: bool = True,
        label: str | None = None,
        **fields: Any,
    ) -> Result:
        """Answer one prompt.

        Unlike ``map`` it raises failures by default: there is no batch to carry on with.

        :raises RequestError: the request failed, after its retries.
        :raises PromptError: the prompt has none of the accepted shapes.
        """
        governor, _ = self._require_open()
        request = render(prompt, {**self._defaults, **fields}, stream=stream, label=label)
        result = await Call(governor, request, flow=self).run()
        if result.error is not None and on_error == "raise":
            raise result.error
        return result

    def stream(self, prompt: Prompt, *, label: str | None = None, **fields: Any) -> TextStream:
        """Answer one prompt piece by piece, no faster than it is read; see :class:`TextStream`.

        :raises PromptError: the prompt has none of the accepted shapes.
        """
        governor, _ = self._require_open()
        request = render(prompt, {**self._defaults, **fields}, stream=True, label=label)
        return TextStream(Call(governor, request, flow=self), governor.clock)

    @property
    def openai(self) -> AsyncOpenAI:
        """A real ``openai.AsyncOpenAI`` on the same connections, limiter, retries and ledger.

        Its own retries are off, since ours are under it. Its calls are on the ledger under the
        label ``openai``. Closed with the client.
        """
        governor, _ = self._require_open()
        if self._openai is None:
            from openai import AsyncOpenAI

            limits = wire_timeouts(governor.timeouts)
            self._openai = AsyncOpenAI(
                base_url=str(self._base_url),
                api_key=self._api_key or NO_KEY,
                max_retries=0,
                timeout=limits,
                default_headers=dict(self._headers or {}),
                http_client=httpx2.AsyncClient(
                    transport=GovernedTransport(lambda url: governor, label="openai"),
                    timeout=limits,
                ),
            )
        return self._openai

    def events(self) -> MoveStream:
        """Return a stream of the limit's moves from here on: ``async for move in client.events()``.

        Each says where the limit was, where it goes, why, and with which numbers. It ends when the
        client is closed. A fixed limit never moves, and neither does a limiter of your own.
        """
        return self._require_open()[0].moves.subscribe()

    @property
    def limiter(self) -> Limiter:
        """What decides how much may be in flight."""
        return self._require_open()[0].limiter

    def __repr__(self) -> str:
        return f"Client({str(self._base_url)!r}, model={self._defaults['model']!r})"

    def _require_open(self) -> tuple[Governor, Background]:
        if self._governor is None or self._background is None:
            state = "not open yet" if self._background is None else "closed"
            raise ClientClosedError(
                f"The client is {state}. Use it inside `async with fullbore.Client(…) as client:`."
            )
        self._check_loop()
        return self._governor, self._background

    def _check_loop(self) -> None:
        if loop_token() != self._loop:
            raise WrongLoopError(
                "This client was opened in another event loop or thread, and its connections "
                "belong to that one. Open one client per event loop."
            )


def _observers(
    progress: bool | Observer | Sequence[Observer], label: str | None
) -> Sequence[Observer]:
    if progress is True:
        return (ProgressBar(label or "map"),)
    if progress is False:
        return ()
    return progress if isinstance(progress, Sequence) else (progress,)
