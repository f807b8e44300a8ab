"""The prefix index: exact matches, salt, eviction, duplicates, and blocks under computation."""

import pytest

from fullbore_backend.scheduler import BlockPool, PrefixCursor, PrefixIndex

BLOCK = 2


def cursor_for(index: PrefixIndex, tokens: list[int], salt: str | None = None) -> PrefixCursor:
    cursor = PrefixCursor(salt)
    index.extend(cursor, tokens)
    return cursor


def computed(
    index: PrefixIndex, pool: BlockPool, tokens: list[int], salt: str | None = None
) -> tuple[PrefixCursor, list[int]]:
    """A sequence that has computed all of its full blocks, in blocks of its own."""
    cursor = cursor_for(index, tokens, salt)
    blocks = pool.allocate(-(-len(tokens) // BLOCK))
    index.insert(cursor, blocks, len(tokens) // BLOCK)
    return cursor, blocks


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(16)


@pytest.fixture
def index(pool: BlockPool) -> PrefixIndex:
    return PrefixIndex(pool, BLOCK)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param([1, 2, 3, 4, 5], 2, id="equal"),
        pytest.param([1, 2, 3, 4, 5, 6, 7], 2, id="longer"),
        pytest.param([1, 2, 9, 9], 1, id="half"),
        pytest.param([1, 2, 3], 1, id="part-of-a-block"),
        pytest.param([9, 9, 3, 4], 0, id="same-block-behind-another-prefix"),
        pytest.param([3, 4], 0, id="inner-block-alone"),
        pytest.param([1], 0, id="shorter-than-a-block"),
        pytest.param([], 0, id="empty"),
    ],
)
def test_matches_are_whole_blocks_behind_the_same_prefix(
    pool: BlockPool, index: PrefixIndex, tokens: list[int], expected: int
) -> None:
    _, blocks = computed(index, pool, [1, 2, 3, 4, 5])
    cursor = cursor_for(index, tokens)
    assert index.match(cursor, 99) == expected
    assert index.matched_blocks(cursor) == blocks[:expected]


def test_a_match_is_capped(pool: BlockPool, index: PrefixIndex) -> None:
    _, blocks = computed(index, pool, [1, 2, 3, 4, 5, 6])
    cursor = cursor_for(index, [1, 2, 3, 4, 5, 6])
    assert index.match(cursor, 3) == 3
    assert index.match(cursor, 1) == 1  # also below what it matched before
    assert index.matched_blocks(cursor) == blocks[:1]


@pytest.mark.parametrize("other", [None, "", "b"])
def test_other_salts_share_nothing(pool: BlockPool, index: PrefixIndex, other: str | None) -> None:
    computed(index, pool, [1, 2, 3, 4], salt="a")
    assert index.match(cursor_for(index, [1, 2, 3, 4], other), 9) == 0
    assert index.match(cursor_for(index, [1, 2, 3, 4], "a"), 9) == 2


def test_equal_hashes_of_unequal_blocks_share_nothing() -> None:
    """The index compares tokens, so a hash function without any value changes no answer."""

    class Colliding(bytes):
        def __hash__(self) -> int:
            return 7

    pool = BlockPool(64)
    index = PrefixIndex(pool, BLOCK)
    prompts = [[a, b, c, d] for a in range(2) for b in range(2) for c in range(2) for d in range(2)]
    held: dict[tuple[int, ...], list[int]] = {}
    for prompt in prompts:
        cursor = cursor_for(index, prompt)
        cursor.chunks[:] = map(Colliding, cursor.chunks)
        blocks = pool.allocate(2)
        index.insert(cursor, blocks, 2)
        held[tuple(prompt)] = blocks
    assert len(index) == 4 + 16
    for prompt in prompts:
        cursor = cursor_for(index, prompt)
        cursor.chunks[:] = map(Colliding, cursor.chunks)
        assert index.match(cursor, 2) == 2
        assert index.matched_blocks(cursor)[1] == held[tuple(prompt)][1]


@pytest.mark.parametrize("bad", [[-1, 0], [2**32, 0], [1.5, 0], ["a", 0]], ids=repr)
def test_what_is_no_token_id_is_refused(index: PrefixIndex, bad: list[int]) -> None:
    with pytest.raises((OverflowError, TypeError)):
        index.extend(PrefixCursor(None), bad)


def test_a_cursor_learns_blocks_as_they_fill(pool: BlockPool, index: PrefixIndex) -> None:
    cursor = PrefixCursor(None)
    for length in range(8):
        index.extend(cursor, list(range(length)))
        assert len(cursor.chunks) == length // BLOCK
    assert cursor.chunks == cursor_for(index, list(range(7))).chunks


def test_a_freed_block_is_found_until_it_is_reused(pool: BlockPool, index: PrefixIndex) -> None:
    _, blocks = computed(index, pool, [1, 2, 3, 4, 5, 6])
    pool.release(blocks)
    assert pool.num_cached == len(index) == 3
    asking = cursor_for(index, [1, 2, 3, 4, 5, 6])
    assert index.match(asking, 9) == 3
    pool.allocate(14)  # one more than there are blank blocks: the tail of the chain goes
    assert index.match(asking, 9) == 2
    assert pool.num_cached == len(index) == 2


def test_what_depends_on_a_reused_block_is_dropped_with_it(
    pool: BlockPool, index: PrefixIndex
) -> None:
    first, first_blocks = computed(index, pool, [1, 2])
    second, second_blocks = computed(index, pool, [1, 2, 3, 4])  # its own copy of the first block
    assert first_blocks[0] != second_blocks[0]
    pool.release(first_blocks)
    pool.allocate(pool.num_free)  # reuses the known copy of (1, 2)
    assert len(index) == 0
    assert index.match(cursor_for(index, [1, 2, 3, 4]), 9) == 0
    # Its holder offers all of its blocks again when the next one is full.
    index.extend(second, [1, 2, 3, 4, 5, 6])
    index.insert(second, [*second_blocks, first_blocks[0]], 3)
    assert index.match(cursor_for(index, [1, 2, 3, 4, 5, 6]), 9) == 3
    assert first.node is not second.node


def test_a_known_block_stays_while_held_and_gives_way_when_free(
    pool: BlockPool, index: PrefixIndex
) -> None:
    _, old = computed(index, pool, [1, 2])
    asking = cursor_for(index, [1, 2])
    computed(index, pool, [1, 2])
    index.match(asking, 1)
    assert index.matched_blocks(asking) == old
    pool.release(old)
    _, newest = computed(index, pool, [1, 2])
    assert index.matched_blocks(asking) == newest
    assert not pool.is_kept(old[0])
    assert pool.free_order()[0] == old[0]
    assert len(index) == 1


def test_the_index_never_outgrows_the_pool(pool: BlockPool, index: PrefixIndex) -> None:
    for start in range(200):
        cursor, blocks = computed(index, pool, list(range(start, start + 7)), salt=str(start))
        index.announce(cursor)
        index.withdraw(cursor)
        pool.release(blocks)
        assert len(index) == pool.num_cached <= pool.num_blocks
    assert index.num_announced == 0


def test_the_next_block_of_a_computing_sequence_is_announced(
    pool: BlockPool, index: PrefixIndex
) -> None:
    leader = cursor_for(index, [1, 2, 3, 4])
    follower = cursor_for(index, [1, 2, 3, 4, 5])
    stranger = cursor_for(index, [1, 2, 9, 9, 9])
    blocks = pool.allocate(2)
    index.announce(leader)
    for asking in (follower, stranger):
        assert index.match(asking, 2) == 0
        assert index.is_announced(asking)
    index.insert(leader, blocks, 1)
    index.announce(leader)
    assert (index.match(follower, 2), index.is_announced(follower)) == (1, True)
    assert (index.match(stranger, 2), index.is_announced(stranger)) == (1, False)
    index.insert(leader, blocks, 2)
    index.announce(leader)
    assert index.num_announced == 0
    assert (index.match(follower, 2), index.is_announced(follower)) == (2, False)


def test_withdrawing_frees_the_followers(index: PrefixIndex) -> None:
    leader, follower = cursor_for(index, [1, 2]), cursor_for(index, [1, 2, 3])
    index.announce(leader)
    index.match(follower, 1)
    assert index.is_announced(follower)
    index.withdraw(leader)
    index.withdraw(leader)
    assert not index.is_announced(follower)


def test_the_first_to_announce_an_edge_owns_it(index: PrefixIndex) -> None:
    leader, other = cursor_for(index, [1, 2]), cursor_for(index, [1, 2])
    index.announce(leader)
    index.announce(other)
    index.withdraw(other)
    assert index.num_announced == 1
    index.withdraw(leader)
    assert index.num_announced == 0


def test_announcements_respect_the_salt(index: PrefixIndex) -> None:
    index.announce(cursor_for(index, [1, 2], "a"))
    follower = cursor_for(index, [1, 2, 3], "b")
    index.match(follower, 1)
    assert not index.is_announced(follower)
