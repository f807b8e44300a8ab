"""The header decoder against hpack's: the same fields, the same table, the same refusals."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbore.transport._h2_decoder import Decoder

MOST = 5_000
_NAMES = st.sampled_from([b":status", b"server", b"date", b"x-request-id", b"a"])
_FIELD = st.one_of(
    st.tuples(_NAMES, st.sampled_from([b"", b"200", b"x" * 130])),  # what comes again and again
    st.tuples(st.binary(max_size=40), st.binary(max_size=200)),
    st.tuples(st.just(b"big"), st.sampled_from([b"y" * 3_000, b"z" * 4_100])),
)


def outcomes(blocks: list[bytes]) -> list[object]:
    """What both decoders make of the blocks, up to the first that hpack's refuses."""
    ours, theirs = Decoder(MOST), hpack.Decoder(MOST)
    read: list[object] = []
    for block in blocks:
        try:
            wanted = [(bytes(name), bytes(value)) for name, value in theirs.decode(block, raw=True)]
        except hpack.HPACKError as error:
            refusal = type(error)
            if issubclass(refusal, hpack.InvalidTableIndexError):
                refusal = hpack.InvalidTableIndexError  # hpack raises its deprecated alias
            with pytest.raises(refusal):
                ours.decode(block)
            return [*read, refusal]
        assert ours.decode(block) == wanted
        read.append(wanted)
    return read


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(_FIELD, st.booleans()), max_size=8),
            st.booleans(),  # Huffman
            st.lists(st.integers(0, 4_096), max_size=2),  # sizes of the table, before the block
        ),
        max_size=8,
    )
)
def test_what_hpack_encodes(
    blocks: list[tuple[list[tuple[tuple[bytes, bytes], bool]], bool, list[int]]],
) -> None:
    """Tables that grow, overflow and change their size, fields that must not enter them."""
    encoder = hpack.Encoder()
    encoded = []
    for fields, huffman, sizes in blocks:
        for size in sizes:
            encoder.header_table_size = size
        block = [hpack.NeverIndexedHeaderTuple(*f) if secret else f for f, secret in fields]
        encoded.append(encoder.encode(block, huffman))
    outcomes(encoded)


_PIECE = st.one_of(
    st.binary(min_size=1, max_size=6),
    st.sampled_from([b"\x82", b"\xbe", b"\xbf", b"\x40\x01a\x01b", b"\x20", b"\x3f\xe1\x1f"]),
    st.sampled_from([b"\x7e\x01c", b"\x0f\x2f\x01d", b"\x10\x81\x1f\x82\x10\x1f", b"\x3f\xe2\x1f"]),
    st.sampled_from([b"\xff\x80\x80\x80\x00", b"\xff\x80\x80\x80\x80\x00", b"\x80"]),
)


@settings(deadline=None, max_examples=500)
@given(st.lists(st.lists(_PIECE, max_size=8).map(b"".join), max_size=4))
def test_what_nobody_encodes(blocks: list[bytes]) -> None:
    """Bytes that are a header block by chance, or nearly."""
    outcomes(blocks)


@pytest.mark.parametrize(
    ("block", "refusal"),
    [
        (b"\x80", hpack.InvalidTableIndexError),
        (b"\xbe", hpack.InvalidTableIndexError),
        (b"\x3f\xe2\x1f", hpack.InvalidTableSizeError),
        (b"\x82\x20", hpack.HPACKDecodingError),
        (b"\x40\x01a\x05b", hpack.HPACKDecodingError),
        (b"\x40\x81\xff\x00", hpack.HPACKDecodingError),
        (b"\xff" * 8, hpack.HPACKDecodingError),
        (b"\x40", hpack.HPACKDecodingError),
        (b"\x00\x01a\x7f\xff\x30" + b"b" * 6_400, hpack.OversizedHeaderListError),
        (b"\x40\x01a\x7f\x81\x1f" + b"b" * 4_096 + b"\xbe", hpack.InvalidTableIndexError),
    ],
    ids=[
        "index zero",
        "index beyond the table",
        "table above its limit",
        "table size after a field",
        "string beyond the block",
        "Huffman without its end",
        "endless integer",
        "nothing after the prefix",
        "list above its limit",
        "entry larger than the table",
    ],
)
def test_blocks_that_break_the_rules(block: bytes, refusal: type[Exception]) -> None:
    """Each as hpack refuses it."""
    assert outcomes([block]) == [refusal]
