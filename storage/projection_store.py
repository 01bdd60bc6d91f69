"""The projections in the file: written with their events, read back, and rebuilt from them."""

import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from storage import events as e
from storage.batch import CHANGES_SERVICE, Batch
from storage.codec import recorded
from storage.event_log import Recorded
from storage.ids import job_of_stream
from storage.projections import JobRow, ServiceState, evolve_row, evolve_service
from storage.schema import PROJECTION_TABLES, ensure_projection_tables

TYPES_PROJECTED: Final = tuple(cls.__struct_config__.tag for cls in CHANGES_SERVICE)
ROW_COLUMNS: Final = (
    "submitted_seq, job_id, created_at_ns, owner, agent, priority, status, epoch, last_seq,"
    " quarantined, workspace_epoch"
)
_PUT_ROW: Final = (
    "INSERT OR REPLACE INTO jobs(submitted_seq, job_id, created_at_ns, owner, agent, priority,"
    " status, epoch, last_seq, quarantined, workspace_epoch) VALUES (?,?,?,?,?,?,?,?,?,?,?)"
)
_PUT_LABEL: Final = "INSERT OR REPLACE INTO job_labels(name, value, submitted_seq) VALUES (?,?,?)"
_PUT_KEY: Final = "INSERT INTO idempotency(key, job_id) VALUES (?,?)"
_PUT_STATE: Final = "INSERT OR REPLACE INTO service_state(id, state) VALUES (1, ?)"
_PUT_APPLIED: Final = "INSERT OR REPLACE INTO applied(id, seq) VALUES (1, ?)"
_REBUILD_ROWS: Final = 10_000


def write_projections(connection: sqlite3.Connection, batch: Batch) -> None:
    """Write what a batch changes, inside its transaction."""
    if batch.rows:
        _put_rows(connection, batch.rows.values(), labels_since=batch.first_seq)
    if batch.keys:
        connection.executemany(_PUT_KEY, batch.keys.items())
    if batch.service_changed:
        connection.execute(_PUT_STATE, (encode_state(batch.service),))
    connection.execute(_PUT_APPLIED, (batch.seq,))


def load_row(connection: sqlite3.Connection, job_id: str) -> JobRow | None:
    """Answer the row of a job with its labels; None when there is no such job."""
    row = connection.execute(
        f"SELECT {ROW_COLUMNS} FROM jobs WHERE job_id = ?",  # noqa: S608  a constant
        (job_id,),
    ).fetchone()
    if row is None:
        return None
    labels = connection.execute(
        "SELECT name, value FROM job_labels WHERE submitted_seq = ? ORDER BY name", (row[0],)
    ).fetchall()
    return row_of(row, tuple((str(name), str(value)) for name, value in labels))


# Any: a row as SQLite answers it.
def row_of(row: tuple[Any, ...], labels: tuple[tuple[str, str], ...]) -> JobRow:
    """Answer the columns ``ROW_COLUMNS`` of a job as its row."""
    return JobRow(
        submitted_seq=row[0],
        job_id=row[1],
        created_at_ns=row[2],
        owner=row[3],
        agent=row[4],
        priority=row[5],
        status=row[6],
        epoch=row[7],
        last_seq=row[8],
        quarantined=bool(row[9]),
        workspace_epoch=row[10],
        labels=labels,
    )


def encode_state(state: ServiceState) -> str:
    """Answer the JSON of the service's state; its ``seq`` is that of its last change."""
    return msgspec.json.encode(state).decode()


def load_state(connection: sqlite3.Connection) -> ServiceState:
    """Answer the service's state as it was last written; the empty one when it never was."""
    row = connection.execute("SELECT state FROM service_state WHERE id = 1").fetchone()
    return ServiceState() if row is None else msgspec.json.decode(row[0], type=ServiceState)


def applied_seq(connection: sqlite3.Connection) -> int:
    """Answer the seq up to which the projections have been brought; 0 for none."""
    row = connection.execute("SELECT seq FROM applied WHERE id = 1").fetchone()
    return 0 if row is None else int(row[0])


def rebuild_projections(connection: sqlite3.Connection) -> ServiceState:
    """Drop the projections and fold them anew, in one transaction; answer the service's state.

    Reads every event that a projection depends on: seconds for a million events.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        for table in PROJECTION_TABLES:
            connection.execute(f"DROP TABLE IF EXISTS {table}")
        ensure_projection_tables(connection)
        state = _rebuild(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return state


def fold_state(connection: sqlite3.Connection, upto: int) -> ServiceState:
    """Answer the service's state at a seq, folded from the events alone."""
    state = ServiceState()
    rows: dict[str, JobRow | None] = {}
    for record in projected_events(connection, upto):
        before = rows.get(record.stream)
        rows[record.stream] = after = evolve_row(before, record)
        state = evolve_service(state, record, before, after)
    return state


def projected_events(connection: sqlite3.Connection, upto: int) -> Iterator[Recorded]:
    """Answer, in order, the events up to a seq that a projection depends on."""
    marks = ",".join("?" * len(TYPES_PROJECTED))
    cursor = connection.execute(
        f"SELECT seq, body, leaf FROM events WHERE seq <= ? AND type IN ({marks}) ORDER BY seq",  # noqa: S608
        (upto, *TYPES_PROJECTED),
    )
    for seq, body, leaf in cursor:
        yield recorded(body, leaf, seq)


def _rebuild(connection: sqlite3.Connection) -> ServiceState:
    head = int(connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0])
    state = ServiceState()
    live: dict[str, JobRow] = {}
    for record in projected_events(connection, head):
        job_id = job_of_stream(record.stream)
        before = None
        if job_id is not None and not isinstance(record.event, e.JobSubmitted):
            before = live.get(job_id) or load_row(connection, job_id)
        after = evolve_row(before, record)
        state = evolve_service(state, record, before, after)
        if after is not None:
            live[after.job_id] = after
        if isinstance(record.event, e.JobSubmitted) and record.event.idempotency is not None:
            connection.execute(_PUT_KEY, (record.event.idempotency.key, job_id))
        if len(live) >= _REBUILD_ROWS:
            _put_rows(connection, live.values(), labels_since=0)
            live.clear()
    _put_rows(connection, live.values(), labels_since=0)
    connection.execute(_PUT_STATE, (encode_state(state),))
    connection.execute(_PUT_APPLIED, (head,))
    return state


def _put_rows(connection: sqlite3.Connection, rows: Iterable[JobRow], *, labels_since: int) -> None:
    rows = list(rows)
    connection.executemany(_PUT_ROW, [_columns(row) for row in rows])
    labels = [
        (name, value, row.submitted_seq)
        for row in rows
        if row.labels and row.submitted_seq >= labels_since
        for name, value in row.labels
    ]
    if labels:
        connection.executemany(_PUT_LABEL, labels)


def _columns(row: JobRow) -> tuple[int | str, ...]:
    return (
        row.submitted_seq,
        row.job_id,
        row.created_at_ns,
        row.owner,
        row.agent,
        row.priority,
        row.status,
        row.epoch,
        row.last_seq,
        int(row.quarantined),
        row.workspace_epoch,
    )
