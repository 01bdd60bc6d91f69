"""The event log in memory, for tests and simulations, and examples of every event."""

import random
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import attrs
import msgspec
import trio

from storage import events as e
from storage.batch import Batch, EventRow, Prepared, Tip
from storage.errors import (
    AppendRefused,
    LogBusy,
    LogClosed,
    OutcomeUnknown,
    PointNotInLog,
    StorageError,
)
from storage.event_log import (
    EVENTS_PER_PAGE_MAX,
    Append,
    JobQuery,
    Payload,
    Recorded,
    StoredArtifact,
)
from storage.frontier import Tile
from storage.ids import IdSource, JobId, Seq, StreamName
from storage.projections import JobRow, ServiceState, fold_service
from storage.subscription import Feed, following, wait_past

EVENT_CLASSES: Final[tuple[type[e.AnyEvent], ...]] = get_args(e.AnyEvent)


@attrs.define
class MemoryStore:
    """What a :class:`MemoryEventLog` leaves on its disk: outlives the log, as a file would."""

    log_id: str = ""
    events: list[EventRow] = attrs.Factory(list)
    records: list[Recorded] = attrs.Factory(list)
    streams: dict[str, list[Recorded]] = attrs.Factory(dict)
    tiles: list[Tile] = attrs.Factory(list)
    payloads: dict[str, Payload] = attrs.Factory(dict)
    artifacts: dict[str, StoredArtifact] = attrs.Factory(dict)
    keys: dict[str, str] = attrs.Factory(dict)
    rows: dict[str, JobRow] = attrs.Factory(dict)
    tip: Tip = attrs.Factory(Tip)

    def stream_head(self, stream: str) -> tuple[int, str | None]:
        """Answer version and leaf of a stream's newest event; (0, None) without one."""
        held = self.streams.get(stream)
        return (held[-1].version, held[-1].leaf) if held else (0, None)

    def job_row(self, job_id: str) -> JobRow | None:
        """Answer the row of a job; None when there is no such job."""
        return self.rows.get(job_id)

    def job_of_key(self, key: str) -> str | None:
        """Answer the job of an idempotency key; None when the key is new."""
        return self.keys.get(key)

    def write(self, batch: Batch) -> None:
        """Take a finished batch."""
        self.events.extend(batch.events)
        self.records.extend(batch.records)
        for record in batch.records:
            self.streams.setdefault(record.stream, []).append(record)
        self.tiles.extend(batch.tiles)
        for digest, _, salt, data in batch.payloads:
            self.payloads.setdefault(digest, Payload(digest=digest, salt=salt, data=data))
        for digest, _, salt, file, size in batch.artifacts:
            row = StoredArtifact(digest=digest, salt=salt, file=file, size=size)
            self.artifacts.setdefault(digest, row)
        for digest in batch.erased_payloads:
            self.payloads.pop(digest, None)
        for digest in batch.erased_artifacts:
            self.artifacts.pop(digest, None)
        self.keys.update(batch.keys)
        self.rows.update(batch.rows)
        self.tip.adopt(batch)


class _Waiting:
    __slots__ = ("answer", "prepared")

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.answer: tuple[Recorded, ...] | StorageError | None = None


