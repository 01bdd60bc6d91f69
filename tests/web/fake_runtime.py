"""A runtime without actors: jobs go through their events when the test says so."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal

import attrs
import trio

from actors.errors import KeyReused, NotRunning, UnknownAgent, UnknownModel
from actors.limits import Limits
from storage import events as e
from storage.codec import payload, salted_digest
from storage.errors import JobUnknown, LogClosed, VersionConflict
from storage.event_log import Append, Fact, JobQuery, Payload, Recorded, StoredArtifact
from storage.events import event_type
from storage.ids import SERVICE_STREAM, IdSource, JobId, Seq, StreamName, job_stream
from storage.job_state import JobState, fold
from storage.projections import ServiceState, evolve_row, fold_service
from web.service import SubmitRequest, Submitted, Why

START_NS = 1_767_225_600_123_456_789  # 2026-01-01T00:00:00.123456789Z


class FakeLog:
    """An event log in memory that commits at once."""

    def __init__(self) -> None:
        self.log_id = "log_fake"
        self.events: list[Recorded] = []
        self.data: dict[str, bytes] = {}
        self.rows: dict[str, StoredArtifact] = {}
        self.closed = False
        self._moved = trio.Event()
        self.waiting = 0

    @property
    def head(self) -> Seq:
        return Seq(len(self.events))

    @property
    def service_state(self) -> ServiceState:
        return fold_service(self.events)

    async def read_service_state(self, at_seq: int) -> ServiceState:
        return fold_service(self.events[:at_seq])

    async def append(self, request: Append) -> tuple[Recorded, ...]:
        await trio.lowlevel.checkpoint()
        return self.append_now(request)

    def append_now(self, request: Append) -> tuple[Recorded, ...]:
        if self.closed:
            raise LogClosed
        version = len(self._of(request.stream))
        if version != request.expected_version:
            raise VersionConflict(request.stream, request.expected_version, version)
        for fact in request.facts:
            version += 1
            self.data.update({p.digest: p.data for p in fact.payloads})
            self.rows.update({a.digest: a for a in fact.artifacts})
            self.events.append(self._record(request, fact, version))
        moved, self._moved = self._moved, trio.Event()
        moved.set()
        return tuple(self.events[-len(request.facts) :])

    def _record(self, request: Append, fact: Fact, version: int) -> Recorded:
        seq = len(self.events) + 1
        return Recorded(
            seq=Seq(seq),
            stream=request.stream,
            version=version,
            type=event_type(fact.event),
            schema=1,
            recorded_at_ns=START_NS + seq * 1_000_000_000,
            session="session",
            by=request.by,
            request_id=request.request_id,
            caused_by=request.caused_by,
            epoch=fact.epoch,
            n=fact.n,
            prev_leaf=None,
            event=fact.event,
            leaf=f"{seq:064x}",
        )

    def _of(self, stream: StreamName) -> list[Recorded]:
        return [r for r in self.events if r.stream == stream]

    async def read(
        self, stream: StreamName, *, after_version: int = 0, upto_seq: int | None = None
    ) -> list[Recorded]:
        await trio.lowlevel.checkpoint()
        upto = self.head if upto_seq is None else upto_seq
        return [r for r in self._of(stream) if r.version > after_version and r.seq <= upto]

    async def read_all(
        self, *, after: int = 0, upto: int | None = None, limit: int = 1000
    ) -> list[Recorded]:
        await trio.lowlevel.checkpoint()
        return self.events[after:upto][:limit]

    async def payload(self, digest: str) -> bytes | None:
        await trio.lowlevel.checkpoint()
        return self.data.get(digest)

    async def payloads(self, digests: Sequence[str]) -> dict[str, bytes]:
        await trio.lowlevel.checkpoint()
        return {d: self.data[d] for d in digests if d in self.data}

    async def artifact(self, digest: str) -> StoredArtifact | None:
        await trio.lowlevel.checkpoint()
        return self.rows.get(digest)

    async def seq_at(self, at_ns: int) -> Seq:
        await trio.lowlevel.checkpoint()
        return Seq(sum(r.recorded_at_ns <= at_ns for r in self.events))

    async def jobs(self, query: JobQuery) -> list[tuple[Seq, str]]:
        await trio.lowlevel.checkpoint()
        found = []
        for record in reversed(self.events):
            if not isinstance(record.event, e.JobSubmitted):
                continue
            row = None
            for each in self._of(record.stream):
                row = evolve_row(row, each)
            assert row is not None
            wanted = (
                (query.status is None or row.status in query.status)
                and (query.agent is None or row.agent == query.agent)
                and (query.owner is None or row.owner == query.owner)
                and (query.label is None or query.label in row.labels)
                and (query.since_ns is None or row.created_at_ns >= query.since_ns)
                and (query.until_ns is None or row.created_at_ns < query.until_ns)
                and (query.before is None or row.submitted_seq < query.before)
            )
            if wanted:
                found.append((Seq(row.submitted_seq), row.job_id))
        return found[: query.limit]

    async def unfinished(self) -> list[tuple[Seq, str]]:
        return await self.jobs(JobQuery(status=frozenset({"queued", "running"})))

    async def job_for_key(self, key: str) -> str | None:
        await trio.lowlevel.checkpoint()
        return None

    @contextlib.asynccontextmanager
    async def follow(
        self, *, stream: StreamName | None = None, after: int = 0
    ) -> AsyncGenerator[AsyncGenerator[Recorded, None], None]:
        async def records() -> AsyncGenerator[Recorded, None]:
            seq = after
            while not self.closed:
                for record in self.events[seq:]:
                    seq = int(record.seq)
                    if stream is None or record.stream == stream:
                        yield record
                await self.wait_past(seq)

        generator = records()
        try:
            yield generator
        finally:
            await generator.aclose()

    async def wait_past(self, seq: int, *, stream: StreamName | None = None) -> None:
        self.waiting += 1
        try:
            while not any(
                r.seq > seq and (stream is None or r.stream == stream) for r in self.events[seq:]
            ):
                await self._moved.wait()
        finally:
            self.waiting -= 1
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.closed = True


@attrs.define(kw_only=True)
class FakeHostInfo:
    containment: str = "subreaper"
    confined: bool = False
    disk_free_bytes: int = 1 << 40
    inodes_free: int = 1 << 20
    degraded: list[str] = attrs.field(factory=list)
    log_pending: int = 0


@attrs.frozen
class FakeArtifacts:
    folder: Path

    def path(self, file: str) -> Path:
        return self.folder / file


class FakeAgents:
    def names(self) -> list[str]:
        return ["echo", "shell"]


class FakeRuntime:
    """Takes jobs and leaves them queued; the test moves them on with ``start`` and ``end``."""

    def __init__(self, folder: Path) -> None:
        self.log = FakeLog()
        self.artifacts = FakeArtifacts(folder)
        self.limits = Limits(capacity=2, queue_depth=4)
        self.agents = FakeAgents()
        self.ready = True
        self.draining = False
        self.refuse: Exception | None = None
        self.requests: list[SubmitRequest] = []
        self.cancels: list[tuple[str, str, str | None]] = []
        self.messages: list[tuple[str, str]] = []
        self._ids = IdSource()
        self._keys: dict[tuple[str, str], tuple[JobId, bytes]] = {}
        started = e.ServiceStarted(
            version="0.1.0",
            config_digest="c",
            capacity=2,
            queue_depth=4,
            containment="subreaper",
            boot_id="b",
            log_id="log_fake",
        )
        self.log.append_now(
            Append(
                stream=SERVICE_STREAM,
                expected_version=0,
                facts=(Fact(event=started), Fact(event=e.ServiceReady(recovered=0))),
            )
        )

    def note(self, text: bytes) -> Payload:
        return payload(text, self._ids.salt())

    async def submit(self, request: SubmitRequest) -> Submitted:
        await trio.lowlevel.checkpoint()
        if self.refuse is not None:
            raise self.refuse
        if request.agent not in self.agents.names():
            raise UnknownAgent(request.agent, tuple(self.agents.names()))
        if request.model == "no-such-model":
            raise UnknownModel(request.model, ("haiku", "sonnet"))
        key = (request.by, request.idempotency_key or "")
        if request.idempotency_key is not None and key in self._keys:
            job, body = self._keys[key]
            if body != request.body_digest_source:
                raise KeyReused(job)
            return Submitted(job_id=job, seq=0, replay=True)
        job = self._ids.new_job()
        if request.idempotency_key is not None:
            self._keys[key] = (job, request.body_digest_source)
        self.requests.append(request)
        prompt = self.note(request.prompt.encode())
        metadata = None if request.metadata is None else self.note(request.metadata)
        event = e.JobSubmitted(
            agent=request.agent,
            model=request.model,
            prompt=prompt.ref,
            metadata=None if metadata is None else metadata.ref,
            max_budget_microusd=request.max_budget_microusd,
            timeout_ms=request.timeout_ms,
            workspace=request.workspace,
            priority=request.priority,
            max_attempts=request.max_attempts,
            session_id=request.session_id,
            labels=request.labels,
        )
        payloads = (prompt,) if metadata is None else (prompt, metadata)
        self.add(job, event, payloads=payloads, by=request.by, request_id=request.request_id)
        return Submitted(job_id=job, seq=int(self.log.head))

    def add(
        self,
        job: JobId,
        event: e.AnyEvent,
        *,
        epoch: int = 0,
        payloads: tuple[Payload, ...] = (),
        artifacts: tuple[StoredArtifact, ...] = (),
        by: str = "service",
        request_id: str | None = None,
    ) -> None:
        stream = job_stream(job)
        version = sum(r.stream == stream for r in self.log.events)
        fact = Fact(event=event, epoch=epoch, payloads=payloads, artifacts=artifacts)
        self.log.append_now(
            Append(
                stream=stream,
                expected_version=version,
                facts=(fact,),
                by=by,
                request_id=request_id,
            )
        )

    def state(self, job: str) -> JobState | None:
        return fold(r for r in self.log.events if r.stream == f"job/{job}")

    def start(self, job: JobId, *, base: str | None = None) -> None:
        self.add(job, e.JobStarted(agent_digest="a", containment="subreaper"), epoch=1)
        kind: Literal["clone", "scratch"] = "scratch" if base is None else "clone"
        prepared = e.WorkspacePrepared(kind=kind, strategy="copy", base_commit=base)
        self.add(job, prepared, epoch=1)
        keeper = e.ProcessSpawned(keeper="k", pid=1, start_time=1, boot_id="b")
        self.add(job, keeper, epoch=1)
        self.add(job, e.AgentStarted(backend="echo"), epoch=1)

    def print(self, job: JobId, text: bytes, *, stream: Literal["stdout", "stderr"]) -> None:
        tail = self.note(text)
        event = e.OutputRecorded(stream=stream, offset=0, size=len(text), tail=tail.ref)
        self.add(job, event, epoch=1, payloads=(tail,))

    def store(self, job: JobId, name: str, data: bytes) -> None:
        salt = self._ids.salt()
        digest = salted_digest(salt, data)
        file = f"{name}-{digest}"
        self.artifacts.path(file).write_bytes(data)
        row = StoredArtifact(digest=digest, salt=salt, file=file, size=len(data))
        event = e.ArtifactStored(name=name, digest=digest, size=len(data))
        self.add(job, event, epoch=1, artifacts=(row,))

    def verdict(
        self, job: JobId, *, cause: e.Cause | None = None, result: bytes | None = b"done"
    ) -> None:
        found = None if result is None else self.note(result)
        ended = e.AgentEnded(
            exit=e.ExitStatus(code=0 if cause is None else 3),
            cause=cause,
            result=None if found is None else found.ref,
        )
        self.add(job, ended, epoch=1, payloads=() if found is None else (found,))
        self.add(job, e.ProcessReaped(phase="agent", seen=1), epoch=1)

    def end(self, job: JobId, cause: e.Cause | None = None) -> None:
        self.add(job, e.ending(cause, artifacts="complete"), epoch=1)

    async def run(self, request: SubmitRequest) -> JobId:
        """Take a job through a whole successful run."""
        job = (await self.submit(request)).job_id
        self.start(job)
        self.print(job, b"hello\nworld\n", stream="stdout")
        self.print(job, b"warned\n", stream="stderr")
        self.verdict(job)
        self.end(job)
        return job

    async def cancel(
        self, job: JobId, *, by: str, request_id: str | None
    ) -> Literal["accepted", "terminal"]:
        await trio.lowlevel.checkpoint()
        state = self.state(job)
        if state is None:
            raise JobUnknown(job)
        if state.terminal:
            return "terminal"
        self.cancels.append((job, by, request_id))
        self.add(job, e.JobCancelRequested(), by=by, request_id=request_id)
        self.add(job, e.JobCancelled())
        return "accepted"

    async def message(self, job: JobId, text: str, *, by: str, request_id: str | None) -> None:
        await trio.lowlevel.checkpoint()
        state = self.state(job)
        if state is None:
            raise JobUnknown(job)
        if state.phase != "begun":
            raise NotRunning(job, state.status)
        self.messages.append((job, text))

    async def why(self, job: JobId) -> Why:
        await trio.lowlevel.checkpoint()
        state = self.state(job)
        if state is None:
            raise JobUnknown(job)
        return Why(status=state.status, phase=state.phase, position=0, waits_for="a free slot")

    def host_info(self) -> FakeHostInfo:
        return FakeHostInfo()

    async def drain(self) -> None:
        self.draining = True
        await trio.lowlevel.checkpoint()
