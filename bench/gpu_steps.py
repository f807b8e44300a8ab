"""A decode step of a whole model, on the device, against its roofline.

The step is captured and replayed as the engine does it, up to the logits. It may not be faster than
its bytes at the measured bandwidth, nor than its operations at the measured rate: see
:mod:`gpu_models`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from gpu_cases import Case
from gpu_models import random_model, resident_bytes, shape, step_bytes, step_operations
from gpu_timing import Bench, Row, SkippedError

from fullbore_backend.kernels import AttentionBatch, KvPages
from fullbore_backend.models import Decoder

BLOCK = 16


class _Model:
    """A model and its cache, made when first asked for.

    :param tokens: of all sequences together, that the cache has room for.
    """

    def __init__(self, bench: Bench, name: str, tokens: int) -> None:
        self.bench, self.config = bench, shape(name, tiny=bench.tiny)
        self.tokens = tokens

    def check_room(self) -> None:
        """Raise :class:`SkippedError` where it does not fit."""
        if self.bench.device.type != "cuda" or "model" in vars(self):
            return
        needed = resident_bytes(self.config, self.tokens)
        if needed > 0.85 * torch.cuda.get_device_properties(self.bench.device).total_memory:
            raise SkippedError(f"model and cache take {needed / 2**30:.0f} GiB, more than there is")

    @cached_property
    def model(self) -> Decoder:
        bench = self.bench
        return random_model(self.config, bench.ops, dtype=bench.dtype, device=bench.device)

    @cached_property
    def pages(self) -> list[KvPages]:
        kv = self.model.kv
        made = [
            KvPages.zeros(
                *(self.tokens // BLOCK, BLOCK, kv.kv_heads),
                k_dim=kv.k_dim,
                v_dim=kv.v_dim,
                dtype=self.bench.dtype,
                device=self.bench.device,
            )
            for _ in range(kv.layers)
        ]
        for page in made:
            page.k.normal_()
            page.v.normal_()
        return made


def decode_steps(bench: Bench, names: Sequence[str]) -> Iterator[Case]:
    """One model after the other, at several batch sizes of 1,024 tokens of context each."""
    batches, context = ((2,), 32) if bench.tiny else ((1, 16, 64, 256), 1024)
    for name in names:
        made = _Model(bench, name, max(batches) * context)
        for batch in batches:
            case = f"{name}, {batch} x {context}"
            yield Case(case, partial(_step, made, batch, context), patience=120)
        del made


def _step(made: _Model, batch: int, context: int) -> Row:
    bench, config = made.bench, made.config
    made.check_room()
    model, pages = made.model, made.pages
    device = bench.device
    each = context // BLOCK
    step = AttentionBatch.build(
        query_lens=[1] * batch,
        context_lens=[context] * batch,
        block_tables=[range(i * each, (i + 1) * each) for i in range(batch)],
        block_size=BLOCK,
        device=device,
    )
    tokens = torch.randint(0, config["vocab_size"], (batch,), device=device)
    positions = torch.full((batch,), context - 1, device=device)
    rows = torch.arange(batch, device=device)
    row: dict[str, Any] = bench.measure(
        lambda: model(tokens, positions, rows, pages, step),
        traffic=step_bytes(config, batch, context, bench.dtype.itemsize),
        operations=step_operations(config, batch, context),
    )
    return row | {"tokens_per_s": round(batch / row["us"] * 1e6)}
