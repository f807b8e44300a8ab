"""Attention over pages in Triton: one kernel for decode, chunked prefill and prefill, and a merge.

A program attends ``BLOCK_Q`` neighbouring tokens of one sequence, with all query heads of one KV
head, to a range of keys, a tile at a time, by the online softmax of FlashAttention (Dao et al.,
2022; 2023) in base 2. Every key and value is read once for the whole group of heads.

Programs are laid out without knowing on the host where a sequence begins: there are at most
``tokens // BLOCK_Q + sequences`` blocks of queries, and a program finds its own by binary search in
``query_starts`` (Ringlein et al., "The Anatomy of a Triton Attention Kernel", 2025).

A decode has too few programs to fill a GPU, so its keys are cut into segments, each attended by a
program that writes a partial result and its log-sum-exp; :func:`merge_kernel` joins them
(Flash-Decoding, Dao et al., 2023). :mod:`.cascade` joins its two passes in the same way.
"""

from __future__ import annotations

from ._triton import constant, jit, tl

LOG2_E = constant(1.4426950408889634)

NEVER = constant(-1.0e30)
"""The score of a key that may not be seen. Finite, so that no difference of two is NaN; what a row
sums up before its first key that it may see is then multiplied by ``exp2(NEVER - score) = 0``."""

TINY = constant(1.0e-30)
"""Below any sum of weights but that of no key at all: a sequence without keys gets zeros."""

COUNTS = ("first_seq", "num_seqs", "shared", "segments", "slot", "slots", "table_stride")
"""Arguments that differ from step to step: compiled for any value."""


