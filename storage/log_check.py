"""The check at a start: tiles against each other, and the tail of the log against them."""

import sqlite3
from itertools import pairwise
from typing import Any, Final

import attrs

from storage.codec import decode_envelope, decode_event, leaf_hash
from storage.errors import EventUnreadable, LogDamaged
from storage.frontier import EMPTY, Frontier
from storage.merkle import TILE_LEAVES, perfect_root

# Any: rows as SQLite answers them.
Row = tuple[Any, ...]
_COLUMNS: Final = "seq, stream, version, type, recorded_at_ns, session, body, leaf"
_ENVELOPE: Final = ("seq", "stream", "version", "type", "recorded_at_ns", "session")


@attrs.frozen(kw_only=True)
class TailCheck:
    """What the file's end says; with ``damage`` the frontier is empty and nothing may follow."""

    head: int
    recorded_at_ns: int
    frontier: Frontier
    damage: LogDamaged | None


def check_tail(connection: sqlite3.Connection) -> TailCheck:
    """Check all tiles, the last complete one and the events after it; never reads the rest.

    Damage is answered, not raised.
    """
    head, at_ns = 0, 0
    try:
        head = int(connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0])
        levels = _tiles(connection, head)
        rows = _tail(connection, head)
        at_ns = int(rows[-1][4]) if rows else 0
        _check_events(connection, rows, _tail_start(head))
        _check_last_tile(rows, levels, head)
    except LogDamaged as found:
        return TailCheck(head=head, recorded_at_ns=at_ns, frontier=EMPTY, damage=found)
    except sqlite3.DatabaseError as error:
        damage = LogDamaged(head, f"SQLite can not read it: {error}")
        return TailCheck(head=head, recorded_at_ns=at_ns, frontier=EMPTY, damage=damage)
    return TailCheck(
        head=head, recorded_at_ns=at_ns, frontier=_frontier(rows, levels, head), damage=None
    )


def event_damage(row: Row) -> LogDamaged | None:
    """Answer how one row contradicts its own body or leaf; None when it does not.

    The row has the columns of ``events`` in their order.
    """
    seq, body, leaf = int(row[0]), row[6], row[7]
    if not isinstance(body, bytes) or not isinstance(leaf, bytes):
        return LogDamaged(seq, "its body or leaf is not a blob")
    if leaf_hash(body) != leaf:
        return LogDamaged(seq, "its leaf is not the hash of its body")
    try:
        envelope = decode_envelope(seq, body)
        decode_event(envelope)
    except EventUnreadable as error:
        return LogDamaged(seq, error.reason)
    for name, column in zip(_ENVELOPE, row, strict=False):
        if getattr(envelope, name) != column:
            return LogDamaged(seq, f"its column {name} is not what its body says")
    return None


def _tail_start(head: int) -> int:
    return max(0, head // TILE_LEAVES - 1) * TILE_LEAVES


def _tiles(connection: sqlite3.Connection, head: int) -> list[list[bytes]]:
    levels: list[list[bytes]] = []
    for level, index, root in connection.execute(
        "SELECT level, idx, root FROM tiles ORDER BY level, idx"
    ):
        if level == len(levels):
            levels.append([])
        if level != len(levels) - 1 or index != len(levels[level]):
            raise LogDamaged(_first_seq(level, index), f"tile {level}/{index} is out of order")
        levels[level].append(bytes(root))
    _check_tile_counts(levels, head)
    for lower, upper in pairwise(range(len(levels))):
        for index, root in enumerate(levels[upper]):
            below = levels[lower][index * TILE_LEAVES : (index + 1) * TILE_LEAVES]
            if perfect_root(below) != root:
                reason = f"tile {upper}/{index} is not the root of the tiles below it"
                raise LogDamaged(_first_seq(upper, index), reason)
    return levels


def _check_tile_counts(levels: list[list[bytes]], head: int) -> None:
    level, wanted = 0, head // TILE_LEAVES
    while wanted or level < len(levels):
        found = len(levels[level]) if level < len(levels) else 0
        if found > wanted:
            reason = f"tiles cover {found * TILE_LEAVES ** (level + 1)} events, the log ends before"
            raise LogDamaged(head + 1, reason)
        if found < wanted:
            raise LogDamaged(_first_seq(level, found), f"tile {level}/{found} is missing")
        level, wanted = level + 1, wanted // TILE_LEAVES


def _first_seq(level: int, index: int) -> int:
    return int(index * TILE_LEAVES ** (level + 1) + 1)


def _tail(connection: sqlite3.Connection, head: int) -> list[Row]:
    return connection.execute(
        f"SELECT {_COLUMNS} FROM events WHERE seq > ? ORDER BY seq",  # noqa: S608  a constant
        (_tail_start(head),),
    ).fetchall()


def _check_events(connection: sqlite3.Connection, rows: list[Row], start: int) -> None:
    leaves: dict[tuple[str, int], str] = {}
    expected, at_ns = start + 1, 0
    for row in rows:
        seq, stream, version = int(row[0]), row[1], int(row[2])
        if seq != expected:
            raise LogDamaged(expected, "it is missing")
        damage = event_damage(row)
        if damage is not None:
            raise damage
        if row[4] < at_ns:
            raise LogDamaged(seq, "its time is before that of the event before it")
        previous = leaves.get((stream, version - 1))
        if previous is None and version > 1:
            previous = _leaf_of(connection, seq, stream, version - 1)
        if decode_envelope(seq, row[6]).prev_leaf != previous:
            raise LogDamaged(seq, "its prev_leaf is not the leaf before it in its stream")
        leaves[stream, version] = row[7].hex()
        expected, at_ns = seq + 1, row[4]


def _leaf_of(connection: sqlite3.Connection, seq: int, stream: str, version: int) -> str:
    found = connection.execute(
        "SELECT leaf FROM events WHERE stream = ? AND version = ?", (stream, version)
    ).fetchone()
    if found is None:
        raise LogDamaged(seq, f"version {version} of its stream is missing")
    return bytes(found[0]).hex()


def _check_last_tile(rows: list[Row], levels: list[list[bytes]], head: int) -> None:
    if head < TILE_LEAVES:
        return
    index = head // TILE_LEAVES - 1
    if perfect_root([row[7] for row in rows[:TILE_LEAVES]]) != levels[0][index]:
        reason = f"tile 0/{index} is not the root of its leaves"
        raise LogDamaged(_first_seq(0, index), reason)


def _frontier(rows: list[Row], levels: list[list[bytes]], head: int) -> Frontier:
    loose = head % TILE_LEAVES
    leaves = tuple(bytes(row[7]) for row in rows[len(rows) - loose :])
    roots = (tuple(level[len(level) - len(level) % TILE_LEAVES :]) for level in levels)
    complete = (*(len(level) for level in levels), 0)
    return Frontier(open=(leaves, *roots), complete=complete)
