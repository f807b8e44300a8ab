"""The block pool and the prefix index as a sequence uses them: found, held, offered, released.

Every method works with prefix caching off as well; the sequence then has no cursor. It does not
know who runs, or whose blocks to take when there are none.
"""

from __future__ import annotations

from ..config import SchedulerConfig
from ..errors import InvalidRequestError
from .blocks import BlockPool
from .prefix import PrefixCursor, PrefixIndex
from .sequence import Sequence


class KVCache:
    """What sequences hold of the pool, and what they can reuse of each other's.

    :param config: sizes, and whether prefixes are reused.
    """

    __slots__ = ("_block_size", "_prefix_caching", "pool", "prefixes")

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = BlockPool(config.num_blocks)
        self.prefixes = PrefixIndex(self.pool, config.block_size)
        self._block_size = config.block_size
        self._prefix_caching = config.prefix_caching

    def open(self, sequence: Sequence) -> None:
        """Give a new sequence its place in the prefix index.

        :raises InvalidRequestError: if its tokens are no token ids.
        """
        if not self._prefix_caching:
            return
        cursor = PrefixCursor(sequence.cache_salt)
        try:
            self.prefixes.extend(cursor, sequence.token_ids)
        except (OverflowError, TypeError) as error:
            raise InvalidRequestError(
                f"The prompt holds something that is no token id ({error}); ids are integers "
                "from 0 to the vocabulary's size.",
                param="prompt",
            ) from error
        sequence.cursor = cursor

    def match(self, sequence: Sequence) -> tuple[int, bool]:
        """Leading blocks that the cache has, and whether a running sequence computes the next."""
        cursor = sequence.cursor
        if cursor is None:
            return 0, False
        # The last token is always computed: its output is what the next one is sampled from.
        useful = (len(sequence.token_ids) - 1) // self._block_size
        found = self.prefixes.match(cursor, useful)
        return found, found < useful and self.prefixes.is_announced(cursor)

    def num_missing(self, sequence: Sequence, num_cached: int) -> int:
        """Blocks to allocate for all of a sequence's tokens, beside the cached ones."""
        return -(-len(sequence.token_ids) // self._block_size) - num_cached

    def share_prefix(self, sequence: Sequence, num_cached: int, max_idle: int) -> bool:
        """Hold the blocks that :meth:`match` found, and count their tokens as computed.

        :param max_idle: do nothing and return ``False`` if more of them than this have no holder:
            those are on the free list, so sharing them takes from it.
        """
        cached: list[int] = []
        if sequence.cursor is not None and num_cached:
            cached = self.prefixes.matched_blocks(sequence.cursor)
            if sum(self.pool.num_holders(block) == 0 for block in cached) > max_idle:
                return False
            for block in cached:
                self.pool.share(block)
        sequence.block_ids = cached
        sequence.num_computed = sequence.num_scheduled = num_cached * self._block_size
        return True

    def remember(self, sequence: Sequence) -> None:
        """Offer a sequence's newly full blocks to others, as far as it is computed."""
        if sequence.cursor is not None:
            self.prefixes.extend(sequence.cursor, sequence.token_ids)
            num_full = sequence.num_computed // self._block_size
            self.prefixes.insert(sequence.cursor, sequence.block_ids, num_full)
            self.prefixes.announce(sequence.cursor)

    def announce(self, sequence: Sequence) -> None:
        """The sequence computes now: those that need its next block may wait for it."""
        if sequence.cursor is not None:
            self.prefixes.announce(sequence.cursor)

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence computes nothing now: nobody is to wait for it."""
        if sequence.cursor is not None:
            self.prefixes.withdraw(sequence.cursor)

    def release(self, sequence: Sequence) -> None:
        """Free what a sequence holds, if anything; what the prefix index keeps stays findable."""
        self.withdraw(sequence)
        self.pool.release(sequence.block_ids)
        # A new list, since a batch under way may still read the old one.
        sequence.block_ids = []
        sequence.num_computed = sequence.num_scheduled = 0
