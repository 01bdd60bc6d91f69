"""Questions to the log's file, each a function of a read connection, for worker threads."""

import sqlite3
from collections.abc import Sequence
from typing import Final

from storage.codec import recorded
from storage.event_log import EVENTS_PER_PAGE_MAX, JobQuery, Payload, Recorded, StoredArtifact
from storage.ids import Seq

DIGESTS_PER_QUESTION: Final = 500
QUEUED_OR_RUNNING: Final = "status IN ('queued', 'running')"


def stream_events(
    connection: sqlite3.Connection, stream: str, after_version: int, upto: int
) -> list[Recorded]:
    """Answer the events of a stream after a version, up to a seq."""
    rows = connection.execute(
        "SELECT seq, body, leaf FROM events"
        " WHERE stream = ? AND version > ? AND seq <= ? ORDER BY version",
        (stream, after_version, upto),
    )
    return [recorded(body, leaf, seq) for seq, body, leaf in rows]


def stream_page(
    connection: sqlite3.Connection, stream: str, after: int, upto: int
) -> list[Recorded]:
    """Answer a page of a stream's events with seq in (after, upto]."""
    rows = connection.execute(
        "SELECT seq, body, leaf FROM events"
        " WHERE stream = ? AND seq > ? AND seq <= ? ORDER BY version LIMIT ?",
        (stream, after, upto, EVENTS_PER_PAGE_MAX),
    )
    return [recorded(body, leaf, seq) for seq, body, leaf in rows]


def log_page(connection: sqlite3.Connection, after: int, upto: int, limit: int) -> list[Recorded]:
    """Answer at most ``limit`` events of all streams with seq in (after, upto]."""
    rows = connection.execute(
        "SELECT seq, body, leaf FROM events WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?",
        (after, upto, limit),
    )
    return [recorded(body, leaf, seq) for seq, body, leaf in rows]


def last_seq_of(connection: sqlite3.Connection, stream: str) -> int:
    """Answer the seq of a stream's newest event; 0 for an unknown stream."""
    row = connection.execute(
        "SELECT seq FROM events WHERE stream = ? ORDER BY version DESC LIMIT 1", (stream,)
    ).fetchone()
    return 0 if row is None else int(row[0])


def payloads_of(connection: sqlite3.Connection, digests: Sequence[str]) -> dict[str, bytes]:
    """Answer those of the payloads that are there."""
    found: dict[str, bytes] = {}
    for start in range(0, len(digests), DIGESTS_PER_QUESTION):
        part = digests[start : start + DIGESTS_PER_QUESTION]
        marks = ",".join("?" * len(part))
        rows = connection.execute(
            f"SELECT digest, data FROM payloads WHERE digest IN ({marks})",  # noqa: S608
            tuple(part),
        )
        found.update((str(digest), bytes(data)) for digest, data in rows)
    return found


def payload_row_of(connection: sqlite3.Connection, digest: str) -> Payload | None:
    """Answer a payload with its salt; None when it was erased."""
    row = connection.execute(
        "SELECT salt, data FROM payloads WHERE digest = ?", (digest,)
    ).fetchone()
    return None if row is None else Payload(digest=digest, salt=bytes(row[0]), data=bytes(row[1]))


def artifact_of(connection: sqlite3.Connection, digest: str) -> StoredArtifact | None:
    """Answer the row of an artifact; None when it was erased."""
    row = connection.execute(
        "SELECT digest, salt, file, size FROM artifacts WHERE digest = ?", (digest,)
    ).fetchone()
    if row is None:
        return None
    return StoredArtifact(digest=row[0], salt=row[1], file=row[2], size=row[3])


def artifact_files(connection: sqlite3.Connection) -> frozenset[str]:
    """Answer the names of all files that an artifact's row refers to."""
    rows = connection.execute("SELECT DISTINCT file FROM artifacts")
    return frozenset(str(row[0]) for row in rows)


def seq_at(connection: sqlite3.Connection, at_ns: int, head: int) -> Seq:
    """Answer the last seq recorded at or before a time; times never decrease with the seq."""
    low, high = 0, head
    while low < high:
        middle = (low + high + 1) // 2
        row = connection.execute(
            "SELECT recorded_at_ns FROM events WHERE seq = ?", (middle,)
        ).fetchone()
        if row is not None and row[0] <= at_ns:
            low = middle
        else:
            high = middle - 1
    return Seq(low)


def jobs_matching(
    connection: sqlite3.Connection, query: JobQuery, head: int
) -> list[tuple[Seq, str]]:
    """Answer (seq of submission, job id) of the jobs that match, newest first."""
    where, values = _conditions(connection, query, head)
    statuses: list[str | None] = [None]
    if query.status is not None:
        statuses = [*sorted(query.status)]
    parts: list[str] = []
    bound: list[str | int] = []
    for status in statuses:
        source, conditions, parameters = "jobs j", list(where), list(values)
        if query.label is not None:
            source = "job_labels l CROSS JOIN jobs j ON j.submitted_seq = l.submitted_seq"
            conditions += ["l.name = ?", "l.value = ?"]
            parameters += query.label
        if status is not None:
            conditions.append("j.status = ?")
            parameters.append(status)
        order = "l.submitted_seq" if query.label is not None else "j.submitted_seq"
        parts.append(
            f"SELECT * FROM (SELECT j.submitted_seq AS seq, j.job_id FROM {source}"  # noqa: S608
            f" WHERE {' AND '.join(conditions)} ORDER BY {order} DESC LIMIT ?)"
        )
        bound += [*parameters, query.limit]
    if not parts:
        return []
    text = f"{' UNION ALL '.join(parts)} ORDER BY seq DESC LIMIT ?"
    rows = connection.execute(text, (*bound, query.limit))
    return [(Seq(seq), str(job_id)) for seq, job_id in rows]


def unfinished_jobs(connection: sqlite3.Connection) -> list[tuple[Seq, str]]:
    """Answer (seq of submission, job id) of the jobs without a terminal event, oldest first."""
    rows = connection.execute(
        f"SELECT submitted_seq, job_id FROM jobs WHERE {QUEUED_OR_RUNNING} ORDER BY submitted_seq"  # noqa: S608
    )
    return [(Seq(seq), str(job_id)) for seq, job_id in rows]


def job_of_key(connection: sqlite3.Connection, key: str) -> str | None:
    """Answer the job of an idempotency key; None when the key is new."""
    row = connection.execute("SELECT job_id FROM idempotency WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def _conditions(
    connection: sqlite3.Connection, query: JobQuery, head: int
) -> tuple[list[str], list[str | int]]:
    # Times become seqs, so that a range in the past is found by the index of every order.
    upto = head if query.before is None else min(head, query.before - 1)
    after = 0
    if query.until_ns is not None:
        upto = min(upto, seq_at(connection, query.until_ns - 1, head))
    if query.since_ns is not None:
        after = seq_at(connection, query.since_ns - 1, head)
    where = ["j.submitted_seq > ?", "j.submitted_seq <= ?"]
    values: list[str | int] = [after, upto]
    if query.agent is not None:
        where.append("j.agent = ?")
        values.append(query.agent)
    if query.owner is not None:
        where.append("j.owner = ?")
        values.append(query.owner)
    return where, values
