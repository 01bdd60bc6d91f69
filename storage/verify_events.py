"""The audit's first pass: every row in commit order against its body, its leaf and the tree."""

import sqlite3
from typing import Any, Final

import attrs

from storage import events as e
from storage.codec import Envelope, decode_envelope, decode_event, leaf_hash
from storage.errors import EventUnreadable
from storage.findings import Findings
from storage.merkle import EMPTY_ROOT, TILE_LEAVES, Frontier, Tile, perfect_root

COLUMNS: Final = ("seq", "stream", "version", "type", "recorded_at_ns", "session")
GAP_FILLED_MAX: Final = 1_000_000

_SELECT: Final = (
    "SELECT seq, stream, version, type, recorded_at_ns, session, body, leaf"
    " FROM events ORDER BY seq"
)
_ERASURES: Final = frozenset({"payload.erased", "artifact.erased"})
_HOLE: Final = bytes(32)


@attrs.define(kw_only=True)
class Walked:
    """What the first pass learnt; ``bad_seqs`` and ``bad_streams`` need no second accusation."""

    size: int = 0
    head: int = 0
    root: bytes = EMPTY_ROOT
    bad_seqs: set[int] = attrs.Factory(set)
    bad_streams: set[str] = attrs.Factory(set)
    erased: dict[str, int] = attrs.Factory(dict)


