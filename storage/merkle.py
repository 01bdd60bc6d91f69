"""The Merkle tree over the log: RFC 9162's hashing, roots, tiles and proofs, on values alone.

Everywhere a *leaf* is the 32-byte leaf hash that stands in an event's row
(:func:`storage.codec.leaf_hash`), and a tree's leaf ``i`` is the event with seq ``i + 1``.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import attrs

TILE_HEIGHT: Final = 8
TILE_LEAVES: Final = 1 << TILE_HEIGHT
EMPTY_ROOT: Final = hashlib.sha256(b"").digest()

_NODE_PREFIX: Final = b"\x01"

RangeRoot = Callable[[int, int], bytes]
"""Answers the root over leaves ``start`` (inclusive) to ``end`` (exclusive); never empty."""


@attrs.frozen
class Tile:
    """The root of a complete tile: ``TILE_LEAVES ** (level + 1)`` leaves, the ``index``-th such."""

    level: int
    index: int
    root: bytes

    @property
    def end(self) -> int:
        """The number of leaves of the tree at which this tile is complete."""
        return self.index + 1 << TILE_HEIGHT * (self.level + 1)


class Frontier:
    """A tree that grows leaf by leaf, keeping only the roots of its complete subtrees."""

    def __init__(self) -> None:
        self._size = 0
        self._peaks: list[bytes | None] = []

    @property
    def size(self) -> int:
        """The number of leaves."""
        return self._size

    def append(self, leaf: bytes) -> tuple[Tile, ...]:
        """Take the next leaf; answer the tiles that it completes, lowest level first."""
        self._size += 1
        return self._carry(leaf, 0)

    def append_tile(self, root: bytes) -> tuple[Tile, ...]:
        """Take ``TILE_LEAVES`` leaves at once by the root of their tile (level 0).

        The size must be a multiple of ``TILE_LEAVES``. Answers the tiles of higher levels that
        this completes.
        """
        assert self._size % TILE_LEAVES == 0, "a tile is taken at a tile's border"
        self._size += TILE_LEAVES
        return self._carry(root, TILE_HEIGHT)

    def root(self) -> bytes:
        """Answer the root of all leaves so far; that of the empty tree is SHA-256 of nothing."""
        root: bytes | None = None
        for peak in self._peaks:
            if peak is not None:
                root = peak if root is None else node_hash(peak, root)
        return EMPTY_ROOT if root is None else root

    def _carry(self, node: bytes, height: int) -> tuple[Tile, ...]:
        tiles = []
        while len(self._peaks) <= height:
            self._peaks.append(None)
        while (left := self._peaks[height]) is not None:
            self._peaks[height] = None
            node = node_hash(left, node)
            height += 1
            if height % TILE_HEIGHT == 0:
                tiles.append(Tile(height // TILE_HEIGHT - 1, (self._size >> height) - 1, node))
            if height == len(self._peaks):
                self._peaks.append(None)
        self._peaks[height] = node
        return tuple(tiles)


def node_hash(left: bytes, right: bytes) -> bytes:
    """Answer the hash of an inner node: SHA-256 over 0x01 and its two children."""
    return hashlib.sha256(_NODE_PREFIX + left + right).digest()


def perfect_root(hashes: Sequence[bytes]) -> bytes:
    """Answer the root over a number of nodes that is a power of two, for example a tile's."""
    count = len(hashes)
    assert count > 0, "a perfect tree has a leaf"
    assert count & (count - 1) == 0, "the number of nodes is a power of two"
    row = list(hashes)
    while len(row) > 1:
        row = [node_hash(row[i], row[i + 1]) for i in range(0, len(row), 2)]
    return row[0]


def tree_root(leaves: Iterable[bytes]) -> bytes:
    """Answer the root of any number of leaves."""
    frontier = Frontier()
    for leaf in leaves:
        frontier.append(leaf)
    return frontier.root()


def range_of(leaves: Sequence[bytes]) -> RangeRoot:
    """Answer a range function over leaves in memory, for the proofs below."""
    return lambda start, end: tree_root(leaves[start:end])


