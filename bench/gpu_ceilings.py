"""What this very device can do: the ceilings that every other figure is a share of.

Measured, because a data sheet's figures are those of another clock. Rows have a ``ceiling``: bytes
or operations a second, under the name that the cases' ``rate`` refers to; launches are in
microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_cases import Case
from gpu_timing import Bench, Row, SkippedError


def ceilings(bench: Bench) -> Iterator[Case]:
    """Bandwidth, matrix rates, launches."""
    yield Case("copy bandwidth", partial(_copy, bench))
    yield Case("read bandwidth", partial(_read, bench))
    for name, work in (("bf16", _bf16), ("fp16", _fp16), ("fp8", _fp8), ("int8", _int8)):
        yield Case(f"{name} matrix product", partial(_product, bench, name, work))
    yield Case("one small kernel", partial(_small_kernel, bench))
    yield Case("launch in a graph", partial(_graph_launch, bench))
    yield Case("launch by the host", partial(_host_launch, bench))


def _copy(bench: Bench) -> Row:
    source = bench.randn(2**12 if bench.tiny else 2**29)
    target = torch.empty_like(source)
    row = bench.measure(lambda: target.copy_(source), traffic=2 * source.nbytes)
    return row | {"ceiling": row["bytes"] / row["us"] * 1e6, "of": "memory"}


def _read(bench: Bench) -> Row:
    """Attention to a cache and products with few rows read much and write little."""
    source = bench.randn(2**12 if bench.tiny else 2**28, dtype=torch.float32)
    row = bench.measure(source.amax, traffic=source.nbytes)
    return row | {"ceiling": row["bytes"] / row["us"] * 1e6, "of": "memory"}


def _product(bench: Bench, name: str, make: Callable[[Bench, int], Callable[[], object]]) -> Row:
    size = 64 if bench.tiny else 8192
    try:
        work = make(bench, size)
        work()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise SkippedError(f"torch cannot here: {str(error).splitlines()[0]}") from error
    row = bench.measure(work, traffic=0, operations=2 * size**3, rate=name)
    return row | {"ceiling": row["operations"] / row["us"] * 1e6, "of": name}


def _bf16(bench: Bench, size: int) -> Callable[[], object]:
    a, b = (bench.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
    return partial(torch.mm, a, b.T)


def _fp16(bench: Bench, size: int) -> Callable[[], object]:
    a, b = (bench.randn(size, size, dtype=torch.float16) for _ in range(2))
    return partial(torch.mm, a, b.T)


def _fp8(bench: Bench, size: int) -> Callable[[], object]:
    a, b = (bench.randn(size, size).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=bench.device)
    return lambda: torch._scaled_mm(
        *(a, b.T, one, one), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _int8(bench: Bench, size: int) -> Callable[[], object]:
    a, b = (
        torch.randint(-127, 128, (size, size), dtype=torch.int8, device=bench.device)
        for _ in range(2)
    )
    return lambda: torch._int_mm(a, b.T)


def _small_kernel(bench: Bench) -> Row:
    """What next to no work takes by this clock: rows near it tell nothing of their kernels."""
    x = bench.randn(16)
    return bench.measure(lambda: x.add_(1), traffic=0)


def _graph_launch(bench: Bench) -> Row:
    """What each of many small kernels in a row takes when a graph launches them."""
    x, count = bench.randn(16), 100
    row = bench.measure(lambda: [x.add_(1) for _ in range(count)], traffic=0)
    return row | {"us_each": round(row["us"] / count, 3)}


def _host_launch(bench: Bench) -> Row:
    """What a Triton kernel that does nothing takes from the host's call to the end."""
    x, weight = bench.randn(1, 64), bench.randn(64)
    timing = bench.stopwatch.wall(lambda: bench.ops.rms_norm(x, weight, 1e-6), repeats=50)
    return {"us": round(timing.us, 2), "us_p20": timing.us_p20, "us_p80": timing.us_p80}
