"""Time of one step of the model on a CPU, logits and all: the C++ in int8 beside torch in fp32.

A decode step gives each sequence one token on top of ``--context``; a prefill is one prompt. Pages
are spread over the whole cache in random order, as they are after a while of serving. Before a path
is timed, its logits of a prompt are held against those of fp32. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from record import circumstances, save

from fullbore_backend.config import EngineConfig
from fullbore_backend.kernels import AttentionBatch, KvPages
from fullbore_backend.loading import load_model
from fullbore_backend.runner import Runner

BLOCK = 16
PATHS = (("int8", "bf16"), ("int8", "int8"), ("int8", "fp32"), ("fp32", "fp32"))
"""Precisions of the weights and of the KV cache."""
ALLOWED = 0.15
"""How far logits may be from those of fp32, relative to their norm; the KV cache counts too."""


def runner(weights: str, kv: str, tokens: int) -> Runner:
    """The default model with room for ``tokens`` in its cache."""
    # 48 KiB is a token in the widest precision.
    config = EngineConfig(
        precision=weights,  # type: ignore[arg-type]
        kv_precision=kv,  # type: ignore[arg-type]
        device="cpu",
        kv_cache_bytes=(tokens + BLOCK) * 48 * 1024,
    )
    return load_model(config, progress=lambda _: None).runner


def fill(pages: KvPages, generator: torch.Generator) -> None:
    """Put random keys and values everywhere."""
    for x, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
        if scale is None:
            x.normal_(generator=generator)
        else:
            x.random_(-127, 128, generator=generator)
            scale.fill_(0.02)


def step(made: Runner, sequences: int, new: int, context: int) -> Callable[[], torch.Tensor]:
    """A step of ``sequences`` with ``new`` tokens each on top of ``context``; its last logits."""
    generator = torch.Generator().manual_seed(0)
    count = sequences * new
    ids = torch.randint(0, made.model.vocab_size, (count,), generator=generator)
    blocks = -(-(context + new) // BLOCK)
    order = torch.randperm(len(made.pages[0].k), generator=generator).tolist()
    batch = AttentionBatch.build(
        query_lens=[new] * sequences,
        context_lens=[context + new] * sequences,
        block_tables=[order[i * blocks : (i + 1) * blocks] for i in range(sequences)],
        block_size=BLOCK,
        device=torch.device("cpu"),
    )
    positions = torch.arange(context, context + new).repeat(sequences)
    rows = torch.arange(new - 1, count, new)
    return lambda: made.model(ids, positions, rows, made.pages, batch)


def seconds(run: Callable[[], object], budget: float) -> list[float]:
    """How long each run took, after two that do not count, for about ``budget`` seconds."""
    for _ in range(2):
        run()
    taken: list[float] = []
    while sum(taken) < budget or len(taken) < 5:
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return taken


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every path in every scene."""
    batches, prompts = arguments.batches, arguments.prompts
    tokens = max([count * (arguments.context + 2 * BLOCK) for count in batches] + prompts)
    expected = step(runner("fp32", "fp32", tokens), 1, 64, 0)().clone()
    measured = []
    for weights, kv in PATHS:
        made = runner(weights, kv, tokens)
        error = ((step(made, 1, 64, 0)() - expected).norm() / expected.norm()).item()
        assert error <= ALLOWED, f"{weights} weights, {kv} cache: logits are off by {error:.2f}"
        generator = torch.Generator().manual_seed(0)
        for pages in made.pages:
            fill(pages, generator)
        scenes = [(count, 1, arguments.context) for count in batches]
        for sequences, new, context in scenes + [(1, prompt, 0) for prompt in prompts]:
            taken = seconds(step(made, sequences, new, context), arguments.budget)
            low, _, _, high = statistics.quantiles(taken, n=5)
            middle = statistics.median(taken)
            measured.append(
                {
                    "weights": weights,
                    "kv": kv,
                    "sequences": sequences,
                    "new": new,
                    "context": context,
                    "step_ms": round(middle * 1e3, 2),
                    "step_ms_p20": round(low * 1e3, 2),
                    "step_ms_p80": round(high * 1e3, 2),
                    "tokens_per_s": round(sequences * new / middle),
                    "logits_error": round(error, 4),
                }
            )
    return measured


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=200, help="tokens before the new one")
    parser.add_argument("--prompts", type=int, nargs="*", default=[83, 512], help="tokens")
    parser.add_argument("--budget", type=float, default=1.5, help="seconds for each figure")
    parser.add_argument("--save", action="store_true", help="also write it to bench/results")
    arguments = parser.parse_args()
    steps = measure(arguments)
    result = circumstances(["fullbore", "torch"]) | {
        "threads": torch.get_num_threads(),
        "steps": steps,
    }
    if arguments.save:
        save("cpu-step", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