def range_of_tiles(
    leaves: Callable[[int, int], Sequence[bytes]], tile: Callable[[int, int], bytes]
) -> RangeRoot:
    """Answer a range function over a stored tree, for the proofs below.

    ``leaves(start, end)`` is asked for at most ``TILE_LEAVES`` leaves at a time, and
    ``tile(level, index)`` for roots of complete tiles only.
    """

    def root_of(start: int, end: int) -> bytes:
        size = end - start
        level = (size.bit_length() - 1) // TILE_HEIGHT - 1
        leaves_of_tile = 1 << TILE_HEIGHT * (level + 1)
        if level >= 0 and size == leaves_of_tile and start % leaves_of_tile == 0:
            return tile(level, start // leaves_of_tile)
        if size <= TILE_LEAVES:
            return tree_root(leaves(start, end))
        middle = start + _split(size)
        return node_hash(root_of(start, middle), root_of(middle, end))

    return root_of


def inclusion_proof(index: int, size: int, root_of: RangeRoot) -> list[bytes]:
    """Answer the audit path of leaf ``index`` (from 0) in the tree of ``size`` leaves.

    RFC 9162, 2.1.3.1; the leaf itself is not part of it. ``root_of`` is asked for O(log size)
    ranges, each aligned, so that stored tiles can answer them.
    """
    assert 0 <= index < size, "the leaf is in the tree"
    path = []
    start, end = 0, size
    while end - start > 1:
        split = start + _split(end - start)
        if index < split:
            path.append(root_of(split, end))
            end = split
        else:
            path.append(root_of(start, split))
            start = split
    return path[::-1]


def consistency_proof(first: int, second: int, root_of: RangeRoot) -> list[bytes]:
    """Answer the proof that the tree of ``second`` leaves extends that of ``first`` leaves.

    RFC 9162, 2.1.4.1. Empty when the sizes are equal; ``first`` is at least 1.
    """
    assert 0 < first <= second, "the older tree is not empty, the newer one not smaller"
    path = []
    start, end = 0, second
    whole = True
    while first != end:
        split = start + _split(end - start)
        if first <= split:
            path.append(root_of(split, end))
            end = split
        else:
            path.append(root_of(start, split))
            start = split
            whole = False
    if not whole:
        path.append(root_of(start, end))
    return path[::-1]


def verify_inclusion(
    leaf: bytes, index: int, size: int, path: Sequence[bytes], root: bytes
) -> bool:
    """Answer whether the path proves the leaf's place in the tree (RFC 9162, 2.1.3.2)."""
    if not 0 <= index < size:
        return False
    node, last, result = index, size - 1, leaf
    for step in path:
        if last == 0:
            return False
        if node & 1 or node == last:
            result = node_hash(step, result)
            while node and not node & 1:
                node >>= 1
                last >>= 1
        else:
            result = node_hash(result, step)
        node >>= 1
        last >>= 1
    return last == 0 and result == root


def verify_consistency(
    first: int, first_root: bytes, second: int, second_root: bytes, path: Sequence[bytes]
) -> bool:
    """Answer whether the path proves that the newer tree extends the older (RFC 9162, 2.1.4.2).

    An empty older tree is extended by every tree: then the path must be empty.
    """
    if first == second or not 0 < first < second:
        same = first == second and first_root == second_root
        from_empty = 0 == first < second and first_root == EMPTY_ROOT
        return not path and (same or from_empty)
    steps = list(path)
    if first & (first - 1) == 0:
        steps.insert(0, first_root)
    if not steps:
        return False
    return _consistent(first, first_root, second, second_root, steps)


def _consistent(
    first: int, first_root: bytes, second: int, second_root: bytes, steps: list[bytes]
) -> bool:
    node, last = first - 1, second - 1
    while node & 1:
        node >>= 1
        last >>= 1
    older = newer = steps[0]
    for step in steps[1:]:
        if last == 0:
            return False
        if node & 1 or node == last:
            older = node_hash(step, older)
            newer = node_hash(step, newer)
            while node and not node & 1:
                node >>= 1
                last >>= 1
        else:
            newer = node_hash(newer, step)
        node >>= 1
        last >>= 1
    return last == 0 and older == first_root and newer == second_root


def _split(size: int) -> int:
    """Answer the largest power of two below ``size`` (which is at least 2)."""
    return 1 << (size - 1).bit_length() - 1
