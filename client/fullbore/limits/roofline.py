"""How latency depends on load: samples in, a roofline out.

Owns the statistics behind the adaptive window and nothing else: no clock, no limit, no policy.

The model. With `n` requests in flight, a unit of work (a token where tokens are known, else a
request) takes

    latency(n) = base * max(1, n / knee) + slope * n

seconds: `base` is the time of an idle server, `slope` what each neighbour in a batch adds (a
GPU's step grows with its batch), and beyond the `knee` requests queue. Little's law (Little 1961,
"A proof for the queuing formula L = λW") gives the throughput `n / latency(n)`, so only latency
has to be measured, for which every answer is a sample; counting answers per second would need
whole windows at a constant load. The shape is a roofline with a linear term; BBR's
bandwidth-delay product (Cardwell et al. 2016) is the case `slope = 0`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

_PER_OCTAVE = 6
_MODEL_ERROR = 0.02
"""Relative error granted to the model itself; no bucket counts as more precise than this."""

_ROUND_ERROR = 0.08
"""Relative error of what one round says of a level, however many samples it has: requests that one
step of the server answers share its fate, and the first turn-over at a new limit holds the burst of
newcomers too. That is a bias, so it falls with the rounds and not with their square root."""

_LEAST_CHANGE = 0.35
"""Least change of latency, as a logarithm, that counts as a changed endpoint. Half of it can come
of the load that a sample is filed under: while the limit moves, that is true to a fifth."""


@dataclass(slots=True)
class _Sums:
    """Sums over samples of (load, latency, work), enough for a ratio estimator and its error."""

    count: float = 0.0
    rounds: float = 0.0
    load: float = 0.0
    latency: float = 0.0
    latency2: float = 0.0
    work: float = 0.0
    work2: float = 0.0
    cross: float = 0.0

    def add(self, load: float, latency: float, work: float) -> None:
        self.count += 1
        self.load += load
        self.latency += latency
        self.latency2 += latency * latency
        self.work += work
        self.work2 += work * work
        self.cross += latency * work

    def merge(self, other: _Sums) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def scale(self, factor: float) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) * factor)

    def per_request(self) -> float:
        return self.latency / self.count

    def per_work(self) -> float:
        return self.latency / self.work

    def spread_per_request(self) -> float:
        """Squared relative deviation of one sample's latency from the mean."""
        mean = self.latency / self.count
        return max(0.0, self.latency2 / self.count / mean**2 - 1)

    def spread_per_work(self) -> float:
        """Squared deviation of one sample's latency from `ratio * work`, relative to the mean."""
        ratio = self.latency / self.work
        residual = self.latency2 - 2 * ratio * self.cross + ratio**2 * self.work2
        return max(0.0, residual * self.count / self.latency**2)


@dataclass(frozen=True, slots=True)
class Point:
    """Measured at one level of load.

    Attributes:
        load: Mean requests in flight.
        latency: Mean seconds per unit of work.
        variance: Squared relative standard error of `latency`.
    """

    load: float
    latency: float
    variance: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """One instance of the model.

    Attributes:
        base: Seconds per unit of work on an idle server.
        slope: Seconds per unit of work for each request in flight.
        knee: Requests in flight at which the server is full; infinity for no sign of it.
    """

    base: float
    slope: float
    knee: float

    def latency(self, load: float) -> float:
        """Seconds per unit of work at `load`."""
        return self.base * max(1.0, load / self.knee) + self.slope * load

    def throughput(self, load: float) -> float:
        """Units of work per second at `load`."""
        return load / self.latency(load)

    def useful(self, share: float, horizon: float) -> float:
        """The least load that gives `share` of the best throughput of any load up to `horizon`."""
        wanted = share * self.throughput(min(self.knee, horizon))
        # below the knee: wanted == load / (base + slope * load)
        return wanted * self.base / (1 - wanted * self.slope)


