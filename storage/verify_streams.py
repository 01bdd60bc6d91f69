"""The audit's second pass: each stream in turn is folded, with all that lies beside it."""

import hashlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

from storage import events as e
from storage.codec import recorded, salted_digest
from storage.errors import EventUnreadable, IllegalTransition
from storage.event_log import Recorded
from storage.findings import Findings
from storage.ids import SERVICE_STREAM
from storage.job_state import JobState, evolve
from storage.projections import CHANGES_ROW, JobRow, ServiceState, evolve_row, evolve_service
from storage.verify_events import Walked

_SELECT: Final = "SELECT seq, stream, version, body, leaf FROM events ORDER BY stream, version"
_SERVICE_EVENTS: Final = e.ServiceEvent.__args__
_CHUNK_BYTES: Final = 1 << 20


@attrs.define(kw_only=True)
class Stream:
    """One stream while it is folded; ``whole`` false: it is damaged and was accused already."""

    name: str
    whole: bool
    version: int = 0
    leaf: str | None = None
    job: JobState | None = None
    row: JobRow | None = None


class StreamWalk:
    """Folds stream after stream, keeping one of them and the service's counters."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        findings: Findings,
        walked: Walked,
        artifacts: Path | None,
        finished: Callable[[Stream], None],
    ) -> None:
        self._connection = connection
        self._findings = findings
        self._walked = walked
        self._artifacts = artifacts
        self._finished = finished
        self._rows_named = {"payloads": 0, "artifacts": 0}
        self.service = ServiceState()
        self.log_ids: set[str] = set()

    def run(self) -> None:
        """Walk all streams; ``finished`` hears of each one as it ends."""
        stream: Stream | None = None
        for seq, name, version, body, leaf in self._connection.execute(_SELECT):
            if stream is None or stream.name != name:
                if stream is not None:
                    self._finished(stream)
                whole = isinstance(name, str) and name not in self._walked.bad_streams
                stream = Stream(name=name, whole=whole)
            if seq not in self._walked.bad_seqs:
                self._take(stream, seq, version, body, leaf)
        if stream is not None:
            self._finished(stream)
        for table in self._rows_named:
            self._find_orphans(table)

    def _take(self, stream: Stream, seq: int, version: int, body: bytes, leaf: bytes) -> None:
        try:
            record = recorded(body, leaf, seq)
        except EventUnreadable as error:
            self._findings.add("body", seq, str(error))
            stream.whole = False
            return
        self._check_beside(record)
        if stream.whole:
            self._check_place(stream, record, version)
        if stream.whole:
            self._fold(stream, record)

    def _check_place(self, stream: Stream, record: Recorded, version: int) -> None:
        seq = int(record.seq)
        if version != stream.version + 1:
            what = f"{stream.name} lacks version {stream.version + 1}; next is event {seq}"
            self._findings.add("missing", seq, what)
            stream.whole = False
        elif record.prev_leaf != stream.leaf:
            what = f"event {seq} names another event before it in {stream.name} than the log has"
            self._findings.add("chain", seq, what)
            stream.whole = False
        stream.version, stream.leaf = version, record.leaf

    def _fold(self, stream: Stream, record: Recorded) -> None:
        event = record.event
        of_service = isinstance(event, _SERVICE_EVENTS)
        if of_service != (stream.name == SERVICE_STREAM):
            self._illegal(stream, record, f"{record.type} does not belong into {stream.name}")
            return
        before = stream.row
        if not of_service:
            try:
                stream.job = evolve(stream.job, record)
            except (IllegalTransition, AssertionError) as error:
                self._illegal(stream, record, str(error))
                return
            stream.row = evolve_row(before, record)
        if isinstance(event, e.ServiceStarted):
            self.log_ids.add(event.log_id)
        if of_service or isinstance(event, CHANGES_ROW):
            seq = max(self.service.seq, int(record.seq))
            folded = evolve_service(self.service, record, before, stream.row)
            self.service = attrs.evolve(folded, seq=seq)

    def _illegal(self, stream: Stream, record: Recorded, why: str) -> None:
        self._findings.add("illegal", int(record.seq), f"event {int(record.seq)}: {why}")
        stream.whole = False

    def _check_beside(self, record: Recorded) -> None:
        for digest, size in sorted(refs_of(record.event).items()):
            self._check_payload(int(record.seq), digest, size)
        if isinstance(record.event, e.ArtifactStored):
            self._check_artifact(int(record.seq), record.event)

    def _check_payload(self, seq: int, digest: str, size: int) -> None:
        row = self._connection.execute(
            "SELECT seq, salt, data FROM payloads WHERE digest = ?", (digest,)
        ).fetchone()
        name = f"payload {digest} of event {seq}"
        if not self._stands("payloads", seq, digest, row):
            return
        _, salt, data = row
        if not (isinstance(salt, bytes) and isinstance(data, bytes)):
            self._findings.add("payload", seq, f"{name}: salt or data is not a blob")
        elif salted_digest(salt, data) != digest:
            self._findings.add("payload", seq, f"{name}: salt or data was changed")
        elif len(data) != size:
            self._findings.add("payload", seq, f"{name}: {len(data)} bytes, recorded were {size}")

    def _check_artifact(self, seq: int, event: e.ArtifactStored) -> None:
        row = self._connection.execute(
            "SELECT seq, salt, file, size FROM artifacts WHERE digest = ?", (event.digest,)
        ).fetchone()
        name = f"artifact {event.name} ({event.digest}) of event {seq}"
        if not self._stands("artifacts", seq, event.digest, row):
            return
        _, salt, file, size = row
        if size != event.size:
            what = f"{name}: its row says {size!a} bytes, recorded were {event.size}"
            self._findings.add("artifact", seq, what)
        if not (isinstance(salt, bytes) and _is_file_name(file)):
            self._findings.add("artifact", seq, f"{name}: salt or file of its row was changed")
        elif self._artifacts is not None:
            problem = _file_problem(self._artifacts, file, salt, event)
            if problem is not None:
                self._findings.add("artifact", seq, f"{name}: {problem}")

    # Any: a row as SQLite answers it; None when there is none.
    def _stands(self, table: str, seq: int, digest: str, row: tuple[Any, ...] | None) -> bool:
        """Answer whether a row is there and has its place; accuse where it should and has not."""
        kind, what = _named(table)
        erased_at = self._walked.erased.get(digest)
        if row is None:
            if erased_at is None:
                text = f"{what} {digest} of event {seq} is missing, and no event says it was erased"
                self._findings.add(kind, seq, text)
            return False
        if row[0] == seq:
            self._rows_named[table] += 1
            if erased_at is not None and erased_at > seq:
                text = f"{what} {digest} is there, although event {erased_at} says it was erased"
                self._findings.add(kind, erased_at, text)
        elif not self._names(row[0], table, digest):
            text = f"{what} {digest} of event {seq}: its row says it came with event {row[0]!a}"
            self._findings.add(kind, seq, text)
        return True

    def _names(self, seq: object, table: str, digest: str) -> bool:
        """Answer whether the event at ``seq`` names the digest."""
        if not isinstance(seq, int):
            return False
        found = self._connection.execute("SELECT body FROM events WHERE seq = ?", (seq,)).fetchone()
        if found is None or not isinstance(found[0], bytes):
            return False
        try:
            event = recorded(found[0], b"", seq).event
        except EventUnreadable:
            return False
        if table == "payloads":
            return digest in refs_of(event)
        return isinstance(event, e.ArtifactStored) and event.digest == digest

    def _find_orphans(self, table: str) -> None:
        (rows,) = self._connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608
        if rows == self._rows_named[table]:
            return
        kind, what = _named(table)
        for digest, seq in self._connection.execute(f"SELECT digest, seq FROM {table}"):  # noqa: S608
            if seq not in self._walked.bad_seqs and not self._names(seq, table, digest):
                past = isinstance(seq, int) and seq > self._walked.head
                text = f"{what} {digest!a} says it came with event {seq!a}, which does not name it"
                self._findings.add("cut" if past else kind, seq if past else None, text)


def refs_of(event: e.AnyEvent) -> dict[str, int]:
    """Answer digest and size of the payloads that an event names."""
    values = (getattr(event, name) for name in event.__struct_fields__)
    return {value.digest: value.size for value in values if isinstance(value, e.PayloadRef)}


def _named(table: str) -> tuple[Any, str]:
    return ("payload", "payload") if table == "payloads" else ("artifact", "artifact")


def _is_file_name(file: object) -> bool:
    return isinstance(file, str) and len(file) == 64 and set(file) <= set("0123456789abcdef")


def _file_problem(folder: Path, file: str, salt: bytes, event: e.ArtifactStored) -> str | None:
    path = folder / file[:2] / file
    if not path.is_file():
        return f"its file {file} is missing"
    plain, salted = hashlib.sha256(), hashlib.sha256(salt)
    size = 0
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                plain.update(chunk)
                salted.update(chunk)
                size += len(chunk)
    except OSError as error:
        return f"its file {file} can not be read: {error.strerror}"
    if plain.hexdigest() != file:
        return f"its file {file} was changed"
    if salted.hexdigest() != event.digest:
        return "its row was changed: salt and file do not make its digest"
    if size != event.size:
        return f"its file has {size} bytes, recorded were {event.size}"
    return None
