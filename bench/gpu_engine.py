"""The engine as users run it: tokens a second, and what the host adds to a step.

The load is that of nano-vllm's benchmark: 256 requests at once, prompts of 100 to 1,024 random
ids, as many output tokens, past any end of sequence, on the shape of Qwen3-0.6B. Weights are
random, from a folder that is written first and loaded like any other.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from gpu_cases import Case
from gpu_models import shape, step_bytes, write_checkpoint
from gpu_timing import Bench, Row, SkippedError
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fullbore_backend import ConfigError, Engine, EngineConfig, SamplingParams
from fullbore_backend.config import Precision

MODEL = "Qwen3-0.6B"
PROFILED_STEPS = 20


class _Folder:
    """A checkpoint of :data:`MODEL` and an engine on it, each made when first asked for."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._ids = random.Random(0)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._engine: tuple[EngineConfig, Engine] | None = None

    def config(self, **changes: Any) -> EngineConfig:
        """Settings of the benchmark: 256 at once, a budget of 8,192 tokens a step."""
        tiny = self.bench.tiny
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
            dtype = torch.float32 if tiny else torch.bfloat16
            write_checkpoint(
                Path(self._folder.name), shape(MODEL, tiny=tiny), dtype, self.bench.device
            )
        config = EngineConfig(
            model=self._folder.name,
            max_model_len=256 if tiny else 4096,
            max_num_seqs=4 if tiny else 256,
            max_num_batched_tokens=64 if tiny else 8192,
            kv_cache_bytes=2**24 if tiny else None,
        )
        return replace(config, **changes)

    def prompts(self, sizes: Iterable[int]) -> list[list[int]]:
        """Random ids, never the same again: a later run finds no prefix of an earlier one's."""
        limit = min(10_000, shape(MODEL, tiny=self.bench.tiny)["vocab_size"])
        return [[self._ids.randrange(limit) for _ in range(size)] for size in sizes]

    def engine(self, **changes: Any) -> Engine:
        """An engine of such settings; the one before is given up."""
        config = self.config(**changes)
        if self._engine is None or self._engine[0] != config:
            self._engine = None
            gc.collect()  # a model and its graphs refer to each other
            if self.bench.device.type == "cuda":
                torch.cuda.empty_cache()
            engine = Engine(config)
            engine.warm_up()
            self._engine = config, engine
        return self._engine[1]


def whole_engine(bench: Bench) -> Iterator[Case]:
    """Throughput, greedy and drawn; the host's share; then without overlap, and narrower."""
    folder = _Folder(bench)
    drawn = SamplingParams(temperature=0.6, ignore_eos=True)
    greedy = replace(drawn, temperature=0)
    yield Case("greedy", partial(_throughput, folder, greedy), patience=200)
    for batch in (2,) if bench.tiny else (1, 16, 64, 256):
        yield Case(f"gap at {batch}", partial(_gap, folder, batch), patience=120)
    yield Case("temperature 0.6", partial(_throughput, folder, drawn), patience=200)
    others: dict[str, dict[str, Any]] = {
        "no overlap": {"overlap": False},
        "fp8 cache": {"kv_precision": "fp8"},
    }
    for narrow in ("int8", "fp8", "int4"):
        if narrow in get_args(Precision):
            others[f"{narrow} weights"] = {"precision": narrow}
    for name, changes in others.items():
        run = partial(_throughput, folder, greedy, **changes)
        yield Case(f"greedy, {name}", run, patience=200)


def _throughput(folder: _Folder, params: SamplingParams, **changes: Any) -> Row:
    """Seconds from the first request to the last token, prompts included, after a small run."""
    low, high, count = (3, 12, 6) if folder.bench.tiny else (100, 1024, 256)
    try:
        engine = folder.engine(**changes)
    except ConfigError as error:  # a setting that is not for this device
        raise SkippedError(str(error)) from error
    engine.generate(folder.prompts([high] * (count // 3)), replace(params, max_tokens=low))
    sizes = random.Random(0)
    prompts = folder.prompts([sizes.randint(low, high) for _ in range(count)])
    asked = [replace(params, max_tokens=sizes.randint(low, high), seed=i) for i in range(count)]
    before = engine.stats()
    began = time.perf_counter()
    done = engine.generate(prompts, asked)
    seconds = time.perf_counter() - began
    after = engine.stats()
    for completion, each in zip(done, asked, strict=True):
        assert len(completion.token_ids) == each.max_tokens, "a request ended early"
    tokens = sum(len(completion.token_ids) for completion in done)
    return {
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / seconds, 1),
        "steps": after.num_steps - before.num_steps,
        "preemptions": after.num_preemptions - before.num_preemptions,
        "blocks": after.num_blocks,
    }


def _gap(folder: _Folder, batch: int) -> Row:
    """What is left of a decode step when the device's own work is taken away.

    The wall's clock times steps without a profiler; then a profiler, which slows the host and not
    the device, tells for how long kernels and copies ran in others.
    """
    bench, engine = folder.bench, folder.engine()
    steps, prompt = (4, 8) if bench.tiny else (100, 256)
    length = prompt + 2 * (steps + PROFILED_STEPS)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=length)
    for index, ids in enumerate(folder.prompts([prompt] * batch)):
        engine.add(f"gap-{index}", ids, params)
    try:
        while len(engine.step()) < batch:
            pass  # prompts
        for _ in range(1 if bench.tiny else 10):
            engine.step()
        wall = [_timed_step(engine) for _ in range(steps)]
        busy = _busy(bench, engine)
    finally:
        engine.abort_all()
    wall_us = statistics.median(wall)
    row: Row = {
        "wall_us": round(wall_us, 1),
        "bytes": int(step_bytes(shape(MODEL, tiny=bench.tiny), batch, prompt + steps // 2)),
    }
    if busy is None:
        return row | {"note": "no profiler of the device here"}
    return row | {"busy_us": round(busy, 1), "gap_us": round(wall_us - busy, 1)}


def _timed_step(engine: Engine) -> float:
    began = time.perf_counter()
    engine.step()
    return (time.perf_counter() - began) * 1e6


def _busy(bench: Bench, engine: Engine) -> float | None:
    """Microseconds a step in which the device ran something; ``None`` where nobody can tell."""
    if bench.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    return covered(spans) / PROFILED_STEPS if spans else None


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans, which come in the order of their starts."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
