"""Hashing of the Merkle tree over the log (RFC 6962): nodes, and roots of complete tiles."""

import hashlib
from collections.abc import Sequence
from typing import Final

TILE_LEAVES: Final = 256
NODE_PREFIX: Final = b"\x01"


def node_hash(left: bytes, right: bytes) -> bytes:
    """Answer the hash of an inner node: SHA-256 over 0x01 and its two children."""
    return hashlib.sha256(NODE_PREFIX + left + right).digest()


def perfect_root(hashes: Sequence[bytes]) -> bytes:
    """Answer the root over a power-of-two number of hashes."""
    assert hashes, "a perfect tree has a leaf"
    assert len(hashes) & (len(hashes) - 1) == 0, "a perfect tree has a power of two of leaves"
    level = list(hashes)
    while len(level) > 1:
        level = [node_hash(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]
