"""What a batch of appends becomes: versions checked, envelopes filled, bodies hashed, folded.

Pure but for the source it looks committed facts up in, so that the SQLite log and the one in
memory write the same bytes for the same seams.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import attrs
import msgspec

from storage import events as e
from storage.codec import EVENT_SCHEMA, Envelope, encode_body, encode_data, leaf_hash
from storage.errors import DuplicateKey, VersionConflict
from storage.event_log import Append, Fact, Payload, Recorded, StoredArtifact
from storage.frontier import EMPTY, Frontier, Tile, grow
from storage.ids import SERVICE_STREAM, Seq, job_of_stream
from storage.projections import CHANGES_ROW, JobRow, ServiceState, evolve_row, evolve_service

EventRow = tuple[int, str, int, str, int, str, bytes, bytes]
"""seq, stream, version, type, recorded_at_ns, session, body, leaf: the columns of ``events``."""

STREAMS_CACHED_MAX: Final = 8_192
CHANGES_SERVICE: Final = (*CHANGES_ROW, *e.ServiceEvent.__args__)
"""Only these events change the state of the service."""

_PROJECTED: Final = frozenset(CHANGES_SERVICE)
_ERASING: Final = frozenset({e.PayloadErased, e.ArtifactErased})
_OF_A_JOB: Final = frozenset(CHANGES_ROW)
_TYPES: Final = {cls: str(cls.__struct_config__.tag) for cls in e.AnyEvent.__args__}


class Prepared:
    """A request with its events encoded, made on the caller's side of the writer.

    ``facts`` are (fact, type, data); ``keyed`` says that a fact has an idempotency key.
    """

    __slots__ = ("facts", "keyed", "request")

    def __init__(self, request: Append) -> None:
        assert request.facts, "an append has at least one fact"
        assert request.expected_version >= 0, "a version is counted from 0"
        self.request = request
        self.keyed = False
        self.facts: list[tuple[Fact, str, msgspec.Raw]] = []
        for fact in request.facts:
            event = fact.event
            if isinstance(event, e.JobSubmitted) and event.idempotency is not None:
                self.keyed = True
            self.facts.append((fact, _TYPES[type(event)], encode_data(event)))
        if not request.stream.startswith("job/"):
            self._check_stream_of_service()

    def _check_stream_of_service(self) -> None:
        assert self.request.stream == SERVICE_STREAM, f"{self.request.stream} is no stream of ours"
        for fact in self.request.facts:
            assert type(fact.event) not in _OF_A_JOB, "an event of a job belongs to its stream"


class StreamHead:
    """The newest committed event of a stream, and its job's row once somebody asked for it."""

    __slots__ = ("leaf", "row", "row_known", "version")

    def __init__(
        self, version: int, leaf: str | None, row: JobRow | None, *, row_known: bool
    ) -> None:
        self.version = version
        self.leaf = leaf
        self.row = row
        self.row_known = row_known


class Source(Protocol):
    """Where a batch looks up what was committed before it."""

    def stream_head(self, stream: str) -> tuple[int, str | None]:
        """Answer version and leaf (hex) of a stream's newest event; (0, None) without one."""
        ...

    def job_row(self, job_id: str) -> JobRow | None:
        """Answer the row of a job; None when there is no such job."""
        ...

    def job_of_key(self, key: str) -> str | None:
        """Answer the job of an idempotency key; None when the key is new."""
        ...


@attrs.define(kw_only=True)
class Tip:
    """The committed end of the log, from which the next batch goes on."""

    seq: int = 0
    recorded_at_ns: int = 0
    frontier: Frontier = EMPTY
    service: ServiceState = attrs.Factory(ServiceState)
    streams: dict[str, StreamHead] = attrs.Factory(dict)

    def adopt(self, batch: "Batch") -> None:
        """Move to the end of a batch that was committed."""
        assert batch.first_seq == self.seq + 1, "batches follow each other"
        self.seq = batch.seq
        self.recorded_at_ns = batch.recorded_at_ns
        self.frontier = batch.frontier
        self.service = batch.service
        for stream, head in batch.heads.items():
            self.streams.pop(stream, None)
            self.streams[stream] = head
        while len(self.streams) > STREAMS_CACHED_MAX:
            del self.streams[next(iter(self.streams))]


