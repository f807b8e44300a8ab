"""The KV pool's blocks: who holds how many, and which is reused next.

Blocks are numbers from 0 to ``num_blocks - 1``. The pool counts holders and keeps the free ones in
order of reuse, every operation O(1) a block. It does not know tokens or what a block contains: the
prefix index says which blocks are worth keeping and is told when one is reused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf


def _ignore(block: int) -> None:
    """Nobody needs to know."""


class BlockPool:
    """Reference-counted blocks and an LRU list of the free ones.

    A free block whose content is kept stays readable until it is allocated again: it goes to the
    tail of the free list, one without content to the head.

    :param num_blocks: blocks in the pool.
    """

    __slots__ = ("_free", "_holders", "_kept", "num_blocks", "num_cached", "on_reuse")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        #: Free blocks whose content is kept; they count as free too.
        self.num_cached = 0
        # An OrderedDict is a linked list with an index, in C: both ends and any member in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._holders = [0] * num_blocks
        self._kept = bytearray(num_blocks)
        #: Called with each kept block that is allocated again, before the caller sees it.
        self.on_reuse: Callable[[int], None] = _ignore

    @property
    def num_free(self) -> int:
        """Blocks without a holder, kept content or not."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - len(self._free)

    def num_holders(self, block: int) -> int:
        """How many sequences hold the block."""
        return self._holders[block]

    def is_kept(self, block: int) -> bool:
        """Whether the block's content is to be kept while it is free."""
        return bool(self._kept[block])

    def free_order(self) -> tuple[int, ...]:
        """The free blocks, the next to be reused first. O(free)."""
        return tuple(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks from the head of the free list; the caller is their one holder."""
        assert count <= len(self._free), "the caller checks num_free"
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._holders[block] = 1
            if self._kept[block]:
                self._kept[block] = 0
                self.num_cached -= 1
                # May forget further blocks, which reorders the free list.
                self.on_reuse(block)
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Add a holder to a block whose content is kept, free or not."""
        assert self._kept[block], "only kept content is worth sharing"
        if self._holders[block] == 0:
            del self._free[block]
            self.num_cached -= 1
        self._holders[block] += 1

    def release(self, blocks: SequenceOf[int]) -> None:
        """Drop one holder from each block of a sequence.

        The last block is freed first, so that of a chain of kept blocks the tail is reused before
        the blocks it depends on.
        """
        for block in reversed(blocks):
            holders = self._holders[block] - 1
            assert holders >= 0, "released more often than held"
            self._holders[block] = holders
            if holders == 0:
                self._free[block] = None
                if self._kept[block]:
                    self.num_cached += 1
                else:
                    self._free.move_to_end(block, last=False)

    def keep(self, block: int) -> None:
        """Keep the content of a held block once it is free."""
        assert self._holders[block] > 0, "a free block may be reused at any time"
        self._kept[block] = 1

    def forget(self, block: int) -> None:
        """The block's content is no longer worth keeping; if it is free, reuse it first."""
        if self._kept[block]:
            self._kept[block] = 0
            if self._holders[block] == 0:
                self.num_cached -= 1
                self._free.move_to_end(block, last=False)
