"""Which blocks hold the keys and values of which token prefixes.

A trie with one node per full block. An edge is (parent, tokens of the block), looked up by hash and
compared in full, and the parent is the node itself, not a digest of it; the first edge's parent is
the salt. So a match is exact: two prefixes share a block if and only if all tokens and the salt are
equal, whatever collides. Every node has a block and all of its ancestors are in the trie, hence it
never has more nodes than the pool has blocks.

It knows token ids and block numbers, not requests or scheduling.
"""

from __future__ import annotations

from array import array

from .blocks import BlockPool


class _Node:
    """One full block of tokens behind one particular prefix."""

    __slots__ = ("block", "children", "depth", "edge", "live", "parent")

    def __init__(self, parent: _Node | None, edge: _Edge, depth: int, block: int) -> None:
        self.parent = parent
        self.edge = edge
        # Blocks from the start of the sequence up to and including this one.
        self.depth = depth
        self.block = block
        self.children: dict[bytes, _Node] = {}
        # False once it has left the trie; a cursor may still point here.
        self.live = True


_Edge = tuple[_Node | str | None, bytes]
"""(parent node, or the salt for a first block; the block's token ids, 4 bytes each)."""


class PrefixCursor:
    """One sequence's place in the index: its full blocks' tokens and the deepest node known.

    The node may have left the trie since; the index then climbs to the deepest one that has not.
    Its token bytes are made once, when a block is full, and hash once.
    """

    __slots__ = ("announced", "chunks", "node", "salt")

    def __init__(self, salt: str | None) -> None:
        self.salt = salt
        self.chunks: list[bytes] = []
        self.node: _Node | None = None
        # The edge that this cursor's sequence is computing, while others may wait for it.
        self.announced: _Edge | None = None

    def edge(self, node: _Node | None, depth: int) -> _Edge:
        """The edge from ``node``, which is ``depth`` blocks deep, to this cursor's next block."""
        return (self.salt if node is None else node, self.chunks[depth])


class PrefixIndex:
    """Full blocks by the token prefix they stand for, and the ones being computed right now.

    :param pool: told which blocks to keep; it tells :meth:`drop` which of them it reuses.
    :param block_size: tokens a block holds.
    """

    __slots__ = ("_announced", "_block_size", "_first", "_nodes", "_pool")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        pool.on_reuse = self.drop
        self._block_size = block_size
        self._first: dict[_Edge, _Node] = {}
        self._nodes: dict[int, _Node] = {}
        self._announced: dict[_Edge, PrefixCursor] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_announced(self) -> int:
        """Blocks that sequences are computing and others may wait for."""
        return len(self._announced)

    def extend(self, cursor: PrefixCursor, token_ids: list[int]) -> None:
        """Let the cursor know the blocks that have become full. O(new blocks).

        :raises OverflowError: for a token id outside [0, 2**32).
        :raises TypeError: for one that is not an integer.
        """
        size = self._block_size
        known = len(cursor.chunks) * size
        full = len(token_ids) // size * size
        if full > known:
            packed = array("I", token_ids[known:full])
            data, width = packed.tobytes(), packed.itemsize * size
            cursor.chunks.extend(data[i : i + width] for i in range(0, len(data), width))

    def match(self, cursor: PrefixCursor, max_blocks: int) -> int:
        """How many of the cursor's first blocks the index holds, at most ``max_blocks``.

        Resumes where the last call for this cursor stopped, so asking again is cheap.
        """
        node = self._settle(cursor)
        while node is not None and node.depth > max_blocks:
            node = node.parent
        depth = 0 if node is None else node.depth
        while depth < min(max_blocks, len(cursor.chunks)):
            child = self._child(cursor, node, depth)
            if child is None:
                break
            node, depth = child, depth + 1
        cursor.node = node
        return depth

    def matched_blocks(self, cursor: PrefixCursor) -> list[int]:
        """The blocks of the last :meth:`match`, in order. O(matched)."""
        blocks: list[int] = []
        node = cursor.node
        while node is not None:
            blocks.append(node.block)
            node = node.parent
        blocks.reverse()
        return blocks

    def insert(self, cursor: PrefixCursor, block_ids: list[int], num_blocks: int) -> None:
        """The first ``num_blocks`` of the sequence's blocks now hold their tokens.

        Where an equal block is known already, that one stays if anybody holds it; a free one gives
        way, so that what is used last is also reused last.
        """
        node = self._settle(cursor)
        depth = 0 if node is None else node.depth
        while depth < num_blocks:
            child = self._child(cursor, node, depth)
            block = block_ids[depth]
            if child is None:
                child = self._add(cursor, node, depth, block)
            elif child.block != block and self._pool.num_holders(child.block) == 0:
                self._pool.forget(child.block)
                del self._nodes[child.block]
                self._place(child, block)
            node, depth = child, depth + 1
        cursor.node = node

    def drop(self, block: int) -> None:
        """The block is being reused: take it and everything that depends on it out.

        Amortised O(1): a node is dropped once for each time it is inserted.
        """
        top = self._nodes[block]
        if top.parent is None:
            del self._first[top.edge]
        else:
            del top.parent.children[top.edge[1]]
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.children.clear()  # and with it the reference cycles
            node.live = False
            del self._nodes[node.block]
            self._pool.forget(node.block)

    def announce(self, cursor: PrefixCursor) -> None:
        """The sequence is computing its next full block; others that need the same may wait.

        Replaces what it announced before; announces nothing when no further full block is known.
        """
        self.withdraw(cursor)
        node = self._settle(cursor)
        depth = 0 if node is None else node.depth
        if depth < len(cursor.chunks):
            edge = cursor.edge(node, depth)
            if edge not in self._announced:
                self._announced[edge] = cursor
                cursor.announced = edge

    def withdraw(self, cursor: PrefixCursor) -> None:
        """The sequence computes nothing now: nobody waits for it any longer."""
        if cursor.announced is not None:
            del self._announced[cursor.announced]
            cursor.announced = None

    def is_announced(self, cursor: PrefixCursor) -> bool:
        """Whether the block after the last :meth:`match` is being computed by a sequence."""
        node = cursor.node
        depth = 0 if node is None else node.depth
        return depth < len(cursor.chunks) and cursor.edge(node, depth) in self._announced

    def _child(self, cursor: PrefixCursor, node: _Node | None, depth: int) -> _Node | None:
        if node is None:
            return self._first.get(cursor.edge(None, depth))
        return node.children.get(cursor.chunks[depth])

    def _add(self, cursor: PrefixCursor, parent: _Node | None, depth: int, block: int) -> _Node:
        edge = cursor.edge(parent, depth)
        node = _Node(parent, edge, depth + 1, block)
        if parent is None:
            self._first[edge] = node
        else:
            parent.children[edge[1]] = node
        self._place(node, block)
        return node

    def _place(self, node: _Node, block: int) -> None:
        assert block not in self._nodes, "a block stands for one prefix"
        node.block = block
        self._nodes[block] = node
        self._pool.keep(block)

    def _settle(self, cursor: PrefixCursor) -> _Node | None:
        """Point the cursor at the deepest of its ancestors that is still in the trie."""
        node = cursor.node
        while node is not None and not node.live:
            node = node.parent
        cursor.node = node
        return node
