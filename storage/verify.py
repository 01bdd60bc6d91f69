"""The whole check of a log: rows, tree, streams, what lies beside them, and the projections.

It believes nothing that the service believes: it opens the file by itself, read-only, reads
every row in one snapshot, and folds every stream. Memory is bounded by one stream and by what
was erased, not by the length of the log.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

import attrs

from storage.errors import LogTooNew
from storage.findings import Finding, FindingKind, Findings
from storage.merkle import EMPTY_ROOT
from storage.schema import SCHEMA
from storage.verify_events import EventWalk, Walked
from storage.verify_projections import ProjectionCheck
from storage.verify_streams import StreamWalk

__all__ = ["Finding", "FindingKind", "VerifyReport", "parse_root", "verify"]

_BUSY_TIMEOUT_S: Final = 10.0
_FAULTS_SHOWN: Final = 10
_NOT_ABOUT_THE_FILE: Final = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_AUTH,
    }
)
_EDITS: Final = ("NULL value in", "non-unique entry in", "CHECK constraint failed")


@attrs.frozen(kw_only=True)
class VerifyReport:
    """What a check found; ``size`` events with the Merkle root ``root`` (hex).

    ``head_seq`` is the newest seq, 0 for an empty log. ``torn`` true: the file itself is not a
    whole database (a copy made while the service wrote), and the rest is what could be read.
    """

    size: int
    root: str
    head_seq: int
    findings: tuple[Finding, ...]
    torn: bool

    @property
    def ok(self) -> bool:
        """Whether nothing contradicts anything."""
        return not self.findings and not self.torn


def verify(db: Path, artifacts: Path | None, root: tuple[int, bytes] | None = None) -> VerifyReport:
    """Check all of a log; blocks for as long as it takes to read it.

    ``artifacts`` is the folder of artifact files, None leaves their contents unchecked. ``root``
    is (size, hash) noted earlier: the log must still begin with just these events. Without it a
    cut of the newest rows that was made everywhere can not be seen. Safe beside a running
    service. Raises FileNotFoundError, LogTooNew, and sqlite3.OperationalError when the file can
    not be opened.
    """
    if not db.exists():
        raise FileNotFoundError(db)
    findings = Findings()
    walked = Walked()
    try:
        with closing(_connect(db)) as connection:
            connection.execute("BEGIN")
            torn = _torn(connection, findings)
            _check_schema(connection, findings)
            walked = EventWalk(connection, findings, root).run()
            _check_rest(connection, findings, walked, artifacts)
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _NOT_ABOUT_THE_FILE:
            raise
        findings.add("file", None, f"SQLite says: {error}")
        torn = True
    return VerifyReport(
        size=walked.size,
        root=walked.root.hex(),
        head_seq=walked.head,
        findings=findings.all(),
        torn=torn,
    )


def parse_root(text: str) -> tuple[int, bytes]:
    """Answer size and hash of ``SIZE:HASH``, as it is printed; raises ValueError."""
    size, _, digest = text.strip().partition(":")
    root = bytes.fromhex(digest)
    if not (size.isascii() and size.isdigit()) or len(root) != len(EMPTY_ROOT):
        message = f"{text!r} is not SIZE:HASH, a number and 64 hexadecimal digits"
        raise ValueError(message)
    return int(size), root


def _check_rest(
    connection: sqlite3.Connection, findings: Findings, walked: Walked, artifacts: Path | None
) -> None:
    projections = ProjectionCheck(connection, findings)
    streams = StreamWalk(connection, findings, walked, artifacts, projections.stream_ended)
    streams.run()
    projections.log_ended(streams.service, walked.head)
    row = connection.execute("SELECT log_id FROM meta").fetchone()
    log_id = None if row is None else row[0]
    if streams.log_ids - {log_id}:
        what = f"the log calls itself {log_id!a}, its events {sorted(streams.log_ids)}"
        findings.add("meta", None, what)


def _check_schema(connection: sqlite3.Connection, findings: Findings) -> None:
    for (schema,) in connection.execute("SELECT schema FROM meta"):
        if isinstance(schema, int) and schema > SCHEMA:
            raise LogTooNew(schema, SCHEMA)
        if not isinstance(schema, int) or schema < 1:
            findings.add("meta", None, f"the log says that it has schema {schema!a}")


def _connect(db: Path) -> sqlite3.Connection:
    address = f"{db.absolute().as_uri()}?mode=ro"
    wal = db.with_name(f"{db.name}-wal")
    try:
        return _opened(address)
    except sqlite3.OperationalError:
        # On a read-only medium SQLite can not make the shared memory that a WAL file needs.
        if wal.exists() and wal.stat().st_size:
            raise
        return _opened(f"{address}&immutable=1")


def _opened(address: str) -> sqlite3.Connection:
    connection = sqlite3.connect(address, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    try:
        connection.execute("PRAGMA query_only=ON")
        connection.execute("PRAGMA schema_version").fetchone()
    except BaseException:
        connection.close()
        raise
    # An edited text may hold any bytes; it must be compared, not be refused.
    connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    return connection


def _torn(connection: sqlite3.Connection, findings: Findings) -> bool:
    """Answer whether pages contradict each other; what an edit can do is not counted here."""
    faults = [
        str(fault)
        for (fault,) in connection.execute(f"PRAGMA integrity_check({_FAULTS_SHOWN})")
        if fault != "ok" and not str(fault).startswith(_EDITS)
    ]
    for fault in faults:
        findings.add("file", None, f"SQLite says: {fault}")
    return bool(faults)
