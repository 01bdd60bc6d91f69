"""Group commit: the one thread that writes, one transaction for all requests that wait."""

import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

import attrs
import trio

from storage.batch import Batch, Prepared, Tip
from storage.errors import AppendRefused, DiskFull, LogBusy, OutcomeUnknown
from storage.event_log import Recorded
from storage.log_reader import job_of_key
from storage.projection_store import load_row, write_projections
from storage.projections import JobRow, ServiceState

BATCH_REQUESTS_MAX: Final = 512
HALVED_FROM_REQUESTS: Final = 32
ERASURE_RETRY_S: Final = 0.25

Answer = tuple[Recorded, ...] | AppendRefused | OutcomeUnknown

_PUT_PAYLOAD: Final = "INSERT OR IGNORE INTO payloads(digest, seq, salt, data) VALUES (?,?,?,?)"
_PUT_ARTIFACT: Final = (
    "INSERT OR IGNORE INTO artifacts(digest, seq, salt, file, size) VALUES (?,?,?,?,?)"
)
_PUT_TILE: Final = "INSERT INTO tiles(level, idx, root) VALUES (?,?,?)"
_PUT_EVENT: Final = (
    "INSERT INTO events(seq, stream, version, type, recorded_at_ns, session, body, leaf)"
    " VALUES (?,?,?,?,?,?,?,?)"
)


class Ticket:
    """A request on its way to the writer, and the task that waits for its answer."""

    __slots__ = ("answer", "prepared", "task")

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.task = trio.lowlevel.current_task()
        self.answer: Answer | None = None


@attrs.frozen(kw_only=True)
class Delivery:
    """One batch on its way back: its answered tickets, and what it added to the log."""

    tickets: Sequence[Ticket]
    records: Sequence[Recorded]
    service: ServiceState


class ConnectionSource:
    """Looks committed facts up on the writer's own connection, inside its transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def stream_head(self, stream: str) -> tuple[int, str | None]:
        """Answer version and leaf of a stream's newest event; (0, None) without one."""
        row = self._connection.execute(
            "SELECT version, leaf FROM events WHERE stream = ? ORDER BY version DESC LIMIT 1",
            (stream,),
        ).fetchone()
        return (0, None) if row is None else (int(row[0]), bytes(row[1]).hex())

    def job_row(self, job_id: str) -> JobRow | None:
        """Answer the row of a job; None when there is no such job."""
        return load_row(self._connection, job_id)

    def job_of_key(self, key: str) -> str | None:
        """Answer the job of an idempotency key; None when the key is new."""
        return job_of_key(self._connection, key)


