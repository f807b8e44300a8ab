"""The deltas of one request, from where the engine leaves them to where a reader takes them.

Lives on one event loop. It does not know the engine or its thread: what it has to say to them goes
through two callbacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from .errors import BackendError, StepFailedError
from .request import Delta


class RequestStream(AsyncIterator[Delta]):
    """The deltas of one request; ends after the one that carries a finish reason.

    Read by one task at a time. Leaving before the end without :meth:`cancel` keeps the request
    alive, running or paused: put the cancel into a ``finally``.
    """

    __slots__ = (
        "_error",
        "_finished",
        "_forget",
        "_grant",
        "_grant_size",
        "_num_taken",
        "_pending",
        "_wakeup",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        buffer_tokens: int | None,
        *,
        grant: Callable[[str, int], None],
        forget: Callable[[str, bool], None],
    ) -> None:
        self.request_id = request_id
        # (request id, tokens): the reader has taken these since the last call.
        self._grant = grant
        # (request id, abort): the stream has ended; by the reader's will, if abort.
        self._forget = forget
        # A quarter of the buffer at a time: few calls, and a prompt reader has most of the buffer
        # left while one is on its way.
        self._grant_size = None if buffer_tokens is None else max(1, buffer_tokens // 4)
        self._num_taken = 0
        self._pending: list[Delta] = []
        self._error: BackendError | None = None
        self._finished = False
        self._wakeup: asyncio.Future[None] | None = None

    async def __anext__(self) -> Delta:
        """The next delta.

        :raises StepFailedError: the step that carried the request raised.
        :raises EngineStoppedError: the engine died or was stopped.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._finished:
                raise StopAsyncIteration
            self._wakeup = asyncio.get_running_loop().create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None
        deltas, self._pending = self._pending, []
        if self._grant_size is not None and not self._finished:
            self._num_taken += sum(len(delta.token_ids) for delta in deltas)
            if self._num_taken >= self._grant_size:
                self._grant(self.request_id, self._num_taken)
                self._num_taken = 0
        return deltas[0] if len(deltas) == 1 else _merge(deltas)

    def cancel(self) -> None:
        """End the request; its blocks are free within one step. Safe at any time, any number of
        times.
        """
        if not self._finished:
            self._finished = True
            self._forget(self.request_id, True)
            self._wake()

    def push(self, delta: Delta) -> None:
        """The engine's side: the next delta. Until it is read, it is merged with those before."""
        if delta.finish_reason == "error":
            self.fail(StepFailedError(f"the engine failed at this request: {delta.error}"))
            return
        self._pending.append(delta)
        if delta.finish_reason is not None:
            self._finished = True
            self._forget(self.request_id, False)
        self._wake()

    def fail(self, error: BackendError) -> None:
        """The engine's side: the request has ended; what is pending is read first, then raised."""
        self._finished = True
        self._error = error
        self._forget(self.request_id, False)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


def _merge(deltas: Sequence[Delta]) -> Delta:
    last = deltas[-1]
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_generated=last.num_generated,
        num_cached=last.num_cached,
    )