@jit
def _sequence_of(query_starts_ptr, first_seq, num_seqs, block, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of ``num_seqs`` sequences block ``block`` of queries belongs to.

    The blocks of sequence i begin at ``starts[i] // BLOCK_Q + i``: one more than needed at times.
    """
    origin = tl.load(query_starts_ptr + first_seq)
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        start = tl.load(query_starts_ptr + first_seq + middle) - origin
        if start // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    start = tl.load(query_starts_ptr + first_seq + seq) - origin
    return seq, block - (start // BLOCK_Q + seq)


@jit
def _widen(x, dtype: tl.constexpr, FP8_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stored numbers as ``dtype``. For a chip without fp8, their bits as fp16 are 2^-8 times them.

    e4m3 and fp16 differ in the bias of the exponent, 7 and 15, and agree on subnormals.
    """
    if FP8_BITS:
        bits = x.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(dtype)
    return x.to(dtype)


@jit
def _load_tile(  # type: ignore[no-untyped-def]
    at, inside, dims, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Keys or values; zeros for those not inside the sequence, if ``MASKED``, and beyond ``DIM``.

    What a page holds behind the end of a sequence may be NaN, which times nothing is still NaN.
    """
    if MASKED:
        if DIM == BLOCK:
            return tl.load(at, mask=inside[:, None], other=0.0)
        return tl.load(at, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    if DIM == BLOCK:
        return tl.load(at)
    return tl.load(at, mask=(dims < DIM)[None, :], other=0.0)


@jit
def _attend_tile(  # type: ignore[no-untyped-def]
    query,
    positions,
    top,
    total,
    acc,
    start,
    end,
    table_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_block_stride,
    v_block_stride,
    scale,
    to_cap,
    KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FP8_BITS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax: ``TILE`` keys from ``start``, none at ``end`` or beyond."""
    keys = start + tl.arange(0, TILE)
    k_dims = tl.arange(0, BLOCK_K)
    v_dims = tl.arange(0, BLOCK_V)
    inside = keys < end
    if MASKED:
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + keys // BLOCK_SIZE).to(tl.int64)
    offset = keys % BLOCK_SIZE
    k_at = block * k_block_stride + offset * (KV_HEADS * K_DIM)
    v_at = k_at  # said again, because the compiler does not know that the strides are equal
    if K_DIM != V_DIM:
        v_at = block * v_block_stride + offset * (KV_HEADS * V_DIM)
    k_at = k_ptr + k_at[:, None] + k_dims[None, :]
    v_at = v_ptr + v_at[:, None] + v_dims[None, :]
    k = _load_tile(k_at, inside, k_dims, K_DIM, BLOCK_K, MASKED)
    v = _load_tile(v_at, inside, v_dims, V_DIM, BLOCK_V, MASKED)
    k = _widen(k, query.dtype, FP8_BITS)
    scores = tl.dot(query, tl.trans(k), input_precision="ieee")
    if QUANTIZED:
        scale_at = (block * BLOCK_SIZE + offset) * KV_HEADS
        k_scale = tl.load(k_scale_ptr + scale_at, mask=inside, other=0.0)
        v_scale = tl.load(v_scale_ptr + scale_at, mask=inside, other=0.0)
        if FP8_BITS:
            k_scale *= 256
            v_scale *= 256
        scores *= k_scale[None, :]
    if HAS_CAP:
        scores = 2.0 / (1.0 + tl.exp2(scores * to_cap)) - 1.0
    if MASKED:
        seen = inside[None, :]
        if CAUSAL:
            seen &= keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen &= keys[None, :] > positions[:, None] - WINDOW
        scores = tl.where(seen, scores, NEVER)
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores * scale - (new_top * scale)[:, None])
    shrink = tl.exp2((top - new_top) * scale)
    total = total * shrink + tl.sum(weights, 1)
    if QUANTIZED:
        weights *= v_scale[None, :]
    v = _widen(v, query.dtype, FP8_BITS)
    acc = tl.dot(weights.to(query.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@jit(do_not_specialize=COUNTS)  # type: ignore[untyped-decorator]
def attention_kernel(  # type: ignore[no-untyped-def]
    query_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    query_starts_ptr,
    context_lens_ptr,
    table_ptr,
    first_seq,
    num_seqs,
    shared,
    segments,
    slot,
    slots,
    table_stride,
    query_stride,
    k_block_stride,
    v_block_stride,
    scale,
    to_cap,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SEGMENT: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FP8_BITS: tl.constexpr,
    PARTIAL: tl.constexpr,
    SHARED: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    PEEL: tl.constexpr,
):
    """Grid (blocks of queries, KV heads, segments).

    Works on sequences ``first_seq`` to ``first_seq + num_seqs``.

    :param shared: tokens of a prefix that all of them share; if ``SHARED``, all their queries
        attend to it as if they were one sequence, else each to its own keys from there on.
    :param segments: programs that share a block's keys, of at least ``MIN_SEGMENT`` each.
    :param slot: where the partial results of the first segment go, of ``slots``, if ``PARTIAL``:
        ``out`` is then (tokens, heads, slots, V_DIM) fp32 and ``lse``, in base 2, (tokens, heads,
        slots).
    :param scale: makes a score, a plain product or if ``HAS_CAP`` its tanh, a logarithm in base 2;
        positive. Applied after the maximum is taken, in one operation with its subtraction.
    :param to_cap: makes a product the exponent that its tanh is taken with, if ``HAS_CAP``.
    """
    # Later blocks have more keys behind them: they start first, and short ones fill the gaps.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    seq = first_seq
    count = num_seqs
    local = block
    if not SHARED:
        count = 1
        if ONE_BLOCK:
            seq = first_seq + block
            local = 0
        else:
            seq, local = _sequence_of(query_starts_ptr, first_seq, num_seqs, block, BLOCK_Q)
            seq = first_seq + seq
    begin = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + count) - begin
    if local * BLOCK_Q >= query_len:
        return

    rows = tl.arange(0, BLOCK_M)
    tokens = local * BLOCK_Q + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (tokens < query_len)
    token_rows = (begin + tokens).to(tl.int64)

    # The keys that some row of this block sees: from low to high; all see those below seen_by_all.
    low = 0
    high = shared
    positions = tokens
    seen_by_all = shared
    if not SHARED:
        context = tl.load(context_lens_ptr + seq)
        past = context - query_len
        positions = past + tokens
        low = shared
        if WINDOW > 0:
            low = tl.maximum(low, past + local * BLOCK_Q - WINDOW + 1) // TILE * TILE
        high = tl.minimum(context, past + (local + 1) * BLOCK_Q)
        seen_by_all = past + local * BLOCK_Q + 1
    if PARTIAL:
        length = tl.cdiv(tl.cdiv(high - low, segments), TILE) * TILE
        length = tl.maximum(length, MIN_SEGMENT)
        low += segment * length
        high = tl.minimum(high, low + length)
        if low >= high:
            empty_rows = (token_rows * (KV_HEADS * GROUP) + heads) * slots + slot + segment
            nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
            tl.store(lse_ptr + empty_rows, nothing, mask=is_row)
            return

    k_dims = tl.arange(0, BLOCK_K)
    query = tl.load(
        query_ptr + (token_rows * query_stride + heads * K_DIM)[:, None] + k_dims[None, :],
        mask=is_row[:, None] & (k_dims < K_DIM)[None, :],
        other=0.0,
    )
    if HAS_SINKS:
        top = tl.load(sinks_ptr + heads, mask=is_row, other=0.0) * (LOG2_E / scale)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        top = tl.full([BLOCK_M], NEVER, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    table = table_ptr + seq.to(tl.int64) * table_stride
    k_head = k_ptr + kv_head * K_DIM
    v_head = v_ptr + kv_head * V_DIM
    k_scale_head = k_scale_ptr + kv_head
    v_scale_head = v_scale_ptr + kv_head

    # In two loops for prefill, which is bound by arithmetic: masks cost some. In one for decode,
    # which is bound by memory: between two loops there is a moment without loads in flight.
    if PEEL:
        middle = low + tl.maximum(tl.minimum(seen_by_all, high) - low, 0) // TILE * TILE
        for start in range(low, middle, TILE):
            top, total, acc = _attend_tile(
                *(query, positions, top, total, acc, start, high, table),
                *(k_head, v_head, k_scale_head, v_scale_head, k_block_stride, v_block_stride),
                *(scale, to_cap, KV_HEADS, K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_SIZE, TILE),
                *(WINDOW, HAS_CAP, QUANTIZED, FP8_BITS, not SHARED, False),
            )
        low = middle
    for start in range(low, high, TILE):
        top, total, acc = _attend_tile(
            *(query, positions, top, total, acc, start, high, table),
            *(k_head, v_head, k_scale_head, v_scale_head, k_block_stride, v_block_stride),
            *(scale, to_cap, KV_HEADS, K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_SIZE, TILE),
            *(WINDOW, HAS_CAP, QUANTIZED, FP8_BITS, not SHARED, True),
        )

    v_dims = tl.arange(0, BLOCK_V)
    out_rows = token_rows * (KV_HEADS * GROUP) + heads
    if PARTIAL:
        out_rows = out_rows * slots + slot + segment
    tl.store(
        out_ptr + (out_rows * V_DIM)[:, None] + v_dims[None, :],
        (acc / tl.maximum(total, TINY)[:, None]).to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (v_dims < V_DIM)[None, :],
    )
    if PARTIAL:
        tl.store(lse_ptr + out_rows, top * scale + tl.log2(total), mask=is_row)


@jit(do_not_specialize=("slots",))  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    partial_ptr,
    lse_ptr,
    sinks_ptr,
    out_ptr,
    slots,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Join the partial results of one token and head, weighted by their log-sum-exp in base 2."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCK_SLOTS)
    dims = tl.arange(0, BLOCK_V)
    lse = tl.load(lse_ptr + row * slots + each, mask=each < slots, other=float("-inf"))
    top = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row % HEADS) * LOG2_E
        top = tl.maximum(top, sink)
    top = tl.maximum(top, NEVER)
    weights = tl.exp2(lse - top)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    # A slot without keys was never written to.
    parts = tl.load(
        partial_ptr + (row * slots + each)[:, None] * V_DIM + dims[None, :],
        mask=(weights > 0)[:, None] & (dims < V_DIM)[None, :],
        other=0.0,
    )
    out = tl.sum(parts * weights[:, None], 0) / tl.maximum(total, TINY)
    tl.store(out_ptr + row * V_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < V_DIM)
