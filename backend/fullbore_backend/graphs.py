"""Decode steps as CUDA graphs: one launch instead of hundreds, for each of a few batch sizes.

A graph replays the same kernels on the same memory, so inputs are written into buffers that it was
captured with, and a batch is padded to the next size there is a graph for. What a graph computes is
what the model computes on the same tokens: nothing is approximated.

Knows the model's forward pass and nothing of scheduling or sampling.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .kernels import AttentionBatch, KvPages
from .models import Model

Replay = Callable[[], None]
Capture = Callable[[Callable[[], torch.Tensor], torch.Tensor], Replay]
"""Records a computation that ends by writing its result into a tensor, and returns its replay."""


def batch_sizes(largest: int) -> tuple[int, ...]:
    """The sizes worth a graph: 1, 2, 4, then every 8 up to 64, every 16 up to 256, every 64 beyond.

    Padding then costs at most an eighth of a step, above 8 sequences.
    """
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 64, 64)]
    return (*(size for size in steps if size < largest), largest)


class DecodeGraphs:
    """Graphs of one model's decode steps on one KV cache.

    :param max_context_len: the longest sequence there may be; attention is planned for it.
    :param largest: the most sequences in a step.
    :param capture: see :func:`cuda_capture`.
    """

    def __init__(
        self,
        model: Model,
        pages: Sequence[KvPages],
        *,
        block_size: int,
        max_context_len: int,
        largest: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._block_size = block_size
        self.sizes = batch_sizes(largest)
        width = -(-max_context_len // block_size)

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids = zeros(largest, dtype=torch.int64)
        self._positions = zeros(largest, dtype=torch.int64)
        self._slots = zeros(largest, dtype=torch.int64) - 1
        self._starts = zeros(largest + 1, dtype=torch.int32)
        self._contexts = zeros(largest, dtype=torch.int32)
        self._table = zeros(largest, width, dtype=torch.int32)
        self._rows = torch.arange(largest, device=device)
        self._logits = torch.empty(largest, model.vocab_size, dtype=torch.float32, device=device)
        self._staging = _Staging(largest, width, pinned=device.type == "cuda")
        # The largest first: the smaller ones find its memory in the pool.
        self._replays = {
            size: capture(
                functools.partial(self._forward, model, pages, size, max_context_len),
                self._logits[:size],
            )
            for size in reversed(self.sizes)
        }

    def _forward(
        self, model: Model, pages: Sequence[KvPages], size: int, max_context_len: int
    ) -> torch.Tensor:
        batch = AttentionBatch(
            slots=self._slots[:size],
            query_starts=self._starts[: size + 1],
            context_lens=self._contexts[:size],
            block_table=self._table[:size],
            max_query_len=1,
            max_context_len=max_context_len,
            num_decodes=size,
        )
        logits: torch.Tensor = model(
            self.token_ids[:size], self._positions[:size], self._rows[:size], pages, batch
        )
        return logits

    def run(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        place: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Run a step of at most ``largest`` sequences with one new token each.

        :param place: called with the device's token ids before they are used: fills in those that
            only the device knows.
        :returns: logits (sequences, vocab_size) fp32, valid until the next run.
        """
        count = len(token_ids)
        size = next(size for size in self.sizes if size >= count)
        staging = self._staging
        staging.fill(token_ids, positions, block_tables, size, self._block_size)
        width = staging.width
        self.token_ids[:size].copy_(staging.token_ids[:size], non_blocking=True)
        self._positions[:size].copy_(staging.positions[:size], non_blocking=True)
        self._slots[:size].copy_(staging.slots[:size], non_blocking=True)
        self._starts[: size + 1].copy_(staging.starts[: size + 1], non_blocking=True)
        self._contexts[:size].copy_(staging.contexts[:size], non_blocking=True)
        self._table[:size, :width].copy_(staging.table[:size, :width], non_blocking=True)
        if place is not None:
            place(self.token_ids)
        self._replays[size]()
        return self._logits[:count]


class _Staging:
    """The inputs of a step on the host, pinned so that they can be copied without waiting.

    Two sets take turns: one may still be read by a copy while the next is written.
    """

    def __init__(self, largest: int, width: int, *, pinned: bool) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pinned)

        self._sets = [
            {
                "token_ids": zeros(largest, dtype=torch.int64),
                "positions": zeros(largest, dtype=torch.int64),
                "slots": zeros(largest, dtype=torch.int64),
                "starts": zeros(largest + 1, dtype=torch.int32),
                "contexts": zeros(largest, dtype=torch.int32),
                "table": zeros(largest, width, dtype=torch.int32),
            }
            for _ in range(2)
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._pinned = pinned
        self.width = width
        self._use(0)

    def _use(self, turn: int) -> None:
        tensors = self._sets[turn]
        self.token_ids, self.positions = tensors["token_ids"], tensors["positions"]
        self.slots, self.starts = tensors["slots"], tensors["starts"]
        self.contexts, self.table = tensors["contexts"], tensors["table"]

    def fill(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        size: int,
        block_size: int,
    ) -> None:
        """Write a step; rows from ``len(token_ids)`` to ``size`` are padding."""
        if self._pinned:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()  # after the copies out of the set in use
            self._copied[self._turn] = event
            self._turn = 1 - self._turn
            if (before := self._copied[self._turn]) is not None:
                before.synchronize()
            self._use(self._turn)
        count = len(token_ids)
        at = np.asarray(positions, dtype=np.int64)
        self.token_ids[:count] = torch.from_numpy(np.asarray(token_ids, dtype=np.int64))
        self.positions[:count] = torch.from_numpy(at)
        self.contexts[:count] = torch.from_numpy((at + 1).astype(np.int32))
        self.starts[: count + 1] = torch.arange(count + 1, dtype=torch.int32)
        slots, table = self.slots.numpy(), self.table.numpy()
        self.width = 1
        for row, (position, blocks) in enumerate(zip(positions, block_tables, strict=True)):
            used = position // block_size + 1
            table[row, :used] = blocks[:used]
            slots[row] = blocks[used - 1] * block_size + position % block_size
            self.width = max(self.width, used)
        self.token_ids[count:size] = 0
        self.positions[count:size] = 0
        self.contexts[count:size] = 0
        self.slots[count:size] = -1
        self.starts[count + 1 : size + 1] = count


def cuda_capture() -> Capture:
    """Captures into CUDA graphs that share one memory pool, on a stream of their own."""
    pool = torch.cuda.graph_pool_handle()

    def capture(compute: Callable[[], torch.Tensor], result: torch.Tensor) -> Replay:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels and sets libraries up
            result.copy_(compute())
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result.copy_(compute())
        return graph.replay

    return capture


def eager_capture(compute: Callable[[], torch.Tensor], result: torch.Tensor) -> Replay:
    """No capture at all: a replay computes anew. For devices without graphs, and for tests."""

    def replay() -> None:
        result.copy_(compute())

    return replay
