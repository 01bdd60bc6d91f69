"""The tree says what RFC 9162 says, and its proofs prove just what they should."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymerkle import InmemoryTree

from storage import merkle
from storage.codec import leaf_hash

SIZES_MAX = 70


def leaves(count):
    return [leaf_hash(b"event %d" % i) for i in range(count)]


def oracle(count):
    tree = InmemoryTree(algorithm="sha256")
    for i in range(count):
        tree.append_entry(b"event %d" % i)
    return tree


def naive_root(nodes):
    if not nodes:
        return hashlib.sha256(b"").digest()
    if len(nodes) == 1:
        return nodes[0]
    split = 1
    while split * 2 < len(nodes):
        split *= 2
    return merkle.node_hash(naive_root(nodes[:split]), naive_root(nodes[split:]))


def naive_subproof(first, nodes, *, whole):
    """Answer SUBPROOF of RFC 9162, 2.1.4.1, word for word."""
    if first == len(nodes):
        return [] if whole else [naive_root(nodes)]
    split = 1
    while split * 2 < len(nodes):
        split *= 2
    if first <= split:
        return [*naive_subproof(first, nodes[:split], whole=whole), naive_root(nodes[split:])]
    rest = naive_subproof(first - split, nodes[split:], whole=False)
    return [*rest, naive_root(nodes[:split])]


def test_roots_are_those_of_pymerkle():
    """Every size up to 70 has the root that an independent library computes."""
    tree = oracle(SIZES_MAX)

    for size in range(1, SIZES_MAX + 1):
        assert merkle.tree_root(leaves(size)) == tree.get_root(size)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 511, 512, 700])
def test_a_root_follows_the_recursive_definition(size):
    """The incremental root equals the definition of RFC 9162, 2.1.1, around a tile's border."""
    assert merkle.tree_root(leaves(size)) == naive_root(leaves(size))


def test_a_complete_tile_is_answered_once_with_its_root():
    """A tile appears when its last leaf comes, and is the perfect root of its leaves."""
    all_leaves = leaves(600)
    frontier = merkle.Frontier()

    tiles = [(frontier.size, t) for leaf in all_leaves for t in frontier.append(leaf)]

    assert tiles == [
        (256, merkle.Tile(0, 0, merkle.perfect_root(all_leaves[:256]))),
        (512, merkle.Tile(0, 1, merkle.perfect_root(all_leaves[256:512]))),
    ]
    assert [tile.end for _, tile in tiles] == [256, 512]


def test_256_tiles_make_a_tile_of_the_next_level():
    """A tree fed with tile roots has the tiles of level 1 and the same root."""
    roots = leaves(257)
    frontier = merkle.Frontier()

    higher = [t for root in roots for t in frontier.append_tile(root)]
    frontier.append(roots[0])

    assert higher == [merkle.Tile(1, 0, merkle.perfect_root(roots[:256]))]
    assert frontier.size == 257 * 256 + 1
    expected = merkle.node_hash(
        merkle.perfect_root(roots[:256]), merkle.node_hash(roots[256], roots[0])
    )
    assert frontier.root() == expected


def test_a_frontier_restored_from_tiles_goes_on_as_if_it_had_seen_every_leaf():
    """Tiles and the tail since the last one are enough to know the root."""
    all_leaves = leaves(700)
    frontier = merkle.Frontier()
    for start in (0, 256):
        frontier.append_tile(merkle.perfect_root(all_leaves[start : start + 256]))

    for leaf in all_leaves[512:]:
        frontier.append(leaf)

    assert frontier.root() == merkle.tree_root(all_leaves)


def test_inclusion_paths_are_those_of_pymerkle():
    """For every leaf of every size the path is the oracle's, whose first element is the leaf."""
    tree = oracle(33)
    for size in range(1, 34):
        all_leaves = leaves(size)
        for index in range(size):
            path = merkle.inclusion_proof(index, size, merkle.range_of(all_leaves))

            assert path == tree.prove_inclusion(index + 1, size).path[1:]
            root = merkle.tree_root(all_leaves)
            assert merkle.verify_inclusion(all_leaves[index], index, size, path, root)


def test_every_older_tree_is_proved_to_be_a_prefix():
    """For all pairs of sizes the proof is that of the recursive definition, and it holds."""
    all_leaves = leaves(33)
    roots = [merkle.tree_root(all_leaves[:n]) for n in range(34)]
    for second in range(1, 34):
        for first in range(1, second + 1):
            path = merkle.consistency_proof(first, second, merkle.range_of(all_leaves))

            assert merkle.verify_consistency(first, roots[first], second, roots[second], path)
            assert path == naive_subproof(first, all_leaves[:second], whole=True)


