"""The tables of the log's file, their migrations, and the connections to it.

``events``, ``tiles``, ``payloads``, ``artifacts`` and ``meta`` are the truth. ``jobs``,
``job_labels``, ``idempotency``, ``service_state`` and ``applied`` are projections: they can be
dropped at any time and are rebuilt from the events.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from storage.errors import LogTooNew

if TYPE_CHECKING:
    from sqlite_utils import Database
    from sqlite_utils.migrations import Migrations

SCHEMA: Final = 1
BUSY_TIMEOUT_S: Final = 10.0
CHECKPOINT_PAGES: Final = 4_000
CACHE_KIB: Final = 64 * 1024
WAL_BYTES_KEPT: Final = 64 * 1024 * 1024

TRUTH: Final = (
    """CREATE TABLE meta(
        id INTEGER PRIMARY KEY CHECK (id = 1),
        log_id TEXT NOT NULL,
        schema INTEGER NOT NULL
    )""",
    """CREATE TABLE events(
        seq INTEGER PRIMARY KEY,
        stream TEXT NOT NULL,
        version INTEGER NOT NULL,
        type TEXT NOT NULL,
        recorded_at_ns INTEGER NOT NULL,
        session TEXT NOT NULL,
        body BLOB NOT NULL,
        leaf BLOB NOT NULL,
        UNIQUE (stream, version)
    )""",
    """CREATE TABLE payloads(
        digest TEXT PRIMARY KEY,
        seq INTEGER NOT NULL,
        salt BLOB NOT NULL,
        data BLOB NOT NULL
    )""",
    """CREATE TABLE artifacts(
        digest TEXT PRIMARY KEY,
        seq INTEGER NOT NULL,
        salt BLOB NOT NULL,
        file TEXT NOT NULL,
        size INTEGER NOT NULL
    )""",
    "CREATE INDEX artifacts_file ON artifacts(file)",
    """CREATE TABLE tiles(
        level INTEGER NOT NULL,
        idx INTEGER NOT NULL,
        root BLOB NOT NULL,
        PRIMARY KEY (level, idx)
    ) WITHOUT ROWID""",
    """CREATE TRIGGER events_keep_update BEFORE UPDATE ON events
        BEGIN SELECT RAISE(ABORT, 'events are never changed'); END""",
    """CREATE TRIGGER events_keep_delete BEFORE DELETE ON events
        BEGIN SELECT RAISE(ABORT, 'events are never deleted'); END""",
)

PROJECTIONS: Final = (
    """CREATE TABLE IF NOT EXISTS jobs(
        submitted_seq INTEGER PRIMARY KEY,
        job_id TEXT NOT NULL UNIQUE,
        created_at_ns INTEGER NOT NULL,
        owner TEXT NOT NULL,
        agent TEXT NOT NULL,
        priority INTEGER NOT NULL,
        status TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        last_seq INTEGER NOT NULL,
        quarantined INTEGER NOT NULL,
        workspace_epoch INTEGER NOT NULL
    )""",
    """CREATE INDEX IF NOT EXISTS jobs_unfinished ON jobs(submitted_seq)
        WHERE status IN ('queued', 'running')""",
    """CREATE INDEX IF NOT EXISTS jobs_queue ON jobs(priority DESC, submitted_seq)
        WHERE status = 'queued'""",
    "CREATE INDEX IF NOT EXISTS jobs_status ON jobs(status, submitted_seq)",
    "CREATE INDEX IF NOT EXISTS jobs_agent ON jobs(agent, submitted_seq)",
    "CREATE INDEX IF NOT EXISTS jobs_owner ON jobs(owner, submitted_seq)",
    """CREATE TABLE IF NOT EXISTS job_labels(
        name TEXT NOT NULL,
        value TEXT NOT NULL,
        submitted_seq INTEGER NOT NULL,
        PRIMARY KEY (name, value, submitted_seq)
    ) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS job_labels_job ON job_labels(submitted_seq)",
    """CREATE TABLE IF NOT EXISTS idempotency(
        key TEXT PRIMARY KEY,
        job_id TEXT NOT NULL
    ) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS service_state(
        id INTEGER PRIMARY KEY CHECK (id = 1),
        state TEXT NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS applied(
        id INTEGER PRIMARY KEY CHECK (id = 1),
        seq INTEGER NOT NULL
    )""",
)
PROJECTION_TABLES: Final = ("jobs", "job_labels", "idempotency", "service_state", "applied")


def connect_writer(
    path: Path, *, connection_class: type[sqlite3.Connection] = sqlite3.Connection
) -> sqlite3.Connection:
    """Open the file for writing, made if missing: WAL, full sync, secure delete, no autocommit.

    The connection may move between threads; one thread at a time uses it.
    """
    connection = sqlite3.connect(
        path,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        factory=connection_class,
    )
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        for pragma in (
            "synchronous=FULL",
            "secure_delete=ON",
            f"wal_autocheckpoint={CHECKPOINT_PAGES}",
            f"journal_size_limit={WAL_BYTES_KEPT}",
            f"cache_size=-{CACHE_KIB}",
        ):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open an existing file for reading only; raises FileNotFoundError."""
    if not path.exists():
        raise FileNotFoundError(path)
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA query_only=ON")
    return connection


def schema_of(connection: sqlite3.Connection) -> int:
    """Answer the schema number of a file; 0 for one without a log."""
    if not _has_table(connection, "meta"):
        return 0
    row = connection.execute("SELECT schema FROM meta WHERE id = 1").fetchone()
    return int(row[0]) if row else 0


def log_id_of(connection: sqlite3.Connection) -> str:
    """Answer the random id that the log was born with."""
    row = connection.execute("SELECT log_id FROM meta WHERE id = 1").fetchone()
    assert row is not None, "a migrated log has its id"
    return str(row[0])


def check_schema(connection: sqlite3.Connection) -> int:
    """Answer the schema number; raises LogTooNew when it is past what this code knows."""
    found = schema_of(connection)
    if found > SCHEMA:
        raise LogTooNew(found, SCHEMA)
    return found


def migrate(connection: sqlite3.Connection, new_log_id: Callable[[], str]) -> None:
    """Bring the file to today's schema; ``new_log_id`` is asked if the log is born here.

    Does nothing, and imports nothing, when the schema is current.
    """
    if check_schema(connection) == SCHEMA:
        return
    # It costs an eighth of a second to import, and most starts have nothing to migrate.
    from sqlite_utils import Database

    _migrations(new_log_id).apply(Database(connection))


def ensure_projection_tables(connection: sqlite3.Connection) -> None:
    """Create those projection tables and indexes that somebody dropped."""
    for statement in PROJECTIONS:
        connection.execute(statement)


def missing_projection_tables(connection: sqlite3.Connection) -> list[str]:
    """Answer the projection tables that are not there."""
    return [name for name in PROJECTION_TABLES if not _has_table(connection, name)]


def _migrations(new_log_id: Callable[[], str]) -> "Migrations":
    from sqlite_utils.migrations import Migrations

    migrations = Migrations("watchkeeper")

    @migrations(name="0001_log")
    def _log(database: "Database") -> None:
        for statement in (*TRUTH, *PROJECTIONS):
            database.conn.execute(statement)
        database.conn.execute(
            "INSERT INTO meta(id, log_id, schema) VALUES (1, ?, 1)", (new_log_id(),)
        )

    return migrations


def _has_table(connection: sqlite3.Connection, name: str) -> bool:
    found = connection.execute(
        "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)
    ).fetchone()
    return found is not None