class MemoryEventLog:
    """The same promises as the SQLite log, without threads and files, and deterministic.

    Appends that wait at the same time are one batch, as with group commit.
    """

    def __init__(
        self,
        store: MemoryStore,
        *,
        ids: IdSource,
        clock_ns: Callable[[], int],
        session: str,
        die: Callable[[str], NoReturn],
        pending_max: int = 1_024,
    ) -> None:
        assert pending_max > 0, "somebody may append"
        store.log_id = store.log_id or ids.new("log")
        self._store = store
        self._clock_ns = clock_ns
        self._session = session
        self._die = die
        self._pending_max = pending_max
        self._waiting: list[_Waiting] = []
        self._pending = 0
        self._closed = False
        self._poisoned: str | None = None
        self._failures: list[tuple[StorageError, bool]] = []
        self._service = attrs.evolve(store.tip.service, seq=store.tip.seq)
        self._feed = Feed(store.tip.seq)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        store: MemoryStore,
        *,
        ids: IdSource,
        clock_ns: Callable[[], int],
        session: str,
        die: Callable[[str], NoReturn],
        pending_max: int = 1_024,
    ) -> "AsyncIterator[MemoryEventLog]":
        """Open a log over what an earlier one left, and close it at the end of the block."""
        await trio.lowlevel.checkpoint()
        log = cls(
            store,
            ids=ids,
            clock_ns=clock_ns,
            session=session,
            die=die,
            pending_max=pending_max,
        )
        try:
            yield log
        finally:
            await log.aclose()

    @property
    def log_id(self) -> str:
        """The random id that this log was born with."""
        return self._store.log_id

    @property
    def head(self) -> Seq:
        """The seq of the newest committed event; 0 for an empty log."""
        return self._feed.head

    @property
    def pending(self) -> int:
        """How many appends are under way."""
        return self._pending

    @property
    def damage(self) -> None:
        """Memory is never damaged."""
        return

    @property
    def read_only(self) -> None:
        """Memory is never read-only."""
        return

    @property
    def service_state(self) -> ServiceState:
        """The state of the service at the head, without waiting."""
        return self._service

    def fail_next(self, error: StorageError, *, written: bool = False) -> None:
        """Let the next batch end in this error; calls are answered in their order.

        An AppendRefused writes nothing. OutcomeUnknown calls ``die``; ``written`` says whether
        the batch is in the store all the same, as the next start will find out.
        """
        self._failures.append((error, written))

    async def append(self, request: Append) -> tuple[Recorded, ...]:
        """Commit and answer the recorded events; see the protocol."""
        await trio.lowlevel.checkpoint_if_cancelled()
        waiting = _Waiting(Prepared(request))
        refusal = self._refusal()
        if refusal is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise refusal
        self._pending += 1
        self._waiting.append(waiting)
        try:
            await trio.lowlevel.cancel_shielded_checkpoint()
            if waiting.answer is None:
                self._commit()
        finally:
            self._pending -= 1
        assert waiting.answer is not None, "the batch answered each of its requests"
        if isinstance(waiting.answer, StorageError):
            raise waiting.answer
        return waiting.answer

    async def read(
        self, stream: StreamName, *, after_version: int = 0, upto_seq: int | None = None
    ) -> list[Recorded]:
        """Answer the events of one stream in order; an unknown stream is empty."""
        await self._checkpoint()
        upto = self.head if upto_seq is None else upto_seq
        held = self._store.streams.get(stream, [])[after_version:]
        return [record for record in held if record.seq <= upto]

    async def read_all(
        self, *, after: int = 0, upto: int | None = None, limit: int = EVENTS_PER_PAGE_MAX
    ) -> list[Recorded]:
        """Answer events of all streams in commit order, at most ``limit``."""
        await self._checkpoint()
        last = self.head if upto is None else min(upto, self.head)
        return self._store.records[max(after, 0) : last][:limit]

    async def payload(self, digest: str) -> bytes | None:
        """Answer the bytes of a payload; None when they were erased."""
        row = await self.payload_row(digest)
        return None if row is None else row.data

    async def payload_row(self, digest: str) -> Payload | None:
        """Answer a payload with its salt; None when it was erased."""
        await self._checkpoint()
        return self._store.payloads.get(digest)

    async def payloads(self, digests: Sequence[str]) -> dict[str, bytes]:
        """Answer those of the payloads that are there."""
        await self._checkpoint()
        held = self._store.payloads
        return {digest: held[digest].data for digest in digests if digest in held}

    async def artifact(self, digest: str) -> StoredArtifact | None:
        """Answer the row of an artifact; None when it was erased."""
        await self._checkpoint()
        return self._store.artifacts.get(digest)

    async def artifact_files(self) -> frozenset[str]:
        """Answer the names of all files that an artifact's row refers to."""
        await self._checkpoint()
        return frozenset(row.file for row in self._store.artifacts.values())

    async def seq_at(self, at_ns: int) -> Seq:
        """Answer the last seq recorded at or before a time; 0 when there is none."""
        await self._checkpoint()
        return self._seq_at(at_ns)

    async def jobs(self, query: JobQuery) -> list[tuple[Seq, str]]:
        """Answer (seq of ``job.submitted``, job id) of the jobs that match, newest first."""
        await self._checkpoint()
        found = [
            (Seq(row.submitted_seq), row.job_id)
            for row in self._store.rows.values()
            if _matches(row, query)
        ]
        return sorted(found, reverse=True)[: query.limit]

    async def unfinished(self) -> list[tuple[Seq, str]]:
        """Answer (seq of ``job.submitted``, job id) of all jobs without a terminal event."""
        await self._checkpoint()
        return sorted(
            (Seq(row.submitted_seq), row.job_id)
            for row in self._store.rows.values()
            if row.status in {"queued", "running"}
        )

    async def job_for_key(self, key: str) -> str | None:
        """Answer the job that an idempotency key (digest) belongs to; None when none does."""
        await self._checkpoint()
        return self._store.keys.get(key)

    async def read_service_state(self, at_seq: int) -> ServiceState:
        """Answer the service's state at a seq, folded from the log; raises PointNotInLog."""
        await self._checkpoint()
        if at_seq > self.head:
            raise PointNotInLog(at_seq, int(self.head))
        return attrs.evolve(fold_service(self._store.records[:at_seq]), seq=at_seq)

    def follow(
        self, *, stream: StreamName | None = None, after: int = 0
    ) -> AbstractAsyncContextManager[AsyncGenerator[Recorded, None]]:
        """Replay the events after a seq, then follow: no gap, no double, in order."""
        return following(self._feed, self._page, stream=stream, after=after)

    async def wait_past(self, seq: int, *, stream: StreamName | None = None) -> None:
        """Return when the head, or that stream's last event, is past ``seq``; raises LogClosed."""
        await wait_past(self._feed, self._last_seq, seq, stream)

    async def aclose(self) -> None:
        """Commit what is pending, refuse the rest. Safe to call twice."""
        self._closed = True
        if self._waiting:
            self._commit()
        self._feed.close()
        await trio.lowlevel.cancel_shielded_checkpoint()

    def _refusal(self) -> LogClosed | LogBusy | None:
        if self._closed:
            return LogClosed()
        return LogBusy(self._pending_max) if self._pending >= self._pending_max else None

    def _commit(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._poisoned is None:
            self._write(waiting)
        if self._poisoned is not None:
            for one in waiting:
                one.answer = OutcomeUnknown(self._poisoned)

    def _write(self, waiting: list[_Waiting]) -> None:
        store = self._store
        batch = Batch(store.tip, store, session=self._session, clock_ns=self._clock_ns)
        for one in waiting:
            try:
                one.answer = batch.add(one.prepared)
            except AppendRefused as refused:
                one.answer = refused
        batch.finish()
        error, written = self._failures.pop(0) if self._failures else (None, True)
        if written and batch.events:
            store.write(batch)
        if isinstance(error, OutcomeUnknown):
            self._poison(str(error) or "the log's outcome is unknown")
        elif error is not None:
            for one in waiting:
                if not isinstance(one.answer, StorageError):
                    one.answer = error
        elif batch.events:
            self._service = attrs.evolve(batch.service, seq=batch.seq)
            self._feed.publish(batch.records)

    def _poison(self, reason: str) -> None:
        self._poisoned = reason
        try:
            self._die(reason)
        except Exception:  # noqa: BLE001  a test's stand-in may raise; the real one never returns
            return

    async def _checkpoint(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise LogClosed

    async def _page(self, stream: StreamName | None, after: int) -> list[Recorded]:
        await self._checkpoint()
        if stream is None:
            return self._store.records[max(after, 0) : self.head][:EVENTS_PER_PAGE_MAX]
        held = self._store.streams.get(stream, [])
        return [record for record in held if record.seq > after][:EVENTS_PER_PAGE_MAX]

    async def _last_seq(self, stream: StreamName) -> int:
        await self._checkpoint()
        held = self._store.streams.get(stream)
        return int(held[-1].seq) if held else 0

    def _seq_at(self, at_ns: int) -> Seq:
        found = [r.seq for r in self._store.records if r.recorded_at_ns <= at_ns]
        return found[-1] if found else Seq(0)


def _matches(row: JobRow, query: JobQuery) -> bool:
    created = row.created_at_ns
    return (
        (query.status is None or row.status in query.status)
        and (query.agent is None or row.agent == query.agent)
        and (query.owner is None or row.owner == query.owner)
        and (query.label is None or query.label in row.labels)
        and (query.since_ns is None or created >= query.since_ns)
        and (query.until_ns is None or created < query.until_ns)
        and (query.before is None or row.submitted_seq < query.before)
    )


def submitted(agent: str = "echo", **fields: Any) -> e.JobSubmitted:  # noqa: ANN401  any field of the event
    """Answer a ``job.submitted`` for tests, with these fields and defaults for the others."""
    given: dict[str, Any] = {
        "prompt": e.PayloadRef(digest="0" * 64, size=1),
        "max_budget_microusd": 5_000_000,
        "timeout_ms": 60_000,
        "workspace": e.WorkspaceRequest(),
    }
    return e.JobSubmitted(agent=agent, **(given | fields))


def example_event(cls: type[e.AnyEvent], chance: random.Random) -> e.AnyEvent:
    """Answer an event of a class with fields drawn by ``chance``, whatever its field types."""
    drawn = _example(cls, chance)
    assert isinstance(drawn, cls), "a class draws itself"
    return drawn


def _example(kind: Any, chance: random.Random) -> Any:  # noqa: ANN401  an arm a type
    origin = get_origin(kind)
    if origin is Literal:
        return chance.choice(get_args(kind))
    if origin in {Union, types.UnionType}:
        return _example(chance.choice(get_args(kind)), chance)
    if origin is list:
        return [_example(get_args(kind)[0], chance) for _ in range(chance.randint(0, 3))]
    if origin is dict:
        names = [_text(chance) for _ in range(chance.randint(0, 3))]
        return {name: _example(get_args(kind)[1], chance) for name in names}
    if kind is type(None):
        return None
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _example_struct(kind, chance)
    if kind is bool:
        return chance.random() < 0.5
    if kind is int:
        return chance.choice((0, 1, -1, 2**53, 2**63 - 1, chance.randint(-(10**9), 10**12)))
    if kind is str or kind is JobId:
        return _text(chance)
    raise TypeError(kind)


def _example_struct(kind: type[msgspec.Struct], chance: random.Random) -> msgspec.Struct:
    hints = get_type_hints(kind)
    return kind(
        **{
            field.name: _example(hints[field.name], chance)
            for field in msgspec.structs.fields(kind)
            if field.required or chance.random() < 0.7
        }
    )


def _text(chance: random.Random) -> str:
    characters = 'aZ09 -_/"\\\n\t\u0000ä\u2028\u20ac\U0001f600'
    return "".join(chance.choice(characters) for _ in range(chance.randint(0, 12)))
