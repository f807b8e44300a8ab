"""One logical request: admission → transport → decode → :class:`Result`, and the retry loop.

Owns permits, the ledger entries and the record of attempts. Does not know where requests come
from or where results go. A race between a late attempt and its hedge is run in ``_race``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal

from ._governor import Governor, billed, make_outcome, outcome_kind
from ._race import Race
from ._types import Attempt, Request, Result, Timing, Usage
from .errors import IncompleteStreamError, RequestError
from .limits import Permit
from .transport.exchange import Exchange


@dataclass(slots=True)
class _Try:
    """One exchange and the permit it runs under, ``None`` once that is given back."""

    exchange: Exchange
    permit: Permit | None


class Call:
    """A request on its way, over as many attempts as the policy allows.

    Either :meth:`run` it to its end, or :meth:`open` it, :meth:`advance` it piece by piece and
    :meth:`aclose` it.

    :param flow: whose turn it takes at the limiter.
    :param permit: admission that was waited for already, for the first attempt.
    """

    def __init__(
        self, governor: Governor, request: Request, *, flow: object, permit: Permit | None = None
    ) -> None:
        self._governor = governor
        self._request = request
        self._flow = flow
        self._permit = permit
        self._started_at = governor.clock() - (0.0 if permit is None else permit.waited)
        self._first_sent_at: float | None = None
        self._queued = 0.0
        self._attempts: list[Attempt] = []
        self._try: _Try | None = None
        self._cost: Decimal | None = None
        self._error: RequestError | None = None

    async def run(self) -> Result:
        """See the request through; a failure is in the result, only cancellation is raised."""
        try:
            await self._try_until(to_end=True)
            await self._succeeded()
        except RequestError as error:
            self._error = error
        return self.result()

    async def open(self) -> None:
        """Get as far as the first text, or the end if there is none.

        :raises RequestError: after the last attempt.
        """
        try:
            await self._try_until(to_end=False)
            await self._close_if_finished()
        except RequestError as error:
            self._error = error
            raise

    async def advance(self) -> bool:
        """Read until there is more text; ``False`` at the end. Nothing is tried again from here.

        :raises RequestError: the answer broke.
        """
        current = self._try
        if current is None or current.exchange.finished or self._error is not None:
            return False
        try:
            await current.exchange.advance(to_end=False)
        except RequestError as error:
            self._error = error
            await self._failed(current, error)
            raise
        await self._close_if_finished()
        return True

    async def aclose(self) -> None:
        """Stop, whatever the state; an answer in progress is cut off, also at the server."""
        current = self._try
        if current is not None and current.permit is not None:
            self._error = IncompleteStreamError(
                "The stream was closed by its reader before its end.",
                partial=current.exchange.answer.text,
            )
            await self._failed(current, None)

    @property
    def exchange(self) -> Exchange | None:
        """The attempt that counts, once there is one."""
        return None if self._try is None else self._try.exchange

    @property
    def error(self) -> RequestError | None:
        """What the request failed of, if it has."""
        return self._error

    async def _try_until(self, *, to_end: bool) -> None:
        while True:
            current = await self._admit()
            try:
                if self._governor.hedging is not None and self._request.stream:
                    current = await self._hedged(current)
                if to_end or not current.exchange.answer.parts:  # a race has read some already
                    await current.exchange.advance(to_end=to_end)
                return
            except RequestError as error:
                await self._failed(current, error)
                delay = self._decide(error)
            except BaseException:
                await self._failed(current, None)
                raise
            await self._governor.sleep(delay)

    async def _admit(self) -> _Try:
        governor = self._governor
        permit, self._permit = self._permit, None
        if permit is None:
            permit = await governor.limiter.acquire(
                flow=self._flow, tokens=self._request.estimated_input_tokens
            )
        self._queued += permit.waited
        if self._first_sent_at is None:
            self._first_sent_at = governor.clock()
        self._try = self._start(permit)
        return self._try

    def _start(self, permit: Permit) -> _Try:
        governor = self._governor
        assert self._first_sent_at is not None
        total = governor.timeouts.total
        exchange = Exchange(
            governor.endpoint,
            self._request,
            governor.timeouts,
            clock=governor.clock,
            wall=governor.wall,
            deadline=None if total is None else self._first_sent_at + total,
        )
        return _Try(exchange, permit)

    async def _hedged(self, first: _Try) -> _Try:
        """Read to the first token, sending the request again if it is late; return the winner.

        :raises RequestError: neither came; the second has been filed, the first has not.
        """
        hedging, limiter = self._governor.hedging, self._governor.limiter
        assert hedging is not None
        delay = hedging.begin()
        tries = {first.exchange: first}

        async def start_rival() -> Exchange | None:
            if not hedging.may_start() or limiter.headroom() < 1:
                return None
            hedging.hedges += 1  # before the first wait, so that no other sees the same room
            tokens = self._request.estimated_input_tokens
            rival = self._start(await limiter.acquire(flow=self._flow, tokens=tokens))
            tries[rival.exchange] = rival
            return rival.exchange

        race = Race(first.exchange, start_rival, delay)
        try:
            winner = await race.run()
        except BaseException:
            for each in tries.values():
                if each is not first:
                    await self._failed(each, race.errors.get(each.exchange))
            raise
        for each in tries.values():
            if each.exchange is not winner:
                await self._failed(each, race.errors.get(each.exchange))
        self._try = tries[winner]
        if winner.first_token_at is not None:
            hedging.saw(winner.first_token_at - winner.sent_at)
        return self._try

    def _decide(self, error: RequestError) -> float:
        governor = self._governor
        assert self._first_sent_at is not None
        elapsed = governor.clock() - self._first_sent_at
        total = governor.timeouts.total
        decision = governor.retry.decide(
            error,
            attempt=len(self._attempts),
            elapsed=elapsed,
            remaining=None if total is None else total - elapsed,
            rng=governor.rng,
        )
        if isinstance(decision, RequestError):
            if decision is error:
                raise error
            raise decision from error
        return decision

    async def _close_if_finished(self) -> None:
        if self._try is not None and self._try.exchange.finished:
            await self._succeeded()

    async def _succeeded(self) -> None:
        current = self._try
        assert current is not None
        exchange = current.exchange
        usage = self._usage(exchange)
        model = exchange.answer.model or self._request.model
        self._cost = self._governor.price(usage, model)
        attempt = Attempt(timing=self._timing(current), status=exchange.status)
        await self._settle(current, attempt, usage)
        self._governor.ledger.record(
            model=self._request.model,
            label=self._request.label,
            usage=usage,
            cost=self._cost,
        )

    async def _failed(self, current: _Try, error: RequestError | None) -> None:
        """File an attempt that broke, or was cancelled (no error), and free what it held."""
        exchange = current.exchange
        status = billed(error) if exchange.sent else "no"
        attempt = Attempt(
            timing=self._timing(current), status=exchange.status, error=error, billed=status
        )
        usage = self._usage(exchange) if status == "maybe" else Usage()
        await self._settle(current, attempt, usage)
        self._governor.ledger.record_failure(
            model=self._request.model,
            label=self._request.label,
            usage=usage,
            cost=self._governor.price(usage, self._request.model) if status == "maybe" else None,
            billed=status,
            cancelled=error is None,
        )

    async def _settle(self, current: _Try, attempt: Attempt, usage: Usage) -> None:
        """Close the exchange, then let the next request in: never more open than permitted."""
        permit, current.permit = current.permit, None
        assert permit is not None
        self._attempts.append(attempt)
        error = attempt.error
        cancelled = error is None and attempt.billed != "yes"
        assert error is None or isinstance(error, RequestError)
        outcome = make_outcome(
            "cancelled" if cancelled else outcome_kind(error),
            total=attempt.timing.total,
            first_token=attempt.timing.first_token,
            usage=usage,
            error=error,
            headers=current.exchange.headers,
        )
        try:
            await current.exchange.aclose()
        finally:
            permit.release(outcome)

    def _timing(self, current: _Try) -> Timing:
        exchange, permit = current.exchange, current.permit
        first = exchange.first_token_at
        return Timing(
            queue=0.0 if permit is None else permit.waited,
            first_token=None if first is None else first - exchange.sent_at,
            total=self._governor.clock() - exchange.sent_at,
        )

    def _usage(self, exchange: Exchange) -> Usage:
        answer = exchange.answer
        usage = answer.usage
        if usage is None:
            return Usage(
                input_tokens=self._request.estimated_input_tokens,
                output_tokens=answer.estimated_output_tokens,
                service_tier=answer.tier,
                estimated=True,
            )
        if usage.service_tier != answer.tier:
            return replace(usage, service_tier=answer.tier)
        return usage

    def result(self) -> Result:
        """Return what has become of the request so far."""
        request, exchange = self._request, self.exchange
        now = self._governor.clock()
        if exchange is None:
            return Result(index=request.index, input=request.input, error=self._error)
        choices = exchange.answer.choices()
        return Result(
            index=request.index,
            input=request.input,
            text=choices[0].text,
            error=self._error,
            usage=self._usage(exchange) if self._error is None else Usage(),
            cost=self._cost,
            finish_reason=choices[0].finish_reason,
            timing=Timing(
                queue=self._queued,
                first_token=self._attempts[-1].timing.first_token if self._attempts else None,
                total=now - self._started_at,
            ),
            choices=choices,
            attempts=tuple(self._attempts),
            model=exchange.answer.model or request.model,
            id=request.id,
            label=request.label,
        )
