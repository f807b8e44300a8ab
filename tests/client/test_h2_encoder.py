"""The stateless header encoder: hpack's own decoder reads what it writes."""

from __future__ import annotations

import hypothesis.strategies as st
from hpack import Decoder, NeverIndexedHeaderTuple
from hypothesis import given

from fullbore.transport._h2_encoder import StatelessEncoder

FIELDS = st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=20_000))


@given(st.lists(st.lists(FIELDS, max_size=8), max_size=4), st.integers(0, 4096))
def test_every_block_decodes_to_what_was_meant(
    blocks: list[list[tuple[bytes, bytes]]], table_size: int
) -> None:
    """Also after the server has made its table smaller, which the next block has to confirm."""
    encoder, decoder = StatelessEncoder(), Decoder(max_header_list_size=1 << 30)
    for number, block in enumerate(blocks):
        if number == 1:
            encoder.header_table_size = table_size
            decoder.max_allowed_table_size = table_size
        assert decoder.decode(encoder.encode(block), raw=True) == block


def test_usual_fields_are_a_byte() -> None:
    """Those of the static table that every request begins with."""
    encoder = StatelessEncoder()
    assert encoder.encode([(b":method", b"POST"), (b":scheme", b"https")]) == b"\x83\x87"


def test_secrets_stay_secret_on_the_way() -> None:
    """Marked as never to be indexed, by anyone."""
    block = StatelessEncoder().encode([NeverIndexedHeaderTuple(b"authorization", b"Bearer x")])
    (field,) = Decoder().decode(block, raw=True)
    assert isinstance(field, NeverIndexedHeaderTuple)


def test_an_enlarged_table_needs_no_confirmation() -> None:
    """Only a smaller one does."""
    encoder = StatelessEncoder()
    encoder.header_table_size = 65_536
    assert encoder.header_table_size == 65_536
    assert encoder.encode([(b":method", b"GET")]) == b"\x82"
