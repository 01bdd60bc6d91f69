"""The event log in a SQLite file."""

import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Concatenate, Final, NoReturn, ParamSpec, TypeVar

import attrs
import trio

from storage import log_reader
from storage.batch import Prepared, Tip
from storage.errors import LogBusy, LogClosed, LogDamaged, LogReadOnly, PointNotInLog
from storage.event_log import (
    EVENTS_PER_PAGE_MAX,
    Append,
    JobQuery,
    Payload,
    Recorded,
    StoredArtifact,
)
from storage.ids import IdSource, Seq, StreamName
from storage.log_check import TailCheck, check_tail
from storage.projection_store import applied_seq, fold_state, load_state, rebuild_projections
from storage.projections import ServiceState
from storage.schema import (
    check_schema,
    connect_reader,
    connect_writer,
    ensure_projection_tables,
    log_id_of,
    migrate,
    missing_projection_tables,
)
from storage.subscription import Feed, following, wait_past
from storage.writer import Delivery, Ticket, Writer

READERS_MAX: Final = 4
PENDING_MAX: Final = 1_024

P = ParamSpec("P")
T = TypeVar("T")


@attrs.frozen(kw_only=True)
class _Opened:
    connection: sqlite3.Connection
    log_id: str
    check: TailCheck
    service: ServiceState
    read_only: str | None


