"""The audit's comparison of the projections in the file with what the events fold to."""

import sqlite3
from typing import Any, Final

import attrs
import msgspec

from storage.findings import Findings
from storage.projections import JobRow, ServiceState
from storage.verify_streams import Stream

_ROW_COLUMNS: Final = (
    "submitted_seq",
    "job_id",
    "created_at_ns",
    "owner",
    "agent",
    "priority",
    "status",
    "epoch",
    "last_seq",
    "quarantined",
    "workspace_epoch",
)
_SELECT_ROW: Final = f"SELECT {', '.join(_ROW_COLUMNS)} FROM jobs WHERE job_id = ?"  # noqa: S608
_TABLES: Final = ("jobs", "job_labels", "idempotency", "service_state", "applied")


class ProjectionCheck:
    """Compares as streams end; a table that was dropped is no damage and is not compared."""

    def __init__(self, connection: sqlite3.Connection, findings: Findings) -> None:
        self._connection = connection
        self._findings = findings
        self._there = {
            str(row[0])
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        } & set(_TABLES)
        self._matched = dict.fromkeys(("jobs", "job_labels", "idempotency"), 0)
        self._whole = True

    def stream_ended(self, stream: Stream) -> None:
        """Compare the rows of one job; a damaged stream is left out."""
        if not stream.whole:
            self._whole = False
        elif stream.row is not None and stream.job is not None:
            self._check_row(stream.row)
            self._check_labels(stream.row)
            submitted = stream.job.submitted
            if submitted.idempotency is not None:
                self._check_key(stream.row, submitted.idempotency.key)

    def log_ended(self, service: ServiceState, head: int) -> None:
        """Compare what is about the whole log, once all streams were seen."""
        applied = self._check_applied(head)
        if not self._whole:
            return
        for table, matched in self._matched.items():
            if table in self._there:
                self._check_count(table, matched)
        if "service_state" in self._there and applied:
            self._check_service(service)

    def _check_row(self, row: JobRow) -> None:
        if "jobs" not in self._there:
            return
        found = self._connection.execute(_SELECT_ROW, (row.job_id,)).fetchone()
        if found is None:
            self._accuse(row.submitted_seq, f"{row.job_id} is not in the list of jobs")
            return
        self._matched["jobs"] += 1
        for name, value in zip(_ROW_COLUMNS, found, strict=True):
            expected = getattr(row, name)
            if value != expected or isinstance(value, float):
                what = f"{row.job_id}: {name} is {value!a}, the events fold to {expected!a}"
                self._accuse(row.submitted_seq, what)

    def _check_labels(self, row: JobRow) -> None:
        if "job_labels" not in self._there:
            return
        found = self._connection.execute(
            "SELECT name, value FROM job_labels WHERE submitted_seq = ? ORDER BY name, value",
            (row.submitted_seq,),
        ).fetchall()
        self._matched["job_labels"] += len(found)
        if tuple(found) != row.labels:
            what = f"{row.job_id}: its labels are {found!a}, its submission says {row.labels!a}"
            self._accuse(row.submitted_seq, what)

    def _check_key(self, row: JobRow, key: str) -> None:
        if "idempotency" not in self._there:
            return
        found = self._connection.execute(
            "SELECT job_id FROM idempotency WHERE key = ?", (key,)
        ).fetchone()
        self._matched["idempotency"] += found is not None
        if found is None:
            self._accuse(row.submitted_seq, f"{row.job_id}: its idempotency key is missing")
        elif found[0] != row.job_id:
            what = f"the idempotency key of {row.job_id} leads to {found[0]!a}"
            self._accuse(row.submitted_seq, what)

    def _check_count(self, table: str, matched: int) -> None:
        (rows,) = self._connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608
        if rows != matched:
            self._accuse(None, f"table {table} has {rows} rows, the events make {matched}")

    def _check_applied(self, head: int) -> bool:
        """Answer whether the projections say that they are of the head."""
        if "applied" not in self._there:
            return False
        rows = self._connection.execute("SELECT seq FROM applied").fetchall()
        applied = rows[0][0] if rows else 0
        if isinstance(applied, int) and applied > head:
            what = f"the projections have seen event {applied}, the log ends at {head}"
            self._findings.add("cut", head + 1, what)
        elif applied != head:
            self._accuse(None, f"the projections stop at {applied!a}, the log ends at {head}")
        return bool(applied == head)

    def _check_service(self, service: ServiceState) -> None:
        rows = self._connection.execute("SELECT state FROM service_state").fetchall()
        if not rows and service == ServiceState():
            return
        try:
            found = msgspec.json.decode(rows[0][0] if rows else "null", type=dict[str, object])
        except (msgspec.DecodeError, UnicodeError, TypeError):
            self._accuse(None, "the state of the service can not be read")
            return
        # Any: JSON of whatever stands there now.
        expected: dict[str, Any] = attrs.asdict(service)
        for name in sorted(expected.keys() | found.keys()):
            if found.get(name) != expected.get(name):
                what = (
                    f"the service's {name} is {found.get(name)!a}, the events fold to"
                    f" {expected.get(name)!a}"
                )
                self._accuse(None, what)

    def _accuse(self, seq: int | None, what: str) -> None:
        self._findings.add("projection", seq, what)
