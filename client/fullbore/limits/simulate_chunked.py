"""A simulated server that computes prompts in chunks beside the answers it is writing.

Owns the model of an engine with continuous batching and chunked prefill (Agrawal et al. 2024,
"Taming throughput-latency tradeoff in LLM inference with Sarathi-Serve"), step by step. Knows
nothing of windows; see `simulate.py` for the protocol and the driver.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from fullbore.limits.simulate import Job, Profile, constant

_EVEN = constant(1.0)


@dataclass(slots=True)
class _Sequence:
    """A job with a seat: prompt tokens and output tokens still to compute."""

    job: Job
    prompt: int
    output: int


class ChunkedServer:
    """Computes at most `budget` tokens a step; a step takes `base + slope * tokens` seconds.

    Sequences that write get one token each; prompts share the rest of the budget, first come first
    served. The step that ends a prompt gives the first token of its answer. Jobs that arrive wait
    for the end of the step, and for a seat. Throughput rises ever more slowly with the requests in
    flight, up to the seats, and requests of one length tend to move in waves.

    Args:
        base: Seconds of a step that do not depend on its tokens.
        slope: Seconds of a step for each token in it.
        prompt: Tokens of every prompt.
        seats: The most sequences that run at once; at most `budget`.
        budget: The most tokens of a step.
        pace: Factor on the time of a step, over time: a machine that others use too.
    """

    def __init__(
        self,
        *,
        base: float,
        slope: float,
        prompt: int,
        seats: int,
        budget: int = 512,
        pace: Profile = _EVEN,
    ) -> None:
        self._base = base
        self._slope = slope
        self._prompt = prompt
        self._seats = seats
        self._budget = budget
        self._pace = pace
        self._queue: deque[Job] = deque()
        self._running: list[_Sequence] = []
        self._done: deque[Job] = deque()
        self._step_ends = math.inf

    def arrive(self, now: float, job: Job) -> bool:
        """See `Endpoint.arrive`; never refuses."""
        self._queue.append(job)
        if self._step_ends == math.inf:
            self._start_step(now)
        return True

    def next_done(self, now: float) -> float:
        """See `Endpoint.next_done`: the end of the step, which may end no job."""
        return now if self._done else self._step_ends

    def finish(self, now: float) -> Job | None:
        """See `Endpoint.finish`: the jobs of a step one after the other."""
        if not self._done:
            self._end_step()
            self._start_step(now)
        return self._done.popleft() if self._done else None

    def _start_step(self, now: float) -> None:
        """Give out the budget: it counts as computed at once, and is seen at the step's end."""
        while self._queue and len(self._running) < self._seats:
            job = self._queue.popleft()
            output = max(1, round(job.work * job.noise))
            self._running.append(_Sequence(job, self._prompt, output))
        if not self._running:
            self._step_ends = math.inf
            return
        left = self._budget
        for sequence in self._running:
            if not sequence.prompt:
                sequence.output -= 1
                left -= 1
        for sequence in self._running:
            if sequence.prompt and left:
                chunk = min(sequence.prompt, left)
                sequence.prompt -= chunk
                left -= chunk
                if not sequence.prompt:
                    sequence.output -= 1
        seconds = self._base + self._slope * (self._budget - left)
        self._step_ends = now + seconds * self._pace(now)

    def _end_step(self) -> None:
        self._done.extend(each.job for each in self._running if not each.output)
        self._running = [each for each in self._running if each.output]