def test_proofs_are_made_from_tiles_and_a_few_leaves():
    """The paths are those made from all leaves, and no leaf of a whole tile is read for a root."""
    size = 256 * 3 + 40
    all_leaves = leaves(size)
    frontier = merkle.Frontier()
    tiles = {(t.level, t.index): t.root for leaf in all_leaves for t in frontier.append(leaf)}
    asked = []

    def some(start, end):
        asked.append(end - start)
        return all_leaves[start:end]

    root_of = merkle.range_of_tiles(some, lambda level, index: tiles[level, index])
    whole = merkle.range_of(all_leaves)

    for index in (0, 255, 256, 600, 767, 768, size - 1):
        path = merkle.inclusion_proof(index, size, root_of)
        assert path == merkle.inclusion_proof(index, size, whole)
    for first in (1, 256, 300, 512, 768, 800, size):
        path = merkle.consistency_proof(first, size, root_of)
        assert path == merkle.consistency_proof(first, size, whole)
    assert max(asked) < 256
    assert root_of(0, size) == frontier.root()


def test_the_empty_tree_is_extended_by_every_tree():
    """A proof from size 0 is empty, and only the empty root passes."""
    root = merkle.tree_root(leaves(3))

    assert merkle.verify_consistency(0, merkle.EMPTY_ROOT, 3, root, [])
    assert not merkle.verify_consistency(0, root, 3, root, [])
    assert not merkle.verify_consistency(0, merkle.EMPTY_ROOT, 3, root, [root])


@given(size=st.integers(1, 80), data=st.data())
def test_a_changed_inclusion_proof_never_verifies(size, data):
    """A bit flipped, a step dropped or added, another index, leaf or size: refused."""
    all_leaves = leaves(size)
    index = data.draw(st.integers(0, size - 1))
    root = merkle.tree_root(all_leaves)
    path = merkle.inclusion_proof(index, size, merkle.range_of(all_leaves))
    leaf = all_leaves[index]

    assert merkle.verify_inclusion(leaf, index, size, path, root)
    assert not merkle.verify_inclusion(leaf, size, size, path, root)
    assert not merkle.verify_inclusion(leaf, -1, size, path, root)
    assert not merkle.verify_inclusion(leaf_hash(b"other"), index, size, path, root)
    assert not merkle.verify_inclusion(leaf, index, size, [*path, leaf], root)
    for at, step in enumerate(path):
        flipped = bytes([step[0] ^ 1]) + step[1:]
        changed = [*path[:at], flipped, *path[at + 1 :]]
        assert not merkle.verify_inclusion(leaf, index, size, changed, root)
        assert not merkle.verify_inclusion(leaf, index, size, path[:at] + path[at + 1 :], root)
    for other in range(size):
        if other != index:
            assert not merkle.verify_inclusion(leaf, other, size, path, root)


@given(second=st.integers(2, 80), data=st.data())
def test_a_changed_consistency_proof_never_verifies(second, data):
    """A forked older tree, or any changed step, is refused."""
    first = data.draw(st.integers(1, second - 1))
    all_leaves = leaves(second)
    old, new = merkle.tree_root(all_leaves[:first]), merkle.tree_root(all_leaves)
    path = merkle.consistency_proof(first, second, merkle.range_of(all_leaves))
    forked = merkle.tree_root([*all_leaves[: first - 1], leaf_hash(b"other")])

    assert merkle.verify_consistency(first, old, second, new, path)
    assert not merkle.verify_consistency(first, forked, second, new, path)
    assert not merkle.verify_consistency(first, old, second, old, path)
    assert not merkle.verify_consistency(first, old, first, new, path)
    assert not merkle.verify_consistency(second, new, first, old, path)
    for at, step in enumerate(path):
        flipped = bytes([step[0] ^ 1]) + step[1:]
        changed = [*path[:at], flipped, *path[at + 1 :]]
        assert not merkle.verify_consistency(first, old, second, new, changed)


@given(size=st.integers(0, 600))
def test_a_root_depends_on_every_leaf(size):
    """Changing any one leaf, or adding one, changes the root."""
    all_leaves = leaves(size)
    root = merkle.tree_root(all_leaves)

    assert merkle.tree_root([*all_leaves, leaf_hash(b"more")]) != root
    for at in {0, size // 2, size - 1} if size else ():
        changed = [*all_leaves[:at], leaf_hash(b"other"), *all_leaves[at + 1 :]]
        assert merkle.tree_root(changed) != root