class Writer:
    """Owns the write connection from :meth:`start` until :meth:`stop` has returned.

    ``deliver`` is called in the trio thread, once a batch, in commit order. ``die`` is called in
    the writer's thread, when it can not be known whether a batch is durable; a ``die`` that
    comes back (a test's) leaves a writer that answers OutcomeUnknown to everything.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        tip: Tip,
        *,
        session: str,
        clock_ns: Callable[[], int],
        die: Callable[[str], NoReturn],
        ballast: Path | None,
        deliver: Callable[[Delivery], None],
    ) -> None:
        self._connection = connection
        self._source = ConnectionSource(connection)
        self._tip = tip
        self._session = session
        self._clock_ns = clock_ns
        self._die = die
        self._ballast = ballast
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._poisoned: str | None = None
        self._erasure_pending = False
        self._submitted = 0
        self._answered = 0
        self._held: Delivery | None = None
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._token: trio.lowlevel.TrioToken | None = None

    def start(self) -> None:
        """Start the thread; call in the trio thread."""
        self._token = trio.lowlevel.current_trio_token()
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Queue a request; the caller bounds how many are under way. Never waits."""
        self._submitted += 1
        self._inbox.put(ticket)

    def stop(self) -> None:
        """Commit what is queued and end the thread; blocks, so call it in a worker thread."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        going_on = True
        while going_on:
            tickets, going_on = self._next_batch()
            if tickets:
                delivery = self._answer(tickets)
                self._hand_back_held()
                self._held = delivery
            if self._inbox.empty() or not going_on:
                self._hand_back_held()
            if self._erasure_pending:
                self._truncate_wal()

    def _next_batch(self) -> tuple[list[Ticket], bool]:
        """Answer the next requests, and whether more may come; waits for the first one."""
        tickets: list[Ticket] = []
        try:
            ticket = self._inbox.get(timeout=ERASURE_RETRY_S if self._erasure_pending else None)
            while ticket is not None:
                tickets.append(ticket)
                if len(tickets) >= self._requests_max():
                    return tickets, True
                ticket = self._inbox.get_nowait()
        except queue.Empty:
            return tickets, True
        return tickets, False

    def _requests_max(self) -> int:
        # Half of what is under way: while one half is being synced, which needs no interpreter,
        # the tasks of the other half hear their answers and append again.
        under_way = self._submitted - self._answered
        if under_way < HALVED_FROM_REQUESTS:
            return BATCH_REQUESTS_MAX
        return min(BATCH_REQUESTS_MAX, (under_way + 1) // 2)

    def _hand_back_held(self) -> None:
        delivery, self._held = self._held, None
        if delivery is not None:
            self._answered += len(delivery.tickets)
            self._hand_back(delivery)

    def _hand_back(self, delivery: Delivery) -> None:
        assert self._token is not None, "the writer was started"
        try:
            self._token.run_sync_soon(self._deliver, delivery)
        except trio.RunFinishedError:
            # Nobody is left to hear it; what was committed stays committed.
            return

    def _answer(self, tickets: list[Ticket]) -> Delivery:
        records: Sequence[Recorded] = ()
        try:
            if self._poisoned is None:
                records = self._write_or_refuse(tickets)
        except Exception as error:  # noqa: BLE001  a border: whatever it is, the outcome is unknown
            self._poison(f"the log's outcome is unknown: {type(error).__name__}: {error}")
        if self._poisoned is not None:
            records = ()
            for ticket in tickets:
                ticket.answer = OutcomeUnknown(self._poisoned)
        return Delivery(tickets=tickets, records=records, service=self._tip.service)

    def _poison(self, reason: str) -> None:
        self._poisoned = reason
        try:
            self._die(reason)
        except BaseException:  # noqa: BLE001  a test's stand-in raises; the real one never returns
            return

    def _write_or_refuse(self, tickets: list[Ticket]) -> Sequence[Recorded]:
        """Commit the batch; fill the tickets' answers. Raises what leaves the outcome unknown."""
        busy = False
        for _ in range(2):
            try:
                return self._write(tickets)
            except sqlite3.OperationalError as error:
                code = error.sqlite_errorcode & 0xFF
                busy = code == sqlite3.SQLITE_BUSY and not self._connection.in_transaction
                if code != sqlite3.SQLITE_FULL and not busy:
                    raise
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                if busy or not self._free_ballast():
                    break
        for ticket in tickets:
            if not isinstance(ticket.answer, AppendRefused):
                ticket.answer = LogBusy(len(tickets)) if busy else DiskFull()
        return ()

    def _write(self, tickets: list[Ticket]) -> Sequence[Recorded]:
        self._connection.execute("BEGIN IMMEDIATE")
        batch = Batch(self._tip, self._source, session=self._session, clock_ns=self._clock_ns)
        for ticket in tickets:
            try:
                ticket.answer = batch.add(ticket.prepared)
            except AppendRefused as error:
                ticket.answer = error
        if not batch.events:
            self._connection.execute("ROLLBACK")
            return ()
        batch.finish()
        insert_batch(self._connection, batch)
        write_projections(self._connection, batch)
        self._hand_back_held()
        self._connection.execute("COMMIT")
        self._tip.adopt(batch)
        if batch.erased_payloads or batch.erased_artifacts:
            self._erasure_pending = True
        return batch.records

    def _free_ballast(self) -> bool:
        ballast, self._ballast = self._ballast, None
        if ballast is None:
            return False
        try:
            ballast.unlink()
        except OSError:
            return False
        return True

    def _truncate_wal(self) -> None:
        # A reader with an old snapshot keeps the log from being truncated: tried again later.
        try:
            row = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.OperationalError:
            return
        self._erasure_pending = bool(row[0])


def insert_batch(connection: sqlite3.Connection, batch: Batch) -> None:
    """Write all of a finished batch but its projections, inside a transaction."""
    connection.executemany(_PUT_EVENT, batch.events)
    if batch.payloads:
        connection.executemany(_PUT_PAYLOAD, batch.payloads)
    if batch.artifacts:
        connection.executemany(_PUT_ARTIFACT, batch.artifacts)
    if batch.tiles:
        connection.executemany(_PUT_TILE, batch.tiles)
    if batch.erased_payloads:
        connection.executemany(
            "DELETE FROM payloads WHERE digest = ?", [(d,) for d in batch.erased_payloads]
        )
    if batch.erased_artifacts:
        connection.executemany(
            "DELETE FROM artifacts WHERE digest = ?", [(d,) for d in batch.erased_artifacts]
        )