class _Readers:
    """A small pool of read connections, each used by one worker thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._limiter = trio.CapacityLimiter(READERS_MAX)
        self._idle: list[sqlite3.Connection] = []
        self._closed = False

    async def ask(
        self,
        question: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        if self._closed:
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise LogClosed

        def in_thread() -> T:
            connection = self._idle.pop() if self._idle else connect_reader(self._path)
            try:
                return question(connection, *args, **kwargs)
            finally:
                self._idle.append(connection)

        return await trio.to_thread.run_sync(in_thread, limiter=self._limiter)

    async def aclose(self) -> None:
        """Refuse new questions, wait for those under way, close the connections."""
        self._closed = True
        for number in range(READERS_MAX):
            await self._limiter.acquire_on_behalf_of((self, number))
        while self._idle:
            self._idle.pop().close()


class SqliteEventLog:
    """The log of the service: see :class:`storage.event_log.EventLog` for its promises."""

    def __init__(
        self,
        path: Path,
        opened: _Opened,
        *,
        clock_ns: Callable[[], int],
        session: str,
        die: Callable[[str], NoReturn],
        pending_max: int,
        ballast: Path | None,
    ) -> None:
        assert pending_max > 0, "somebody may append"
        self.damage: LogDamaged | None = opened.check.damage
        self._log_id = opened.log_id
        self._read_only = opened.read_only
        self._service = attrs.evolve(opened.service, seq=opened.check.head)
        self._feed = Feed(opened.check.head)
        self._readers = _Readers(path)
        self._connection = opened.connection
        self._pending = 0
        self._pending_max = pending_max
        self._closed = False
        self._released = trio.Event()
        self._writer: Writer | None = None
        if self._read_only is None:
            tip = Tip(
                seq=opened.check.head,
                recorded_at_ns=opened.check.recorded_at_ns,
                frontier=opened.check.frontier,
                service=opened.service,
            )
            self._writer = Writer(
                opened.connection,
                tip,
                session=session,
                clock_ns=clock_ns,
                die=die,
                ballast=ballast,
                deliver=self._deliver,
            )
            self._writer.start()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        path: Path,
        *,
        ids: IdSource,
        clock_ns: Callable[[], int],
        session: str,
        die: Callable[[str], NoReturn],
        pending_max: int = PENDING_MAX,
        read_only: bool = False,
        ballast: Path | None = None,
        pages_max: int | None = None,
        connection_class: type[sqlite3.Connection] = sqlite3.Connection,
    ) -> "AsyncIterator[SqliteEventLog]":
        """Open the file, made if missing, check its end, and close it at the end of the block.

        A log that contradicts itself is opened all the same, for reading: see ``damage``. A
        full disk opens it for reading, too. ``ballast`` is a file that is removed once, when
        the disk is full, to make room. ``pages_max`` bounds the file's pages; None leaves it to
        the disk. ``connection_class`` is a seam for tests. Raises LogTooNew, FileNotFoundError
        (a missing file, ``read_only``).
        """
        limiter = trio.CapacityLimiter(1)
        opened = await trio.to_thread.run_sync(
            lambda: _open(path, ids, connection_class, pages_max, read_only=read_only),
            limiter=limiter,
        )
        log = cls(
            path,
            opened,
            clock_ns=clock_ns,
            session=session,
            die=die,
            pending_max=pending_max,
            ballast=ballast,
        )
        try:
            yield log
        finally:
            await log.aclose()

    @property
    def log_id(self) -> str:
        """The random id that this log was born with."""
        return self._log_id

    @property
    def head(self) -> Seq:
        """The seq of the newest committed event; 0 for an empty log."""
        return self._feed.head

    @property
    def pending(self) -> int:
        """How many appends are under way."""
        return self._pending

    @property
    def read_only(self) -> str | None:
        """Why the log takes no appends; None when it does."""
        return self._read_only

    @property
    def service_state(self) -> ServiceState:
        """The state of the service at the head, without waiting."""
        return self._service

    async def append(self, request: Append) -> tuple[Recorded, ...]:
        """Commit and answer the recorded events; see the protocol.

        Cancellation is heeded before the request is queued, never after.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        prepared = Prepared(request)
        refusal = self._refusal()
        if refusal is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise refusal
        assert self._writer is not None, "a log that is not read-only has its writer"
        self._pending += 1
        ticket = Ticket(prepared)
        self._writer.submit(ticket)
        await trio.lowlevel.wait_task_rescheduled(_not_cancelled)
        answer = ticket.answer
        assert answer is not None, "the writer answers each ticket"
        if isinstance(answer, tuple):
            return answer
        raise answer

    async def read(
        self, stream: StreamName, *, after_version: int = 0, upto_seq: int | None = None
    ) -> list[Recorded]:
        """Answer the events of one stream in order; an unknown stream is empty."""
        upto = int(self.head) if upto_seq is None else min(upto_seq, self.head)
        held = self._feed.stream(stream, after_version)
        if held is None:
            return await self._readers.ask(log_reader.stream_events, stream, after_version, upto)
        await trio.lowlevel.checkpoint()
        return [record for record in held if record.seq <= upto]

    async def read_all(
        self, *, after: int = 0, upto: int | None = None, limit: int = EVENTS_PER_PAGE_MAX
    ) -> list[Recorded]:
        """Answer events of all streams in commit order, at most ``limit``."""
        last = int(self.head) if upto is None else min(upto, self.head)
        held = self._feed.after(after, None, limit)
        if held is None:
            return await self._readers.ask(log_reader.log_page, after, last, limit)
        await trio.lowlevel.checkpoint()
        return [record for record in held if record.seq <= last]

    async def payload(self, digest: str) -> bytes | None:
        """Answer the bytes of a payload; None when they were erased."""
        return (await self.payloads([digest])).get(digest)

    async def payload_row(self, digest: str) -> Payload | None:
        """Answer a payload with its salt; None when it was erased."""
        return await self._readers.ask(log_reader.payload_row_of, digest)

    async def payloads(self, digests: Sequence[str]) -> dict[str, bytes]:
        """Answer those of the payloads that are there."""
        return await self._readers.ask(log_reader.payloads_of, list(digests))

    async def artifact(self, digest: str) -> StoredArtifact | None:
        """Answer the row of an artifact; None when it was erased."""
        return await self._readers.ask(log_reader.artifact_of, digest)

    async def artifact_files(self) -> frozenset[str]:
        """Answer the names of all files that an artifact's row refers to."""
        return await self._readers.ask(log_reader.artifact_files)

    async def seq_at(self, at_ns: int) -> Seq:
        """Answer the last seq recorded at or before a time; 0 when there is none."""
        return await self._readers.ask(log_reader.seq_at, at_ns, int(self.head))

    async def jobs(self, query: JobQuery) -> list[tuple[Seq, str]]:
        """Answer (seq of ``job.submitted``, job id) of the jobs that match, newest first."""
        return await self._readers.ask(log_reader.jobs_matching, query, int(self.head))

    async def unfinished(self) -> list[tuple[Seq, str]]:
        """Answer (seq of ``job.submitted``, job id) of all jobs without a terminal event."""
        return await self._readers.ask(log_reader.unfinished_jobs)

    async def job_for_key(self, key: str) -> str | None:
        """Answer the job that an idempotency key (digest) belongs to; None when none does."""
        return await self._readers.ask(log_reader.job_of_key, key)

    async def read_service_state(self, at_seq: int) -> ServiceState:
        """Answer the service's state at a seq, folded from the log; raises PointNotInLog."""
        if at_seq > self.head:
            await trio.lowlevel.checkpoint()
            raise PointNotInLog(at_seq, int(self.head))
        state = await self._readers.ask(fold_state, at_seq)
        return attrs.evolve(state, seq=at_seq)

    def follow(
        self, *, stream: StreamName | None = None, after: int = 0
    ) -> AbstractAsyncContextManager[AsyncGenerator[Recorded, None]]:
        """Replay the events after a seq, then follow: no gap, no double, in order."""
        return following(self._feed, self._page, stream=stream, after=after)

    async def wait_past(self, seq: int, *, stream: StreamName | None = None) -> None:
        """Return when the head, or that stream's last event, is past ``seq``; raises LogClosed."""
        await wait_past(self._feed, self._last_seq, seq, stream)

    async def aclose(self) -> None:
        """Commit what is pending, refuse the rest, release the file. Safe to call twice."""
        with trio.CancelScope(shield=True):
            if self._closed:
                await self._released.wait()
                return
            self._closed = True
            limiter = trio.CapacityLimiter(1)
            if self._writer is not None:
                await trio.to_thread.run_sync(self._writer.stop, limiter=limiter)
            self._feed.close()
            await self._readers.aclose()
            await trio.to_thread.run_sync(self._connection.close, limiter=limiter)
            self._released.set()

    def _refusal(self) -> LogClosed | LogReadOnly | LogBusy | None:
        if self._closed:
            return LogClosed()
        if self._read_only is not None:
            return LogReadOnly(self._read_only)
        if self._pending >= self._pending_max:
            return LogBusy(self._pending_max)
        return None

    def _deliver(self, delivery: Delivery) -> None:
        self._pending -= len(delivery.tickets)
        assert self._pending >= 0, "each append is answered once"
        if delivery.records:
            self._service = attrs.evolve(delivery.service, seq=int(delivery.records[-1].seq))
            self._feed.publish(delivery.records)
        for ticket in delivery.tickets:
            trio.lowlevel.reschedule(ticket.task)

    async def _page(self, stream: StreamName | None, after: int) -> list[Recorded]:
        head = int(self.head)
        if stream is None:
            return await self._readers.ask(log_reader.log_page, after, head, EVENTS_PER_PAGE_MAX)
        return await self._readers.ask(log_reader.stream_page, stream, after, head)

    async def _last_seq(self, stream: StreamName) -> int:
        return await self._readers.ask(log_reader.last_seq_of, stream)


