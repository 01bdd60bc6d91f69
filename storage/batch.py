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
"""Only these events change the state of the service; a tuple for isinstance."""


class Prepared:
    """A request with its events encoded, made on the caller's side of the writer."""

    __slots__ = ("data", "request", "types")

    def __init__(self, request: Append) -> None:
        _check_request(request)
        self.request = request
        self.types = [e.event_type(fact.event) for fact in request.facts]
        self.data = [encode_data(fact.event) for fact in request.facts]


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
        keys = self._new_keys(request)
        head = self._head(request.stream)
        if head.version != request.expected_version:
            raise VersionConflict(request.stream, request.expected_version, head.version)
        self.keys.update(keys)
        self.recorded_at_ns = max(self.recorded_at_ns, self._clock_ns())
        self.heads[request.stream] = head = StreamHead(
            head.version, head.leaf, head.row, row_known=head.row_known
        )
        added = tuple(
            self._record(request, head, fact, type_, data)
            for fact, type_, data in zip(request.facts, prepared.types, prepared.data, strict=True)
        )
        self.records.extend(added)
        return added

    def finish(self) -> None:
        """Work out the tiles that are complete now; call once, when all requests are in."""
        self.frontier, self.tiles = grow(self.frontier, self._leaves)

    def _record(
        self, request: Append, head: StreamHead, fact: Fact, type_: str, data: msgspec.Raw
    ) -> Recorded:
        self.seq = seq = self.seq + 1
        version = head.version + 1
        body = encode_body(
            Envelope(
                seq=seq,
                stream=request.stream,
                version=version,
                type=type_,
                schema=EVENT_SCHEMA,
                recorded_at_ns=self.recorded_at_ns,
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
            recorded_at_ns=self.recorded_at_ns,
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
        self.events.append(
            (seq, request.stream, version, type_, self.recorded_at_ns, self._session, body, leaf)
        )
        self._leaves.append(leaf)
        head.version = version
        head.leaf = record.leaf
        if fact.payloads or fact.artifacts:
            self._keep_beside(seq, fact.payloads, fact.artifacts)
        if isinstance(fact.event, CHANGES_SERVICE):
            self._project(head, record)
        elif isinstance(fact.event, e.PayloadErased):
            self.erased_payloads.extend(fact.event.digests)
        elif isinstance(fact.event, e.ArtifactErased):
            self.erased_artifacts.append(fact.event.digest)
        return record

    def _keep_beside(
        self, seq: int, payloads: Sequence[Payload], artifacts: Sequence[StoredArtifact]
    ) -> None:
        self.payloads.extend((p.digest, seq, p.salt, p.data) for p in payloads)
        self.artifacts.extend((a.digest, seq, a.salt, a.file, a.size) for a in artifacts)

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
        head = self.heads.get(stream) or self._tip.streams.get(stream)
        if head is None:
            version, leaf = self._source.stream_head(stream)
            head = StreamHead(version, leaf, None, row_known=version == 0)
        return head

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


def _check_request(request: Append) -> None:
    assert request.facts, "an append has at least one fact"
    assert request.expected_version >= 0, "a version is counted from 0"
    job_id = job_of_stream(request.stream)
    if job_id is None:
        assert request.stream == SERVICE_STREAM, f"{request.stream} is no stream of ours"
    for fact in request.facts:
        if isinstance(fact.event, CHANGES_ROW):
            assert job_id is not None, "an event of a job belongs to a job's stream"
