"""A race to the first token between an exchange and, if it is late, a second one.

Owns the concurrency of the two. Knows nothing of permits, budgets or the ledger.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from .errors import RequestError
from .transport.exchange import Exchange


class Race:
    """Runs at most two exchanges; whoever has its first token, or its end, first, has won.

    :param first: the exchange that starts at once.
    :param start_rival: makes the second, or returns ``None`` if there may be none.
    :param delay: seconds until the second starts; ``None`` for never.
    :ivar errors: what an exchange failed of, for those that did.
    """

    def __init__(
        self,
        first: Exchange,
        start_rival: Callable[[], Awaitable[Exchange | None]],
        delay: float | None,
    ) -> None:
        self.errors: dict[Exchange, RequestError] = {}
        self._first = first
        self._start_rival = start_rival
        self._delay = delay
        self._running = 0
        self._winner: Exchange | None = None
        self._changed = anyio.Event()

    async def run(self) -> Exchange:
        """Return the winner; the other has been stopped where it stood and is to be closed.

        :raises RequestError: all there were failed; it is the first one's error.
        """
        if self._delay is None:
            await self._first.begin()
            return self._first
        async with anyio.create_task_group() as group:
            self._enter(group, self._first)
            with anyio.move_on_after(self._delay):
                await self._changed.wait()
            if not self._changed.is_set():
                rival = await self._start_rival()
                if rival is not None and self._winner is None:
                    self._enter(group, rival)
            while self._winner is None and self._running:
                await self._changed.wait()
                self._changed = anyio.Event()
            group.cancel_scope.cancel()
        if self._winner is None:
            raise self.errors[self._first]
        return self._winner

    def _enter(self, group: anyio.abc.TaskGroup, exchange: Exchange) -> None:
        self._running += 1
        group.start_soon(self._begin, exchange)

    async def _begin(self, exchange: Exchange) -> None:
        try:
            await exchange.begin()
            self._winner = self._winner or exchange
        except RequestError as error:
            self.errors[exchange] = error
        finally:
            self._running -= 1
            self._changed.set()
