"""How long a device takes for a piece of work, and whether the work was right.

On a GPU the work is captured as a CUDA graph and replayed, as decode steps are, so that what the
host takes to launch it is left out. Before each replay a buffer larger than the L2 cache is read:
inputs then come from memory, and no dirty lines are left to be written back in the time measured.
Elsewhere, in Triton's interpreter above all, the times only show that the harness works.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullbore_backend.kernels import Ops

FLUSH_BYTES = 256 * 2**20
"""Twice the largest L2 cache there is."""

Row = dict[str, Any]
"""A measured case, as the result file has it."""


class SkippedError(Exception):
    """A case that cannot be measured here; its text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds: the median, and the 20th and 80th percentiles.

    ``graphed`` says whether a CUDA graph was replayed; otherwise the host's launches are in it.
    """

    us: float
    us_p20: float
    us_p80: float
    repeats: int
    graphed: bool


class Stopwatch:
    """Times work on one device.

    :param seconds: how long to measure one piece of work, warming up apart.
    """

    def __init__(self, device: torch.device, *, seconds: float = 0.2) -> None:
        self.device, self.seconds = device, seconds
        self._flush: torch.Tensor | None = None

    def time(self, work: Callable[[], object]) -> Timing:
        """Time the device alone. The work must not wait for it."""
        if self.device.type != "cuda":
            return self.wall(work, repeats=1)
        work()  # compiles, and sets libraries up
        torch.cuda.synchronize()
        replay, graphed = self._capture(work)
        estimate = statistics.median(self._events(replay, 5))
        repeats = max(10, min(200, int(self.seconds * 1e6 / max(estimate, 1.0))))
        return _timing(self._events(replay, repeats), graphed=graphed)

    def wall(self, work: Callable[[], object], *, repeats: int = 20) -> Timing:
        """Time work that waits for the device by itself, or whose share of the host counts."""
        work()
        self.synchronize()
        found = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            self.synchronize()
            found.append((time.perf_counter() - began) * 1e6)
        return _timing(found, graphed=False)

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _capture(self, work: Callable[[], object]) -> tuple[Callable[[], object], bool]:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                work()
        except RuntimeError:  # the work waits for the device; launched as it is, it can be timed
            torch.cuda.synchronize()
            return work, False
        return graph.replay, True

    def _events(self, work: Callable[[], object], repeats: int) -> list[float]:
        if self._flush is None:
            self._flush = torch.zeros(FLUSH_BYTES // 4, device=self.device)
        marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats)
        ]
        for before, after in marks:
            self._flush.amax()
            before.record()
            work()
            after.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) * 1e3 for before, after in marks]


def _timing(found: Sequence[float], *, graphed: bool) -> Timing:
    ordered = sorted(found)
    return Timing(
        us=statistics.median(ordered),
        us_p20=ordered[len(ordered) // 5],
        us_p80=ordered[len(ordered) * 4 // 5],
        repeats=len(ordered),
        graphed=graphed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every case is measured with.

    :param tiny: sizes that Triton's interpreter manages; the times mean nothing.
    :param dtype: of activations.
    :param ops: the implementations under test.
    """

    device: torch.device
    tiny: bool
    dtype: torch.dtype
    ops: Ops
    stopwatch: Stopwatch

    def randn(
        self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Normal numbers, made on the device."""
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return made.normal_(0, std)

    def measure(
        self,
        work: Callable[[], Any],
        *,
        traffic: float,
        operations: float = 0.0,
        rate: str = "bf16",
        oracle: Callable[[], Any] | None = None,
        tolerance: float = 0.02,
        baseline: tuple[str, Callable[[], object]] | None = None,
    ) -> Row:
        """Check, then time.

        :param traffic: bytes that must be moved between memory and chip, however it is done.
        :param operations: multiplications and additions of matrix products, at the rate ``rate``
            of the ceilings.
        :param oracle: computes the same in another way; ``None`` where that would not fit, which
            the row says.
        :param tolerance: the largest error that passes, relative to the oracle's largest number; a
            row beyond it says ``failed``, and is timed for whoever looks for the reason.
        :param baseline: what somebody else's library takes for the same, and its name.
        """
        checked: Row = {"checked": False} if oracle is None else check(work(), oracle(), tolerance)
        timing = self.stopwatch.time(work)
        row: Row = {
            "us": round(timing.us, 2),
            "us_p20": round(timing.us_p20, 2),
            "us_p80": round(timing.us_p80, 2),
            "repeats": timing.repeats,
            "graphed": timing.graphed,
            "bytes": int(traffic),
            "operations": int(operations),
            "rate": rate,
            **checked,
        }
        if baseline is not None:
            name, theirs = baseline
            row |= {"baseline": name, "baseline_us": round(self.stopwatch.time(theirs).us, 2)}
        return row


def check(got: Any, want: Any, tolerance: float) -> Row:
    """The error of a result, and what is wrong with it; of tuples, the first are compared."""
    if isinstance(got, tuple):
        got, want = got[0], want[0]
    exact = want.double()
    error = (got.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30)
    row: Row = {"checked": True, "error": float(f"{float(error):.2g}")}
    if not error <= tolerance:  # NaN is an error too
        row["failed"] = f"differs from its oracle by {row['error']} of the largest number"
    return row
