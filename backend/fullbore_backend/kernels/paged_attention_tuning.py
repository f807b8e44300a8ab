"""How the attention kernel is launched: tiles by chip and shape, segments by what the host knows.

The tables are by reason, not yet measured. Knows shapes and sizes, no tensors.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ._triton import Launch

MAX_SEGMENTS = 64
"""The most programs that share the keys of one block of queries."""

MIN_SEGMENT = 256
"""Keys below which another segment costs more to merge than it saves."""

WAVES_WORTH = 0.85
"""The share of the best occupancy that is enough: fewer segments are cheaper to merge."""

DECODE: dict[tuple[int, int], Launch] = {
    # A decode streams keys and values, so what counts is bytes in flight: a tile of both is 32 KiB,
    # and two of them are under way in each of two or three programs an SM. Five stages give two
    # tiles, because a tile's addresses come from the page table, which is loaded ahead as well.
    (80, 64): Launch(blocks={"TILE": 128}, num_warps=4, num_stages=5),
    (80, 128): Launch(blocks={"TILE": 64}, num_warps=4, num_stages=5),
    (80, 256): Launch(blocks={"TILE": 32}, num_warps=4, num_stages=5),
    (90, 64): Launch(blocks={"TILE": 128}, num_warps=4, num_stages=5),
    (90, 128): Launch(blocks={"TILE": 64}, num_warps=4, num_stages=5),
    (90, 256): Launch(blocks={"TILE": 32}, num_warps=4, num_stages=5),
    (100, 64): Launch(blocks={"TILE": 128}, num_warps=4, num_stages=5),
    (100, 128): Launch(blocks={"TILE": 64}, num_warps=4, num_stages=5),
    (100, 256): Launch(blocks={"TILE": 32}, num_warps=4, num_stages=5),
}
"""By capability and padded head size, for up to 32 rows (heads of a KV head, times tokens)."""

DECODE_QUANTIZED: dict[tuple[int, int], Launch] = {
    # Half the bytes a key: twice the keys a tile, and twice the warps to widen them.
    (80, 128): Launch(blocks={"TILE": 128}, num_warps=8, num_stages=5),
    (80, 256): Launch(blocks={"TILE": 64}, num_warps=8, num_stages=5),
    (90, 128): Launch(blocks={"TILE": 128}, num_warps=8, num_stages=5),
    (90, 256): Launch(blocks={"TILE": 64}, num_warps=8, num_stages=5),
    (100, 128): Launch(blocks={"TILE": 128}, num_warps=8, num_stages=5),
    (100, 256): Launch(blocks={"TILE": 64}, num_warps=8, num_stages=5),
}
"""The same for pages of one byte a number, where it differs."""

PREFILL: dict[tuple[int, int], Launch] = {
    # Prefill is bound by arithmetic: 128 rows, of which each of two warp groups has 64, and tiles
    # as large as the registers allow.
    (80, 64): Launch(blocks={"BLOCK_M": 128, "TILE": 64}, num_warps=8, num_stages=3),
    (80, 128): Launch(blocks={"BLOCK_M": 128, "TILE": 32}, num_warps=8, num_stages=3),
    (80, 256): Launch(blocks={"BLOCK_M": 64, "TILE": 32}, num_warps=8, num_stages=3),
    (90, 64): Launch(blocks={"BLOCK_M": 128, "TILE": 128}, num_warps=8, num_stages=3),
    (90, 128): Launch(blocks={"BLOCK_M": 128, "TILE": 128}, num_warps=8, num_stages=2),
    (90, 256): Launch(blocks={"BLOCK_M": 128, "TILE": 32}, num_warps=8, num_stages=3),
    (100, 64): Launch(blocks={"BLOCK_M": 128, "TILE": 128}, num_warps=8, num_stages=3),
    (100, 128): Launch(blocks={"BLOCK_M": 128, "TILE": 64}, num_warps=8, num_stages=3),
    (100, 256): Launch(blocks={"BLOCK_M": 128, "TILE": 32}, num_warps=8, num_stages=3),
}
"""By capability and padded head size."""

PREFILL_PADDED: dict[tuple[int, int], Launch] = {
    (90, 128): Launch(blocks={"BLOCK_M": 128, "TILE": 64}, num_warps=8, num_stages=3),
}
"""Where the table above leaves no register for the masks of a head size that is not a power of two,
or for the offsets of partial results."""

EXACT = Launch(blocks={"TILE": 16}, num_warps=8, num_stages=1)
"""For fp32 queries, whose exact products no tensor core does: small tiles, that they fit."""

MAX_DECODE_ROWS = 32
"""Rows up to which a sequence counts as a decode."""


def choose(
    *,
    capability: int,
    query_len: int,
    group: int,
    head_dim: int,
    exact: bool = False,
    quantized: bool = False,
    partial: bool = False,
) -> Launch:
    """The launch for sequences of at most ``query_len`` new tokens; its blocks have a ``BLOCK_M``.

    :param group: query heads of a KV head.
    :param head_dim: the larger of a key's and a value's size.
    :param exact: queries are fp32.
    :param quantized: pages are fp8 or int8.
    :param partial: the keys of a block are cut into segments.
    """
    padded = max(64, 1 << (head_dim - 1).bit_length())
    key, rows = (capability, padded), query_len * group
    if exact:
        return _with_rows(EXACT, max(32, 1 << (group - 1).bit_length()))
    if rows > MAX_DECODE_ROWS:
        tight = partial or head_dim != padded
        return PREFILL_PADDED.get(key, PREFILL[key]) if tight else PREFILL[key]
    launch = DECODE_QUANTIZED.get(key, DECODE[key]) if quantized else DECODE[key]
    return _with_rows(launch, 16 if rows <= 16 else 32)


def _with_rows(launch: Launch, block_m: int) -> Launch:
    return replace(launch, blocks={**launch.blocks, "BLOCK_M": block_m})


def choose_segments(*, programs: int, keys: int, multiprocessors: int, decode: bool) -> int:
    """Into how many segments to cut the keys of each of ``programs``.

    The fewest whose last wave of programs is about as full as any number makes it. A GPU holds two
    programs of a decode on each multiprocessor, and one of a prefill; the latter is cut only when
    there are not enough to go round, as partial results cost it more.

    :param keys: the most that one program has.
    """
    most = min(MAX_SEGMENTS, keys // MIN_SEGMENT)
    seats = (2 if decode else 1) * multiprocessors
    if most <= 1 or programs >= (4 if decode else 1) * seats:
        return 1
    filled = {}
    for segments in range(1, most + 1):
        waves = programs * segments / seats
        filled[segments] = waves / math.ceil(waves)
    enough = WAVES_WORTH * max(filled.values())
    return next(segments for segments, share in filled.items() if share >= enough)