@dataclass(frozen=True, slots=True)
class Fit:
    """What the samples say.

    Attributes:
        best: The likeliest model.
        allowed: Every model that the samples do not speak against, `best` among them.
        bottom: The lowest load with samples.
        top: The highest load with samples.
    """

    best: Roofline
    allowed: tuple[Roofline, ...]
    bottom: float
    top: float

    def lowest(self, share: float) -> float:
        """The least load at which the endpoint may have that share of its best throughput."""
        return min(each.useful(share, 2 * self.top) for each in self.allowed)

    def highest(self, share: float) -> float:
        """The least load at which the endpoint surely has that share of its best throughput."""
        return max(each.useful(share, 2 * self.top) for each in self.allowed)

    def hope(self, load: float) -> float:
        """Relative gain of throughput over that at `load` that twice the highest load may give."""
        horizon = 2 * self.top
        return max(each.throughput(horizon) / each.throughput(load) for each in self.allowed) - 1


class LoadTable:
    """Samples by level of load, six levels to the octave, the older the lighter.

    Args:
        memory: Most samples that a level remembers, in rounds of its own load.
        fade: Factor on the weight of a level for each round.
        fade_above: The same for levels above the round's load. What was seen there is forgotten
            sooner, so that a look higher becomes worth its while again.
    """

    def __init__(self, *, memory: float = 6.0, fade: float = 0.97, fade_above: float = 0.8) -> None:
        self._memory = memory
        self._fade = fade
        self._fade_above = fade_above
        self._levels: dict[int, _Sums] = {}
        self._round: dict[int, _Sums] = {}
        self._tokens_known = True

    def add(self, load: float, latency: float, tokens: int) -> None:
        """Note an answer that took `latency` seconds with `load` requests in flight."""
        if tokens <= 0:
            self._tokens_known = False
        level = round(math.log2(load) * _PER_OCTAVE)
        sums = self._round.get(level)
        if sums is None:
            sums = self._round[level] = _Sums()
        sums.add(load, latency, max(tokens, 1))

    def close_round(self) -> bool:
        """Take the round's samples into the table; True if they contradict what was known.

        On a contradiction the endpoint has changed, and what was known is all but forgotten.
        """
        changed = self._contradicted()
        top = max(self._round, default=0)
        for level in list(self._levels):
            sums = self._levels[level]
            fade = self._fade_above if level > top else self._fade
            sums.scale(0.05 if changed else fade)
            if sums.count < 0.25:
                del self._levels[level]
        for level, fresh in self._round.items():
            fresh.rounds = 1
            known = self._levels.setdefault(level, _Sums())
            known.merge(fresh)
            most = max(12.0, self._memory * known.load / known.count)
            rounds = min(known.rounds, self._memory)
            if known.count > most:
                known.scale(most / known.count)
            known.rounds = rounds
        self._round = {}
        return changed

    def points(self) -> list[Point]:
        """Every level, by rising load, in the unit of work that varies less."""
        return self._points(self._levels)

    def fit(self, near: float) -> Fit | None:
        """Fit the roofline, weighing levels near the load `near` more; None without samples."""
        points = self.points()
        return _fit(points, near) if points else None

    def _contradicted(self) -> bool:
        """Whether a level is not what it was, or does better than every higher one did."""
        known = {round(math.log2(p.load) * _PER_OCTAVE): p for p in self._points(self._levels)}
        total = sum(sums.count for sums in self._round.values())
        for point in self._points(self._round):
            level = round(math.log2(point.load) * _PER_OCTAVE)
            if self._round[level].count < total / 3:
                continue  # a level passed through holds the slow answers that began above it
            old = known.get(level)
            if old is not None and _change(point, old, of=_latency) != 0:
                return True
            above = [known[higher] for higher in known if higher > level]
            if above and all(_change(point, higher, of=_throughput) > 0 for higher in above):
                return True
        return False

    def _points(self, levels: dict[int, _Sums]) -> list[Point]:
        by_work, spread = self._unit()
        points = []
        for level in sorted(levels):
            sums = levels[level]
            latency = sums.per_work() if by_work else sums.per_request()
            variance = spread / sums.count
            if sums.rounds:
                variance += (_ROUND_ERROR / sums.rounds) ** 2
            points.append(Point(sums.load / sums.count, latency, variance))
        return points

    def _unit(self) -> tuple[bool, float]:
        """Whether to measure per token, and the squared relative spread of one sample."""
        request = work = count = 0.0
        for sums in (*self._levels.values(), *self._round.values()):
            if sums.count >= 3:
                weight = sums.count - 1
                count += weight
                request += sums.spread_per_request() * sums.count
                work += sums.spread_per_work() * sums.count
        if not count:
            return False, 0.1
        if self._tokens_known and work < request:
            return True, work / count
        return False, request / count


