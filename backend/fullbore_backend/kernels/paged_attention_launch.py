"""Launches the attention kernel on a step: what is chosen on the host, by what the host knows.

Nothing here waits for the device or reads from it, so that a launch can be part of a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ._triton import CompileCase, Launch, capability, triton
from .attention_batch import AttentionBatch
from .kv_pages import KvPages
from .paged_attention_kernel import attention_kernel, merge_kernel
from .paged_attention_tuning import (
    MAX_DECODE_ROWS,
    MAX_SEGMENTS,
    MIN_SEGMENT,
    choose,
    choose_segments,
)

__all__ = ["Attention", "Partials", "Span", "compile_cases", "paged_attention_triton", "spans"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partials:
    """Results of parts of the keys, to be joined.

    :param out: (tokens, heads, slots, v_dim) fp32.
    :param lse: (tokens, heads, slots) fp32, the log-sum-exp of the scores in base 2, minus infinity
        for a slot without keys, which is not filled in.
    """

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def empty(cls, query: torch.Tensor, slots: int, v_dim: int) -> Partials:
        """Room for ``slots`` parts of each row of ``query``."""
        lse = query.new_empty(*query.shape[:2], slots, dtype=torch.float32)
        return cls(out=lse.new_empty(*lse.shape, v_dim), lse=lse)

    def merge(self, out: torch.Tensor, sinks: torch.Tensor | None, rows: slice) -> None:
        """Write the joined results of some tokens to their rows of ``out``."""
        parts, lse, target = self.out[rows], self.lse[rows], out[rows]
        tokens, heads, slots, v_dim = parts.shape
        merge_kernel[(tokens * heads,)](
            *(parts, lse, lse if sinks is None else sinks, target, slots),
            HEADS=heads,
            V_DIM=v_dim,
            BLOCK_V=triton.next_power_of_2(v_dim),
            BLOCK_SLOTS=max(16, triton.next_power_of_2(slots)),
            HAS_SINKS=sinks is not None,
            num_warps=4,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Neighbouring sequences that one launch works on.

    :param first_row: where their tokens begin, :param tokens: and how many there are, or a bound.
    :param query_len: no sequence has more new tokens.
    :param context_len: no sequence has more keys.
    """

    first_seq: int
    num_seqs: int
    first_row: int
    tokens: int
    query_len: int
    context_len: int

    @property
    def rows(self) -> slice:
        """The rows of their tokens."""
        return slice(self.first_row, self.first_row + self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One call's inputs and options, and launches on spans of its sequences."""

    query: torch.Tensor
    pages: KvPages
    batch: AttentionBatch
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    capability: int = field(init=False)

    def __post_init__(self) -> None:
        query = self.query
        if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
            object.__setattr__(self, "query", query.contiguous())
        elif query.dtype == torch.bfloat16 and query.device.type == "cpu":
            # Triton's interpreter keeps bf16 as the integers of its bits, and would multiply those.
            object.__setattr__(self, "query", query.float())
        for pages in (self.pages.k, self.pages.v):
            assert pages[0].is_contiguous(), "the kernel computes offsets inside a page"
        if self.pages.k.shape == self.pages.v.shape:
            assert self.pages.k.stride(0) == self.pages.v.stride(0), (
                "the kernel computes one offset"
            )
        object.__setattr__(self, "capability", capability(self.query.device))

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query.shape[1] // self.pages.k.shape[2]

    def choose(self, query_len: int, *, partial: bool = False) -> Launch:
        """The launch for sequences of at most ``query_len`` new tokens."""
        return choose(
            capability=self.capability,
            query_len=query_len,
            group=self.group,
            head_dim=max(self.pages.k.shape[3], self.pages.v.shape[3]),
            exact=self.query.dtype == torch.float32,
            quantized=self.pages.k_scale is not None,
            partial=partial,
        )

    def blocks(self, launch: Launch, span: Span) -> int:
        """The most blocks of queries that the sequences of ``span`` can have."""
        block_q = launch.blocks["BLOCK_M"] // self.group
        if span.query_len <= block_q:
            return span.num_seqs
        return span.tokens // block_q + span.num_seqs

    def segments(self, launch: Launch, span: Span) -> int:
        """Into how many segments to cut the keys of each block."""
        keys = span.context_len
        if self.window is not None:
            keys = min(keys, self.window + launch.blocks["BLOCK_M"])
        return choose_segments(
            programs=self.blocks(launch, span) * self.pages.k.shape[2],
            keys=keys,
            multiprocessors=_multiprocessors(self.query.device),
            decode=launch.blocks["BLOCK_M"] <= MAX_DECODE_ROWS,
        )

    def attend(self, out: torch.Tensor, span: Span, segments: int | None = None) -> None:
        """Write the results of the sequences of ``span`` to their rows of ``out``."""
        launch = self.choose(span.query_len)
        if segments is None:
            segments = self.segments(launch, span)
        if segments == 1:
            self.launch(launch, out, span)
            return
        launch = self.choose(span.query_len, partial=True)
        partials = Partials.empty(self.query, segments, out.shape[2])
        replace(self, sinks=None).launch(launch, partials, span, segments=segments)
        partials.merge(out, self.sinks, span.rows)

    def launch(
        self,
        launch: Launch,
        out: torch.Tensor | Partials,
        span: Span,
        *,
        segments: int = 1,
        slot: int = 0,
        shared: int = 0,
        as_one: bool = False,
    ) -> None:
        """Start the kernel: see there for the meaning of the arguments."""
        partial = isinstance(out, Partials)
        target, lse = (out.out, out.lse) if isinstance(out, Partials) else (out, out)
        blocks = self.blocks(launch, replace(span, num_seqs=1) if as_one else span)
        attention_kernel[(blocks, self.pages.k.shape[2], segments)](
            *self._tensors(target, lse),
            *(span.first_seq, span.num_seqs, shared, segments, slot),
            lse.shape[2] if partial else 1,
            *(self.batch.block_table.stride(0), self.query.stride(0)),
            *(self.pages.k.stride(0), self.pages.v.stride(0)),
            *_folded(self.scale, self.soft_cap),
            **self._constants(launch, span.query_len, partial=partial, as_one=as_one),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )

    def _tensors(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pages, batch = self.pages, self.batch
        k, v = pages.k, pages.v
        if self._fp8_bits:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        return (
            *(self.query, k, v),
            # What is not there is not read; any tensor stands for it.
            lse if pages.k_scale is None else pages.k_scale,
            lse if pages.v_scale is None else pages.v_scale,
            lse if self.sinks is None else self.sinks,
            *(out, lse, batch.query_starts, batch.context_lens, batch.block_table),
        )

    @property
    def _fp8_bits(self) -> bool:
        """Whether fp8 pages are read as bytes, because the chip cannot convert them."""
        return self.pages.k.dtype == torch.float8_e4m3fn and self.capability < 90

    def _constants(
        self, launch: Launch, query_len: int, *, partial: bool, as_one: bool
    ) -> dict[str, Any]:
        """The kernel's ``constexpr`` arguments."""
        pages, group = self.pages, self.group
        return attention_constants(
            launch,
            group=group,
            kv_heads=pages.k.shape[2],
            k_dim=pages.k.shape[3],
            v_dim=pages.v.shape[3],
            block_size=pages.block_size,
            window=self.window,
            has_cap=self.soft_cap is not None,
            has_sinks=self.sinks is not None,
            quantized=pages.k_scale is not None,
            fp8_bits=self._fp8_bits,
            partial=partial,
            as_one=as_one,
            one_block=query_len * group <= launch.blocks["BLOCK_M"],
        )


def paged_attention_triton(
    query: torch.Tensor,
    pages: KvPages,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    segments: int | None = None,
) -> torch.Tensor:
    """:func:`.paged_attention.paged_attention_torch` on the GPU.

    Decodes in front are launched apart from longer queries. Reads each visible key and value once
    for each block of queries, and computes ``2 · heads · (k_dim + v_dim)`` operations for each pair
    of a query and a key.

    :param query: rows may lie apart, as in a slice of a joint projection.
    :param segments: cut the keys of a block into so many at most; 1 makes the result of a sequence
        independent of its neighbours. ``None`` chooses, by sizes that the host knows.
    """
    out = query.new_empty(*query.shape[:2], pages.v.shape[3])
    attention = Attention(
        query=query,
        pages=pages,
        batch=batch,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    for span in spans(query.shape[0], batch):
        attention.attend(out, span, segments)
    return out


def spans(tokens: int, batch: AttentionBatch, sequences: range | None = None) -> Iterator[Span]:
    """The decodes of a step, and what follows them.

    :param tokens: rows of the step. :param sequences: which of its sequences; all unless given.
    """
    num_seqs = batch.context_lens.shape[0]
    first, stop = (0, num_seqs) if sequences is None else (sequences.start, sequences.stop)
    decodes = num_seqs if batch.max_query_len <= 1 else batch.num_decodes
    middle = min(max(first, decodes), stop)
    for start, end, query_len in ((first, middle, 1), (middle, stop, batch.max_query_len)):
        row, end_row = (_row(tokens, batch, seq, decodes) for seq in (start, end))
        if end > start and end_row > row:
            yield Span(
                first_seq=start,
                num_seqs=end - start,
                first_row=row,
                tokens=end_row - row,
                query_len=query_len,
                context_len=batch.max_context_len,
            )


def _row(tokens: int, batch: AttentionBatch, seq: int, decodes: int) -> int:
    """The row where a sequence begins."""
    if seq == batch.context_lens.shape[0]:
        return tokens
    if seq <= decodes:
        return min(seq, tokens)
    assert batch.lens is not None, "only the host's copy tells where a prefill begins"
    return sum(batch.lens[0][:seq])


def _folded(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """The kernel's ``scale`` and ``to_cap``: tanh(x) = ``2 / (1 + exp2(-2 · log2(e) · x)) - 1``."""
    log2_e = math.log2(math.e)
    if soft_cap is None:
        return scale * log2_e, 0.0
    return soft_cap * log2_e, -2 * log2_e * scale / soft_cap


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # as many as an H100 has: the interpreter plays one
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def attention_constants(
    launch: Launch,
    *,
    group: int,
    kv_heads: int,
    k_dim: int,
    v_dim: int,
    block_size: int,
    window: int | None = None,
    has_cap: bool = False,
    has_sinks: bool = False,
    quantized: bool = False,
    fp8_bits: bool = False,
    partial: bool = False,
    as_one: bool = False,
    one_block: bool = False,
) -> dict[str, Any]:
    """The ``constexpr`` arguments of the kernel."""
    block_m = launch.blocks["BLOCK_M"]
    return {
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "BLOCK_K": max(16, triton.next_power_of_2(k_dim)),
        "BLOCK_V": max(16, triton.next_power_of_2(v_dim)),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": block_m,
        "BLOCK_Q": block_m // group,
        "TILE": launch.blocks["TILE"],
        "MIN_SEGMENT": MIN_SEGMENT,
        "WINDOW": window or 0,
        "HAS_CAP": has_cap,
        "HAS_SINKS": has_sinks,
        "QUANTIZED": quantized,
        "FP8_BITS": fp8_bits,
        "PARTIAL": partial,
        "SHARED": as_one,
        "ONE_BLOCK": one_block,
        "PEEL": block_m > MAX_DECODE_ROWS and window is None,
    }


def compile_cases(capability: int) -> Iterator[CompileCase]:
    """Every configuration that the compile table builds for ``capability``."""
    for dtype in ("bf16", "fp16"):
        for k_dim in (64, 80, 96, 128, 192, 256):
            yield _case(capability, "decode", dtype, dtype, k_dim)
            yield _case(capability, "prefill", dtype, dtype, k_dim)
    for stored in ("fp8e4nv", "i8"):
        for k_dim in (64, 128, 256):
            yield _case(capability, "decode", "bf16", stored, k_dim, partial=True)
            yield _case(capability, "prefill", "bf16", stored, k_dim)
    yield _case(capability, "decode", "fp32", "fp32", 128)
    yield _case(capability, "decode", "bf16", "bf16", 128, group=8, partial=True)
    yield _case(capability, "decode", "bf16", "bf16", 128, group=16, block_size=256)
    yield _case(capability, "decode", "bf16", "bf16", 128, group=32)
    for kind in ("decode", "prefill"):
        yield _case(capability, kind, "bf16", "bf16", 64, group=8, window=128, has_sinks=True)
        yield _case(capability, kind, "bf16", "bf16", 256, group=2, window=4096, has_cap=True)
    for as_one in (False, True):
        yield _case(capability, "prefill", "bf16", "bf16", 128, partial=True, as_one=as_one)
    for size in (64, 128, 256):
        yield CompileCase(
            name=f"merge/bf16/{size}",
            kernel=merge_kernel,
            arguments={
                **dict.fromkeys(("partial_ptr", "lse_ptr", "sinks_ptr"), "*fp32:16"),
                "out_ptr": "*bf16:16",
                "slots": "i32",
            },
            constants={
                "HEADS": 32,
                "V_DIM": size,
                "BLOCK_V": size,
                "BLOCK_SLOTS": MAX_SEGMENTS,
                "HAS_SINKS": True,
            },
        )


def _case(
    capability: int,
    kind: str,
    dtype: str,
    stored: str,
    head_dim: int,
    *,
    group: int = 4,
    block_size: int = 16,
    **options: Any,
) -> CompileCase:
    """The attention kernel for 8 KV heads."""
    launch = choose(
        capability=capability,
        query_len=1 if kind == "decode" else 1024,
        group=group,
        head_dim=head_dim,
        exact=dtype == "fp32",
        quantized=stored != dtype,
        partial=options.get("partial", False),
    )
    fp8_bits = stored == "fp8e4nv" and capability < 90
    pages = "*u8:16" if fp8_bits else f"*{stored}:16"
    result = "*fp32:16" if options.get("partial") else f"*{dtype}:16"
    ints = ("first_seq", "num_seqs", "shared", "segments", "slot", "slots", "table_stride")
    given = "".join(f"/{name}" for name, value in options.items() if value)
    return CompileCase(
        name=f"attention/{kind}/{dtype}/{stored}/{head_dim}/group{group}/page{block_size}{given}",
        kernel=attention_kernel,
        arguments={
            "query_ptr": f"*{dtype}:16",
            **dict.fromkeys(("k_ptr", "v_ptr"), pages),
            **dict.fromkeys(("k_scale_ptr", "v_scale_ptr", "sinks_ptr"), "*fp32:16"),
            "out_ptr": result,
            "lse_ptr": "*fp32:16",
            **dict.fromkeys(("query_starts_ptr", "context_lens_ptr", "table_ptr"), "*i32:16"),
            **dict.fromkeys(ints, "i32"),
            **dict.fromkeys(("query_stride", "k_block_stride", "v_block_stride"), "i32:16"),
            **dict.fromkeys(("scale", "to_cap"), "fp32"),
        },
        constants=attention_constants(
            launch,
            group=group,
            kv_heads=8,
            k_dim=head_dim,
            v_dim=head_dim,
            block_size=block_size,
            quantized=stored != dtype,
            fp8_bits=fp8_bits,
            one_block=kind == "decode",
            **options,
        ),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        tensor_cores=dtype != "fp32",
        warp_group=kind == "prefill",
    )