def _not_cancelled(_raise_cancel: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


def _open(
    path: Path,
    ids: IdSource,
    connection_class: type[sqlite3.Connection],
    pages_max: int | None,
    *,
    read_only: bool,
) -> _Opened:
    if read_only:
        return _open_for_reading(path, "it was opened for reading only")
    connection = connect_writer(path, connection_class=connection_class)
    try:
        if pages_max is not None:
            connection.execute(f"PRAGMA max_page_count={int(pages_max)}")
        migrate(connection, lambda: ids.new("log"))
        check = check_tail(connection)
        if check.damage is not None:
            connection.close()
            return _open_for_reading(path, str(check.damage))
        ensure_projection_tables(connection)
        if applied_seq(connection) == check.head:
            service = load_state(connection)
        else:
            service = rebuild_projections(connection)
        # Also the end of an erasure that a crash cut short: nothing erased stays in the WAL.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
            return _open_for_reading(path, "the disk was full at start")
        raise
    except BaseException:
        connection.close()
        raise
    return _Opened(
        connection=connection,
        log_id=log_id_of(connection),
        check=check,
        service=service,
        read_only=None,
    )


def _open_for_reading(path: Path, reason: str) -> _Opened:
    connection = connect_reader(path)
    try:
        check_schema(connection)
        check = check_tail(connection)
        current = not missing_projection_tables(connection) and (
            applied_seq(connection) == check.head
        )
        service = ServiceState()
        if current:
            service = load_state(connection)
        elif check.damage is None:
            service = fold_state(connection, check.head)
        return _Opened(
            connection=connection,
            log_id=log_id_of(connection),
            check=check,
            service=service,
            read_only=reason,
        )
    except BaseException:
        connection.close()
        raise