def _latency(point: Point) -> float:
    return point.latency


def _throughput(point: Point) -> float:
    return point.load / point.latency


def _change(new: Point, old: Point, *, of: Callable[[Point], float]) -> float:
    """The change of a quantity, as a logarithm; 0 if it may be chance."""
    change = math.log(of(new) / of(old))
    error = math.sqrt(new.variance + old.variance + _MODEL_ERROR**2)
    return change if abs(change) > max(_LEAST_CHANGE, 5 * error) else 0.0


def _fit(points: list[Point], near: float) -> Fit:
    """Try every knee between the levels; for one knee the model is linear least squares."""
    sums = [(0.0, 0.0, 0.0, 0.0, 0.0)]  # over the levels so far, so that a knee costs O(1)
    total = 0.0
    for point in points:
        octaves = math.log2(point.load / near)
        weight = 1 / (1 + octaves * octaves) / (point.variance + _MODEL_ERROR**2)
        total += weight
        n, inverse = point.load, 1 / point.latency
        terms = (inverse * inverse, n * inverse * inverse, (n * inverse) ** 2, inverse, n * inverse)
        last = sums[-1]
        sums.append(
            (
                last[0] + weight * terms[0],
                last[1] + weight * terms[1],
                last[2] + weight * terms[2],
                last[3] + weight * terms[3],
                last[4] + weight * terms[4],
            )
        )
    fits = [(*_least_squares(sums[-1], sums[-1], math.inf, total), math.inf)]
    for below, (low, high) in enumerate(pairwise(points), start=1):
        for share in (0.0, 1 / 3, 2 / 3):
            knee = low.load ** (1 - share) * high.load**share
            fits.append((*_least_squares(sums[below], sums[-1], knee, total), knee))
    least = min(fits)
    allowed = [fit for fit in fits if fit[0] <= least[0] + 1.0]
    return Fit(
        best=Roofline(*least[1:]),
        allowed=tuple(Roofline(*fit[1:]) for fit in allowed),
        bottom=points[0].load,
        top=points[-1].load,
    )


_Sums5 = tuple[float, float, float, float, float]


def _least_squares(
    below: _Sums5, every: _Sums5, knee: float, total: float
) -> tuple[float, float, float]:
    """The weighted squared error, base and slope of the best roofline with that knee.

    Minimises the sum of `weight * (1 - model / latency)**2` subject to base, slope >= 0.
    `below` sums over the levels up to the knee, `every` over all of them.
    """
    bb = below[0] + (every[2] - below[2]) / knee**2
    bs = below[1] + (every[2] - below[2]) / knee
    b1 = below[3] + (every[4] - below[4]) / knee
    ss, s1 = every[2], every[4]
    base, slope = b1 / bb, 0.0
    determinant = bb * ss - bs * bs
    if determinant > 1e-9 * bb * ss:
        free_base = (b1 * ss - s1 * bs) / determinant
        free_slope = (s1 * bb - b1 * bs) / determinant
        if free_base < 0:
            base, slope = 0.0, s1 / ss
        elif free_slope > 0:
            base, slope = free_base, free_slope
    square = base * base * bb + 2 * base * slope * bs + slope * slope * ss
    return max(0.0, total - 2 * base * b1 - 2 * slope * s1 + square), base, slope