class Batch:
    """The rows of one transaction; thrown away if the transaction is rolled back.

    A request that is refused by :meth:`add` leaves nothing behind.
    """

    def __init__(
        self, tip: Tip, source: Source, *, session: str, clock_ns: Callable[[], int]
    ) -> None:
        self._tip = tip
        self._source = source
        self._session = session
        self._clock_ns = clock_ns
        self._leaves: list[bytes] = []
        self.first_seq = tip.seq + 1
        self.seq = tip.seq
        self.recorded_at_ns = tip.recorded_at_ns
        self.service = tip.service
        self.frontier = tip.frontier
        self.heads: dict[str, StreamHead] = {}
        self.events: list[EventRow] = []
        self.records: list[Recorded] = []
        self.payloads: list[tuple[str, int, bytes, bytes]] = []
        self.artifacts: list[tuple[str, int, bytes, str, int]] = []
        self.keys: dict[str, str] = {}
        self.rows: dict[str, JobRow] = {}
        self.tiles: list[Tile] = []
        self.erased_payloads: list[str] = []
        self.erased_artifacts: list[str] = []
        self.service_changed = False

    def add(self, prepared: Prepared) -> tuple[Recorded, ...]:
        """Answer the events of one request as they will be committed; raises AppendRefused."""
        request = prepared.request
        keys = self._new_keys(request) if prepared.keyed else None
        head = self._head(request.stream)
        if head.version != request.expected_version:
            raise VersionConflict(request.stream, request.expected_version, head.version)
        if keys:
            self.keys.update(keys)
        self.heads[request.stream] = head
        self.recorded_at_ns = max(self.recorded_at_ns, self._clock_ns())
        added = [
            self._record(request, head, fact, type_, data) for fact, type_, data in prepared.facts
        ]
        self.records += added
        return tuple(added)

    def finish(self) -> None:
        """Work out the tiles that are complete now; call once, when all requests are in."""
        self.frontier, self.tiles = grow(self.frontier, self._leaves)

    def _record(
        self, request: Append, head: StreamHead, fact: Fact, type_: str, data: msgspec.Raw
    ) -> Recorded:
        self.seq = seq = self.seq + 1
        version = head.version + 1
        at_ns = self.recorded_at_ns
        body = encode_body(
            Envelope(
                seq=seq,
                stream=request.stream,
                version=version,
                type=type_,
                schema=EVENT_SCHEMA,
                recorded_at_ns=at_ns,
                session=self._session,
                by=request.by,
                request_id=request.request_id,
                caused_by=request.caused_by,
                epoch=fact.epoch,
                n=fact.n,
                prev_leaf=head.leaf,
                data=data,
            )
        )
        leaf = leaf_hash(body)
        record = Recorded(
            seq=Seq(seq),
            stream=request.stream,
            version=version,
            type=type_,
            schema=EVENT_SCHEMA,
            recorded_at_ns=at_ns,
            session=self._session,
            by=request.by,
            request_id=request.request_id,
            caused_by=request.caused_by,
            epoch=fact.epoch,
            n=fact.n,
            prev_leaf=head.leaf,
            event=fact.event,
            leaf=leaf.hex(),
        )
        self.events.append((seq, request.stream, version, type_, at_ns, self._session, body, leaf))
        self._leaves.append(leaf)
        head.version = version
        head.leaf = record.leaf
        if fact.payloads or fact.artifacts:
            self._keep_beside(seq, fact.payloads, fact.artifacts)
        if type(fact.event) in _PROJECTED:
            self._project(head, record)
        elif type(fact.event) in _ERASING:
            self._erase(fact.event)
        return record

    def _keep_beside(
        self, seq: int, payloads: Sequence[Payload], artifacts: Sequence[StoredArtifact]
    ) -> None:
        self.payloads.extend((p.digest, seq, p.salt, p.data) for p in payloads)
        self.artifacts.extend((a.digest, seq, a.salt, a.file, a.size) for a in artifacts)

    def _erase(self, event: e.AnyEvent) -> None:
        if isinstance(event, e.PayloadErased):
            self.erased_payloads.extend(event.digests)
        elif isinstance(event, e.ArtifactErased):
            self.erased_artifacts.append(event.digest)

    def _project(self, head: StreamHead, record: Recorded) -> None:
        job_id = job_of_stream(record.stream)
        before = None
        if job_id is not None and not isinstance(record.event, e.JobSubmitted):
            before = head.row if head.row_known else self._source.job_row(job_id)
        after = evolve_row(before, record)
        head.row, head.row_known = after, True
        if job_id is not None and after is not None:
            self.rows[job_id] = after
        self.service = evolve_service(self.service, record, before, after)
        self.service_changed = True

    def _head(self, stream: str) -> StreamHead:
        """Answer the stream's head, for this batch alone to change."""
        head = self.heads.get(stream)
        if head is not None:
            return head
        known = self._tip.streams.get(stream)
        if known is not None:
            return StreamHead(known.version, known.leaf, known.row, row_known=known.row_known)
        version, leaf = self._source.stream_head(stream)
        return StreamHead(version, leaf, None, row_known=version == 0)

    def _new_keys(self, request: Append) -> dict[str, str]:
        keys: dict[str, str] = {}
        for fact in request.facts:
            event = fact.event
            if isinstance(event, e.JobSubmitted) and event.idempotency is not None:
                key = event.idempotency.key
                owner = self.keys.get(key) or self._source.job_of_key(key)
                if owner is not None:
                    raise DuplicateKey(owner)
                job_id = job_of_stream(request.stream)
                assert job_id is not None, "checked when the request was prepared"
                keys[key] = job_id
        return keys
