"""The growing edge of the Merkle tree: the hashes that do not fill a tile yet, level by level."""

from collections.abc import Sequence
from typing import Final

import attrs

from storage.merkle import TILE_LEAVES, perfect_root

Tile = tuple[int, int, bytes]
"""(level, index, root); a tile of level 0 is over 256 leaves, of level n over 256 tiles."""


@attrs.frozen(kw_only=True)
class Frontier:
    """``open[0]`` are leaves after the last complete tile, ``open[n]`` roots of level n - 1.

    ``complete[n]`` counts the complete tiles of level n.
    """

    open: tuple[tuple[bytes, ...], ...] = ((),)
    complete: tuple[int, ...] = (0,)


EMPTY: Final = Frontier()


def grow(frontier: Frontier, leaves: Sequence[bytes]) -> tuple[Frontier, list[Tile]]:
    """Answer the frontier after more leaves, and the tiles that they completed, in order."""
    pending = [list(hashes) for hashes in frontier.open]
    complete = list(frontier.complete)
    pending[0].extend(leaves)
    tiles: list[Tile] = []
    level = 0
    while level < len(pending):
        while len(pending[level]) >= TILE_LEAVES:
            root = perfect_root(pending[level][:TILE_LEAVES])
            del pending[level][:TILE_LEAVES]
            tiles.append((level, complete[level], root))
            complete[level] += 1
            if level + 1 == len(pending):
                pending.append([])
                complete.append(0)
            pending[level + 1].append(root)
        level += 1
    grown = Frontier(open=tuple(tuple(p) for p in pending), complete=tuple(complete))
    return grown, tiles
