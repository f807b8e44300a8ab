"""Simulated endpoints under a virtual clock: what a limit does, without waiting for it.

Owns two models of a server and a closed-loop driver that runs a `Window` against one of them.
Everything is a discrete-event simulation: no task, no sleep, one seed, one result. Knows the
`Window` protocol and nothing of how a window decides.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fullbore.limits._limiter import Outcome
from fullbore.limits.admission import Window

Profile = Callable[[float], float]
"""A quantity that may change with the time in seconds."""


def constant(value: float) -> Profile:
    """A quantity that never changes."""
    return lambda _now: value


def steps(*points: tuple[float, float]) -> Profile:
    """A quantity that takes `value` from `start` on, for each `(start, value)` in order."""

    def at(now: float) -> float:
        current = points[0][1]
        for start, value in points:
            if now >= start:
                current = value
        return current

    return at


@dataclass(slots=True)
class Job:
    """One request inside a simulated server. `work` is in tokens, or 1 when tokens are unknown."""

    work: float
    noise: float
    sent: float = 0.0
    mark: Any = None
    done: float = 0.0


class Endpoint(Protocol):
    """A simulated server: jobs arrive, time passes, jobs are done."""

    def arrive(self, now: float, job: Job) -> bool:
        """Take the job in; False means 429."""
        ...

    def next_done(self, now: float) -> float:
        """When to call `finish`, if nothing arrives before; infinity when no job runs."""
        ...

    def finish(self, now: float) -> Job | None:
        """Remove a job that is done at `now`; None if none is after all."""
        ...


class SlotServer:
    """Serves up to `capacity` jobs side by side; the others wait, first come first served.

    Args:
        capacity: Slots, over time.
        seconds: Service time of one unit of work.
        accepts: Jobs in the house above which the answer is 429, over time; None for no limit.
        thrash: Relative slow-down of a job for each `capacity` of jobs above the capacity.
    """

    def __init__(
        self,
        capacity: Profile,
        *,
        seconds: float = 1.0,
        accepts: Profile | None = None,
        thrash: float = 0.0,
    ) -> None:
        self._capacity = capacity
        self._seconds = seconds
        self._accepts = accepts
        self._thrash = thrash
        self._queue: deque[Job] = deque()
        self._running: list[tuple[float, int, Job]] = []
        self._serial = 0

    def arrive(self, now: float, job: Job) -> bool:
        """See `Endpoint.arrive`."""
        inside = len(self._queue) + len(self._running)
        if self._accepts is not None and inside >= self._accepts(now):
            return False
        self._queue.append(job)
        self._fill(now)
        return True

    def next_done(self, now: float) -> float:
        """See `Endpoint.next_done`."""
        return self._running[0][0] if self._running else math.inf

    def finish(self, now: float) -> Job:
        """See `Endpoint.finish`."""
        _, _, job = heapq.heappop(self._running)
        self._fill(now)
        return job

    def _fill(self, now: float) -> None:
        capacity = self._capacity(now)
        while self._queue and len(self._running) < capacity:
            job = self._queue.popleft()
            excess = max(0.0, (len(self._queue) + len(self._running) + 1) / capacity - 1)
            slow = 1 + self._thrash * excess
            self._serial += 1
            end = now + self._seconds * job.work * job.noise * slow
            heapq.heappush(self._running, (end, self._serial, job))


class BatchServer:
    """Continuous batching as on a GPU: a step of `base + slope * batch` gives each job one token.

    Throughput `batch / (base + slope * batch)` rises ever more slowly until `max_batch`, above
    which jobs wait.

    Args:
        base: Seconds of a step that do not depend on the batch (weights read, launches).
        slope: Seconds of a step added by each job in the batch.
        max_batch: The most jobs in a step, over time.
        accepts: Jobs in the house above which the answer is 429, over time; None for no limit.
    """

    def __init__(
        self,
        *,
        base: float,
        slope: float,
        max_batch: Profile,
        accepts: Profile | None = None,
    ) -> None:
        self._base = base
        self._slope = slope
        self._max_batch = max_batch
        self._accepts = accepts
        self._queue: deque[Job] = deque()
        self._running: list[tuple[float, int, Job]] = []  # keyed by the tick at which it ends
        self._serial = 0
        self._tick = 0.0  # tokens given so far to a job that was there from the start
        self._at = 0.0

    def arrive(self, now: float, job: Job) -> bool:
        """See `Endpoint.arrive`."""
        inside = len(self._queue) + len(self._running)
        if self._accepts is not None and inside >= self._accepts(now):
            return False
        self._advance(now)
        self._queue.append(job)
        self._fill(now)
        return True

    def next_done(self, now: float) -> float:
        """See `Endpoint.next_done`."""
        if not self._running:
            return math.inf
        return self._at + max(0.0, self._running[0][0] - self._tick) * self._step()

    def finish(self, now: float) -> Job:
        """See `Endpoint.finish`."""
        self._advance(now)
        _, _, job = heapq.heappop(self._running)
        self._fill(now)
        return job

    def _step(self) -> float:
        return self._base + self._slope * len(self._running)

    def _advance(self, now: float) -> None:
        if self._running:
            self._tick += (now - self._at) / self._step()
        self._at = now

    def _fill(self, now: float) -> None:
        while self._queue and len(self._running) < self._max_batch(now):
            job = self._queue.popleft()
            self._serial += 1
            end = self._tick + job.work * job.noise
            heapq.heappush(self._running, (end, self._serial, job))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the simulated caller sends.

    Attributes:
        tokens: Mean output tokens of a request; 0 for a caller that cannot count them.
        spread: Sigma of the log-normal law of the work of a request.
        noise: Sigma of the log-normal law of the time, apart from the work.
        network: Seconds on the way, there and back together.
        demand: Requests that the caller has at once, at most, over time.
        flake: Probability that a request is answered 503 for no reason.
    """

    tokens: float = 0.0
    spread: float = 0.0
    noise: float = 0.0
    network: float = 0.0
    demand: Profile = field(default=constant(math.inf))
    flake: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What happened between two instants.

    Attributes:
        throughput: Work finished per second.
        requests: Answers received, of any kind.
        rejected: Of these, 429 and 503.
        latency: Mean seconds of the finished ones.
        limit: Mean of the window's limit over answers.
    """

    throughput: float
    requests: int
    rejected: int
    latency: float
    limit: float

    @property
    def rejected_share(self) -> float:
        """Share of the requests that were rejected."""
        return self.rejected / self.requests if self.requests else 0.0


@dataclass(slots=True)
class _Tally:
    work: float = 0.0
    answers: int = 0
    rejected: int = 0
    latency: float = 0.0
    limit: float = 0.0

    def span(self, seconds: float) -> Span:
        finished = max(1, self.answers - self.rejected)
        return Span(
            throughput=self.work / seconds,
            requests=self.answers,
            rejected=self.rejected,
            latency=self.latency / finished,
            limit=self.limit / max(1, self.answers),
        )


class _ClosedLoop:
    """A caller that always has the next request ready, as far as `demand` goes."""

    def __init__(self, endpoint: Endpoint, window: Window[Any], load: Load, seed: int) -> None:
        self._endpoint = endpoint
        self._window = window
        self._load = load
        self._random = random.Random(seed)
        self._in_flight = 0
        self._serial = 0
        # (time, serial, job, what): on the wire to the server, or back from it
        self._wire: list[tuple[float, int, Job, str]] = []

    def run(self, marks: Sequence[float]) -> list[Span]:
        tallies = [_Tally() for _ in marks[1:]]
        now = 0.0
        self._send(now)
        while now < marks[-1]:
            wire = self._wire[0][0] if self._wire else math.inf
            done = self._endpoint.next_done(now)
            now = max(now, min(wire, done))
            if done <= wire:
                finished = self._endpoint.finish(now)
                if finished is not None:
                    self._post(now, finished, "ok")
                continue
            _, _, job, what = heapq.heappop(self._wire)
            if what == "arrive":
                flaked = self._load.flake and self._random.random() < self._load.flake
                if flaked or not self._endpoint.arrive(now, job):
                    self._post(now, job, "overloaded")
                continue
            self._answer(now, job, what)
            for tally, start, end in zip(tallies, marks, marks[1:], strict=False):
                if start <= now < end:
                    self._count(tally, now, job, what)
            self._send(now)
        spans = zip(tallies, marks, marks[1:], strict=False)
        return [tally.span(end - start) for tally, start, end in spans]

    def _post(self, now: float, job: Job, what: str) -> None:
        self._serial += 1
        heapq.heappush(self._wire, (now + self._load.network / 2, self._serial, job, what))

    def _send(self, now: float) -> None:
        load = self._load
        while self._in_flight < min(self._window.limit, load.demand(now)):
            self._in_flight += 1
            spread = math.exp(self._random.gauss(-(load.spread**2) / 2, load.spread))
            noise = math.exp(self._random.gauss(-(load.noise**2) / 2, load.noise))
            work = max(1.0, round(load.tokens * spread)) if load.tokens else spread
            job = Job(work=work, noise=noise, sent=now)
            job.mark = self._window.admitted(now=now, in_flight=self._in_flight)
            self._post(now, job, "arrive")

    def _answer(self, now: float, job: Job, what: str) -> None:
        ok = what == "ok"
        tokens = int(job.work) if ok and self._load.tokens else 0
        outcome = Outcome(
            kind="ok" if ok else "overloaded", total=now - job.sent, output_tokens=tokens
        )
        self._window.finished(
            outcome, now=now, started=job.sent, mark=job.mark, in_flight=self._in_flight
        )
        self._in_flight -= 1

    def _count(self, tally: _Tally, now: float, job: Job, what: str) -> None:
        tally.answers += 1
        tally.limit += self._window.limit
        if what == "ok":
            tally.work += job.work
            tally.latency += now - job.sent
        else:
            tally.rejected += 1


def simulate(
    endpoint: Endpoint, window: Window[Any], load: Load, *, marks: Sequence[float], seed: int = 0
) -> list[Span]:
    """Run `window` against `endpoint` from time 0 and tell what happened between the marks.

    Args:
        endpoint: The server; used up by the run.
        window: The policy under test; used up by the run.
        load: What the caller sends.
        marks: Rising instants in seconds; one `Span` is returned for each pair of neighbours,
            and the run ends at the last.
        seed: Seed of every random draw.
    """
    return _ClosedLoop(endpoint, window, load, seed).run(marks)
