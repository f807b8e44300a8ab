"""The process that measures: sections of cases, one row sent for each.

A kernel at fault can take its process along, or the device's context, or never return. So the
process that keeps the results is another one (:mod:`gpu`), and starts this one again behind the
case at fault.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from gpu_attention import attention, latent_attention, shared_prefixes
from gpu_cases import Case
from gpu_ceilings import ceilings
from gpu_engine import whole_engine
from gpu_linear import experts, linear
from gpu_small import sampling, small_operations
from gpu_steps import decode_steps
from gpu_timing import Bench, SkippedError, Stopwatch

from fullbore_backend.kernels import triton_ops

SECTIONS: Mapping[str, Callable[[Bench], Iterator[Case]]] = {
    "ceilings": ceilings,
    "operations": small_operations,
    "attention": attention,
    "steps": partial(decode_steps, names=("Qwen3-0.6B", "Qwen3-8B")),
    "engine": whole_engine,
    "linear": linear,
    "experts": experts,
    "latent attention": latent_attention,
    "shared prefixes": shared_prefixes,
    "sampling": sampling,
    "steps of experts": partial(decode_steps, names=("Qwen3-30B-A3B",)),
}
"""In the order of their importance: the time may not be enough for all."""


def serve(pipe: Connection, *, tiny: bool, only: str, done: frozenset[str]) -> None:
    """Measure what is not done yet.

    Sends ``("device", facts)``, ``("plan", names)``, then for each case ``("begin", name,
    patience)`` and ``("row", name, row)``, and ``("end",)``.

    :param only: part of the names of the cases wanted.
    :param done: names not to measure again.
    """
    if not tiny and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here; --tiny runs on a CPU.")
    bench = _bench(tiny=tiny)
    pipe.send(("device", facts(bench.device)))
    pipe.send(("plan", [name for name, _ in _cases(bench) if _wanted(name, only)]))
    for name, case in _cases(bench):
        if not _wanted(name, only) or name in done:
            continue
        pipe.send(("begin", name, case.patience))
        pipe.send(("row", name, _measured(case)))
        bench.stopwatch.synchronize()  # raises when the context is lost: a new process goes on
    pipe.send(("end",))


def _wanted(name: str, only: str) -> bool:
    return only in name or name.startswith("ceilings/")


def _cases(bench: Bench) -> Iterator[tuple[str, Case]]:
    for section, cases in SECTIONS.items():
        for case in cases(bench):
            yield f"{section}/{case.name}", case


def _measured(case: Case) -> dict[str, Any]:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    random.seed(0)
    try:
        with torch.inference_mode():
            return case.measure()
    except SkippedError as reason:
        return {"skipped": str(reason)}
    except Exception as error:  # whatever a kernel raises is a result, and the next case may run
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def _bench(*, tiny: bool) -> Bench:
    device = torch.device("cpu" if tiny else "cuda")
    return Bench(
        device=device,
        tiny=tiny,
        dtype=torch.float16 if tiny else torch.bfloat16,
        ops=triton_ops(),
        stopwatch=Stopwatch(device),
    )


def facts(device: torch.device) -> dict[str, Any]:
    """What the device says of itself."""
    if device.type != "cuda":
        return {"name": "none: Triton's interpreter on the CPU"}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory": found.total_memory,
        "l2_cache": found.L2_cache_size,
        "cuda": torch.version.cuda,
    }