class EventWalk:
    """Reads all rows once; keeps one tile of leaves, the frontier and what was erased."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        findings: Findings,
        noted: tuple[int, bytes] | None,
    ) -> None:
        self._connection = connection
        self._findings = findings
        self._noted = noted
        self._walked = Walked()
        self._frontier = Frontier()
        self._computed: list[bytes] = []
        self._suspects: list[int] = []
        self._last_bad = 0
        self._recorded_at_ns = 0
        self._tiles_found = 0

    def run(self) -> Walked:
        """Walk the log to its head and answer what was learnt."""
        self._check_noted()
        for row in self._connection.execute(_SELECT):
            self._walked.size += 1
            self._fill_gap(row[0])
            self._walked.head = row[0]
            self._take(row)
        for seq in self._suspects:
            self._findings.add("body", seq, f"event {seq}: its leaf is not the hash of its body")
        self._walked.root = self._frontier.root()
        self._check_end()
        return self._walked

    def _fill_gap(self, seq: int) -> None:
        first = self._walked.head + 1
        if seq == first:
            return
        if seq < first:
            self._findings.add("moved", seq, f"a row has the seq {seq}: events start at 1")
            return
        many = f"events {first} to {seq - 1} are" if seq - 1 > first else f"event {first} is"
        self._findings.add("missing", first, f"{many} missing")
        self._last_bad = seq - 1
        for _ in range(min(seq - first, GAP_FILLED_MAX)):
            self._grow(_HOLE, _HOLE)

    # Any: a row as SQLite answers it; an edited one may hold any type in any column.
    def _take(self, row: tuple[Any, ...]) -> None:
        seq, body, leaf = row[0], row[6], row[7]
        computed = leaf_hash(body) if isinstance(body, bytes) else _HOLE
        if computed != leaf:
            self._suspects.append(seq)
            self._blame(seq, row[1])
        self._check_columns(row, whole=computed == leaf)
        stored = leaf if isinstance(leaf, bytes) and len(leaf) == len(_HOLE) else _HOLE
        self._grow(stored, computed)

    def _check_columns(self, row: tuple[Any, ...], *, whole: bool) -> None:
        seq = row[0]
        try:
            envelope = decode_envelope(seq, row[6] if isinstance(row[6], bytes) else b"")
        except EventUnreadable as error:
            if whole:
                self._findings.add("body", seq, str(error))
            self._blame(seq, row[1])
            return
        different = [
            name
            for name, column in zip(COLUMNS, row, strict=False)
            if getattr(envelope, name) != column
        ]
        if different:
            self._blame(seq, row[1])
            self._walked.bad_streams.add(envelope.stream)
        if not whole:
            return
        if "seq" in different:
            what = f"the row at seq {seq} holds event {envelope.seq}"
            self._findings.add("moved", seq, what)
            return
        for name in different:
            value, said = row[COLUMNS.index(name)], getattr(envelope, name)
            what = f"event {seq}: column {name} is {_short(value)}, its body says {_short(said)}"
            self._findings.add("column", seq, what)
        if not different:
            self._learn(seq, envelope)

    def _learn(self, seq: int, envelope: Envelope) -> None:
        if envelope.recorded_at_ns < self._recorded_at_ns:
            what = f"event {seq} was recorded before the event before it"
            self._findings.add("time", seq, what)
        self._recorded_at_ns = max(self._recorded_at_ns, envelope.recorded_at_ns)
        if envelope.type in _ERASURES:
            try:
                event = decode_event(envelope)
            except EventUnreadable:
                return
            if isinstance(event, e.PayloadErased):
                self._walked.erased.update(dict.fromkeys(event.digests, seq))
            elif isinstance(event, e.ArtifactErased):
                self._walked.erased[event.digest] = seq

    def _grow(self, stored: bytes, computed: bytes) -> None:
        self._computed.append(computed)
        for tile in self._frontier.append(stored):
            self._check_tile(tile)
        if len(self._computed) == TILE_LEAVES:
            self._computed.clear()
            self._suspects.clear()
        if self._noted is not None and self._frontier.size == self._noted[0]:
            self._compare_noted(self._frontier.root())

    def _check_tile(self, tile: Tile) -> None:
        row = self._connection.execute(
            "SELECT root FROM tiles WHERE level = ? AND idx = ?", (tile.level, tile.index)
        ).fetchone()
        first = tile.end - (TILE_LEAVES ** (tile.level + 1)) + 1
        name = f"tile {tile.level}/{tile.index} (events {first} to {tile.end})"
        self._tiles_found += row is not None
        if row is None:
            self._findings.add("tile", first, f"{name} is missing")
        if tile.level == 0 and self._suspects:
            self._judge_suspects(tile, None if row is None else row[0])
        elif row is not None and row[0] != tile.root and self._last_bad < first:
            what = (
                f"{name} is not the root of its leaves: the tile was changed, or an event together"
                " with its leaf"
            )
            self._findings.add("tile", first, what)

    # Any: a column as SQLite answers it.
    def _judge_suspects(self, tile: Tile, noted_root: Any) -> None:  # noqa: ANN401
        for seq in self._suspects:
            if noted_root == tile.root:
                what = f"event {seq}: its body was changed; leaf and tile agree with each other"
                self._findings.add("body", seq, what)
            elif noted_root == perfect_root(self._computed):
                what = f"event {seq}: its leaf was changed; body and tile agree with each other"
                self._findings.add("leaf", seq, what)
            else:
                what = f"event {seq}: its leaf is not the hash of its body"
                self._findings.add("body", seq, what)

    def _check_noted(self) -> None:
        if self._noted is not None and self._noted[0] == 0:
            self._compare_noted(EMPTY_ROOT)

    def _compare_noted(self, root: bytes) -> None:
        assert self._noted is not None, "there is a root to compare with"
        size, noted = self._noted
        if root != noted:
            what = f"the first {size} events have the root {root.hex()}, noted was {noted.hex()}"
            self._findings.add("root", None, what)

    def _check_end(self) -> None:
        size = self._frontier.size
        if self._noted is not None and size < self._noted[0]:
            what = f"{self._noted[0]} events were noted, the log ends at {size}"
            self._findings.add("cut", size + 1, what)
        (tiles,) = self._connection.execute("SELECT count(*) FROM tiles").fetchone()
        if tiles == self._tiles_found:
            return
        past = False
        for level, index in self._connection.execute("SELECT level, idx FROM tiles"):
            end = (index + 1) * TILE_LEAVES ** (min(level, 7) + 1)
            past = past or end > size
        what = f"the log has {tiles} tiles, its {size} events make {self._tiles_found}"
        self._findings.add("cut" if past else "tile", size + 1 if past else None, what)

    def _blame(self, seq: int, stream: object) -> None:
        self._last_bad = seq
        self._walked.bad_seqs.add(seq)
        if isinstance(stream, str):
            self._walked.bad_streams.add(stream)


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
