"""The engine: a scheduler, a runner and text, one step at a time.

Synchronous, and owned by one thread. :class:`~fullbore_backend.AsyncEngine` runs one for an event
loop; :meth:`Engine.generate` runs one offline. Knows nothing of HTTP.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .config import EngineConfig
from .errors import InvalidRequestError, StepFailedError
from .loading import LoadedModel, load_model
from .output import TextStream
from .request import Completion, Delta, FinishReason, SamplingParams, TokenLogprobs
from .runner import Launched
from .sampling import Sampled, SamplingState
from .scheduler.batch import Batch, Chunk
from .scheduler.scheduler import Scheduler
from .scheduler.sequence import Sequence as TokenSequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts at one moment; those of tokens, steps, preemptions and requests are totals since
    start.

    ``num_blocks_used`` are held by live requests; ``num_blocks_cached`` are free but hold a
    reusable prefix. ``prefix_cache_queries`` and ``prefix_cache_hits`` are prompt tokens looked up
    and found. ``step_seconds`` is the time spent in steps. Paused requests (``num_paused``) count
    neither as running nor as waiting; the blocks they still hold are used ones.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_cached: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prompt_tokens: int
    generation_tokens: int
    num_steps: int
    step_seconds: float
    requests_finished: Mapping[str, int]
    num_paused: int = 0


class _Request:
    """What the engine keeps of a live request, beside its place in the scheduler."""

    __slots__ = ("params", "sampling", "sequence", "text")

    def __init__(
        self,
        sequence: TokenSequence,
        params: SamplingParams,
        sampling: SamplingState,
        text: TextStream,
    ) -> None:
        self.sequence = sequence
        self.params = params
        self.sampling = sampling
        self.text = text


class Engine:
    """Continuous batching over a paged KV cache.

    :param config: what to load and how large to make things.
    :param progress: told, in a few words, what is being done while the model loads.
    :param clock: seconds; only statistics read it.
    :param seeds: gives a fresh seed for each request that brings none.
    :raises ConfigError: for settings that cannot work.
    :raises ModelError: when the model cannot be found, read or run.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        seeds: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self.config = config or EngineConfig()
        self.config.validate()
        loaded: LoadedModel = load_model(self.config, progress or _silent)
        self.tokenizer = loaded.tokenizer
        self.model_name = loaded.name
        self.max_model_len = loaded.scheduler_config.max_model_len
        self.vocab_size = loaded.vocab_size
        self.scheduler = Scheduler(loaded.scheduler_config)
        self.runner = loaded.runner
        self._eos = frozenset(loaded.eos_token_ids)
        self._overlap = loaded.overlap
        self._under_way: Launched | None = None
        self._clock, self._seeds = clock, seeds
        self._requests: dict[str, _Request] = {}
        self._finished: Counter[str] = Counter()
        self._prompt_tokens = self._generation_tokens = self._num_steps = 0
        self._step_seconds = 0.0

    def warm_up(self) -> None:
        """Run the largest step and the smallest, so that the first request is as fast as the next.

        Borrows free blocks from the pool; what the prefix cache had kept in them is forgotten.
        """
        config, pool = self.scheduler.config, self.scheduler.blocks
        largest = min(
            config.max_num_batched_tokens,
            config.max_model_len,
            pool.num_free * config.block_size,
        )
        for size in (largest, min(largest, 1)):
            sequence = TokenSequence("warm-up", [0] * size, max_tokens=1)
            sequence.block_ids = pool.allocate(-(-size // config.block_size))
            try:
                chunk = Chunk(sequence, 0, size, True)
                state = SamplingState(SamplingParams(), (), banned=frozenset(), seed=0)
                batch = Batch(chunks=(chunk,), num_tokens=size, preempted=())
                self.runner.launch(batch, [state]).wait()
            finally:
                pool.release(sequence.block_ids)

    # Requests

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise what :meth:`add` would raise for a request at fault, and change nothing.

        Safe from any thread.

        :raises InvalidRequestError: a field is out of range, the prompt is empty or has an unknown
            id.
        :raises ContextLengthError: the request can never fit.
        """
        params.validate(vocab_size=self.vocab_size)
        if prompt_token_ids and not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < (
            self.vocab_size
        ):
            raise InvalidRequestError(
                f"the prompt has a token id outside the vocabulary [0, {self.vocab_size - 1}].",
                param="prompt",
            )
        self.scheduler.check(len(prompt_token_ids))

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request; its deltas come out of :meth:`step` under ``request_id``.

        :param cache_salt: requests share cached prefixes only with those of the same salt.
        :param priority: lower runs earlier.
        :raises InvalidRequestError: see :meth:`check`; also for an id that is in use.
        :raises ContextLengthError: the request can never fit.
        :raises QueueFullError: too many wait already.
        """
        self.check(prompt_token_ids, params)
        extra = frozenset(params.stop_token_ids)
        ends = extra if params.ignore_eos else extra | self._eos
        sequence = TokenSequence(
            request_id,
            prompt_token_ids,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=ends,
            cache_salt=cache_salt,
            priority=priority,
        )
        self.scheduler.add(sequence)
        sampling = SamplingState(params, prompt_token_ids, banned=ends, seed=self._seeds())
        text = TextStream(self.tokenizer.detokenizer(), params.stop, min_tokens=params.min_tokens)
        self._requests[request_id] = _Request(sequence, params, sampling, text)
        self._prompt_tokens += len(prompt_token_ids)

    def abort(self, request_id: str) -> bool:
        """End a request now and free its blocks; ``False`` when it is not (or no longer) live."""
        if self._requests.pop(request_id, None) is None:
            return False
        self._finish(request_id, "cancelled")
        return True

    def abort_all(self) -> None:
        """End every live request and free its blocks."""
        for request_id in list(self._requests):
            self.abort(request_id)

    def pause(self, request_id: str) -> bool:
        """Generate no more for a request until :meth:`resume`; ``False`` when it is not live.

        It keeps its blocks until others need them, and holds up nobody.
        """
        return self.scheduler.pause(request_id)

    def resume(self, request_id: str) -> bool:
        """Let a paused request go on; ``False`` when it is not live."""
        return self.scheduler.resume(request_id)

    def has_work(self) -> bool:
        """True while a request is live that is not paused."""
        return self._under_way is not None or self.scheduler.has_work()

    # Steps

    def step(self) -> list[tuple[str, Delta]]:
        """Run one step; returns (request id, delta) for each request that gained a token or ended.

        With overlap, a step is scheduled and launched while the one before is computed, and what
        is returned is the one before's. So the device does not wait for the scheduler, and a
        request that has ended may have one more token computed, which is dropped.

        A step that raises ends the requests it carried with the finish reason ``error``; the engine
        goes on.
        """
        started = self._clock()
        deltas: list[tuple[str, Delta]] = []
        if self._under_way is not None and self._under_way.decides_the_next:
            deltas += self._settle()
        batch = self.scheduler.schedule()
        before, self._under_way = self._under_way, None
        launched = self._launch(batch, before) if batch is not None else None
        if before is not None:
            deltas += self._take_in(before)
        if isinstance(launched, Exception):
            assert batch is not None
            deltas += self._fail(batch, launched)
        else:
            self._under_way = launched
            if not self._overlap:
                deltas += self._settle()
        self._step_seconds += self._clock() - started
        return deltas

    def _launch(self, batch: Batch, before: Launched | None) -> Launched | Exception:
        sampling = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        states = [self._requests[sequence.request_id].sampling for sequence in sampling]
        try:
            return self.runner.launch(batch, states, before)
        except Exception as error:  # whatever a kernel raises: it ends this batch, not the engine
            return error

    def _settle(self) -> list[tuple[str, Delta]]:
        """Wait for the step under way, if there is one, and take it in."""
        launched, self._under_way = self._under_way, None
        return [] if launched is None else self._take_in(launched)

    def _take_in(self, launched: Launched) -> list[tuple[str, Delta]]:
        batch = launched.batch
        try:
            sampled = launched.wait()
        except Exception as error:  # a fault of a kernel may show only when it is waited for
            return self._fail(batch, error)
        remaining = iter(sampled)
        results = [next(remaining) if chunk.samples else None for chunk in batch.chunks]
        self.scheduler.apply(batch, [None if r is None else r.token_id for r in results])
        deltas = []
        for chunk, result in zip(batch.chunks, results, strict=True):
            request = self._request_of(chunk.sequence)
            if result is not None and request is not None:
                deltas.append((chunk.sequence.request_id, self._advance(request, result)))
        self._generation_tokens += len(deltas)
        self._num_steps += 1
        return deltas

    def _request_of(self, sequence: TokenSequence) -> _Request | None:
        """The request a sequence belongs to; ``None`` once it has ended.

        Its id may be another's by then.
        """
        request = self._requests.get(sequence.request_id)
        return request if request is not None and request.sequence is sequence else None

    def _advance(self, request: _Request, sampled: Sampled) -> Delta:
        """Turn a token into a delta; ends the request when its tokens or its text say so."""
        sequence = request.sequence
        reason = sequence.finish_reason
        stop: str | int | None = sequence.stop_reason
        if reason == "stop" and stop == sampled.token_id:
            text, found = "", None  # the end token itself is not text
        else:
            text, found = request.text.push(sampled.token_id)
        if reason is not None and found is None:
            tail, found = request.text.flush()
            text += tail
        if found is not None:
            reason, stop = "stop", found
        if stop in self._eos:
            stop = None  # the model's own end is not a reason of the caller's
        if reason is not None:
            del self._requests[sequence.request_id]
            self._finish(sequence.request_id, reason)
        return Delta(
            text=text,
            token_ids=(sampled.token_id,),
            logprobs=() if sampled.logprobs is None else (sampled.logprobs,),
            finish_reason=reason,
            stop_reason=stop,
            num_generated=sequence.num_output_tokens,
            num_cached=sequence.num_cached,
        )

    def _finish(self, request_id: str, reason: FinishReason) -> None:
        self.scheduler.finish(request_id, reason)
        self._finished[reason] += 1

    def _fail(self, batch: Batch, error: Exception) -> list[tuple[str, Delta]]:
        logger.error("a step of %d sequences failed", len(batch.chunks), exc_info=error)
        deltas = []
        for chunk in batch.chunks:
            sequence = chunk.sequence
            if self._request_of(sequence) is None:
                continue  # the step before ended it
            del self._requests[sequence.request_id]
            self._finish(sequence.request_id, "error")
            delta = Delta(
                text="",
                token_ids=(),
                finish_reason="error",
                num_generated=sequence.num_output_tokens,
                num_cached=sequence.num_cached,
                error=f"{type(error).__name__}: {error}",
            )
            deltas.append((sequence.request_id, delta))
        return deltas

    # Offline

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete every prompt, batched, and return the results in the prompts' order.

        :param prompts: texts, or token ids as they are.
        :param params: for all, or one for each.
        :raises InvalidRequestError: if any request is at fault; none has run then.
        :raises StepFailedError: if a step failed; the rest are aborted.
        """
        all_params = _broadcast(params, len(prompts))
        token_ids = [
            self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
            for prompt in prompts
        ]
        for ids, each in zip(token_ids, all_params, strict=True):
            self.check(ids, each)
        names = [f"offline-{index}" for index in range(len(prompts))]
        parts: dict[str, list[Delta]] = {name: [] for name in names}
        waiting = deque(zip(names, token_ids, all_params, strict=True))
        try:
            while waiting or self.has_work():
                while waiting and self.scheduler.num_waiting < self.config.max_waiting:
                    self.add(*waiting.popleft())
                for name, delta in self.step():
                    if delta.finish_reason == "error":
                        raise StepFailedError(f"a step failed with {delta.error}.")
                    parts[name].append(delta)
        finally:
            for name in names:
                self.abort(name)  # none is live unless something raised
        return [_join(ids, parts[name]) for ids, name in zip(token_ids, names, strict=True)]

    def stats(self) -> EngineStats:
        """The counts of this moment. Cheap."""
        scheduler = self.scheduler
        blocks = scheduler.blocks
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=blocks.num_blocks,
            num_blocks_used=blocks.num_used,
            num_blocks_cached=blocks.num_cached,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            requests_finished=dict(self._finished),
            num_paused=scheduler.num_paused,
        )


def _broadcast(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(f"{count} prompts came with {len(params)} sampling parameters.")
    return params


def _join(prompt_token_ids: Sequence[int], deltas: Sequence[Delta]) -> Completion:
    last = deltas[-1]
    logprobs: tuple[TokenLogprobs, ...] = tuple(p for delta in deltas for p in delta.logprobs)
    return Completion(
        text="".join(delta.text for delta in deltas),
        prompt_token_ids=tuple(prompt_token_ids),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason or "error",
        num_cached=last.num_cached,
        logprobs=logprobs,
        stop_reason=last.stop_reason,
    )


def _silent(message: str) -> None:
    """The default progress: nobody is told."""
