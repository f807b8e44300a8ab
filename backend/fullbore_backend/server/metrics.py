"""``/metrics``: the engine's counts and the server's latencies in Prometheus' text format 0.0.4.

Names keep the stems that dashboards know from vLLM, under the prefix ``fullbore:``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..engine import EngineStats

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_TTFT_BOUNDS = (
    0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_E2E_BOUNDS = (
    0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip


class Histogram:
    """Counts of observations under upper bounds.

    :param bounds: ascending; an observation on a bound counts as under it.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """The samples, in the text format."""
        total = 0
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum!r}"
        yield f"{name}_count{{{labels}}} {total}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """What the server times, in seconds from the arrival of a request's head.

    ``first_token`` counts each choice that produced a token, streamed or not; ``end_to_end`` each
    request answered in full.
    """

    first_token: Histogram = field(default_factory=lambda: Histogram(_TTFT_BOUNDS))
    end_to_end: Histogram = field(default_factory=lambda: Histogram(_E2E_BOUNDS))


def render(stats: EngineStats, latencies: Latencies, *, model: str) -> bytes:
    """The page."""
    labels = f'model_name="{_escaped(model)}"'
    lines: list[str] = []
    for name, kind, text, value in _samples(stats):
        full = f"fullbore:{name}"
        lines += (f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full}{{{labels}}} {value!r}")
    full = "fullbore:request_success_total"
    lines += (f"# HELP {full} Requests ended, by finish reason.", f"# TYPE {full} counter")
    for reason, count in sorted(stats.requests_finished.items()):
        lines.append(f'{full}{{{labels},finished_reason="{_escaped(reason)}"}} {count}')
    for full, text, histogram in (
        (
            "fullbore:time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            latencies.first_token,
        ),
        (
            "fullbore:e2e_request_latency_seconds",
            "Seconds from a request's arrival to its end.",
            latencies.end_to_end,
        ),
    ):
        lines += (f"# HELP {full} {text}", f"# TYPE {full} histogram")
        lines += histogram.lines(full, labels)
    return ("\n".join(lines) + "\n").encode()


def _samples(stats: EngineStats) -> Iterator[tuple[str, str, str, int | float]]:
    """(name, type, help, value) of each plain sample."""
    usage = stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0
    yield "num_requests_running", "gauge", "Requests in the running batch.", stats.num_running
    yield "num_requests_waiting", "gauge", "Requests that wait to run.", stats.num_waiting
    yield "num_requests_paused", "gauge", "Requests whose reader is away.", stats.num_paused
    yield "kv_cache_usage_perc", "gauge", "Share of KV blocks in use, 0 to 1.", usage
    yield (
        "prefix_cache_queries_total",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        stats.prefix_cache_queries,
    )
    yield (
        "prefix_cache_hits_total",
        "counter",
        "Prompt tokens found in the prefix cache.",
        stats.prefix_cache_hits,
    )
    yield "num_preemptions_total", "counter", "Requests preempted.", stats.num_preemptions
    yield "prompt_tokens_total", "counter", "Prompt tokens of requests taken.", stats.prompt_tokens
    yield "generation_tokens_total", "counter", "Tokens generated.", stats.generation_tokens
    yield "engine_steps_total", "counter", "Engine steps run.", stats.num_steps
    yield "engine_step_seconds_total", "counter", "Seconds spent in steps.", stats.step_seconds


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
