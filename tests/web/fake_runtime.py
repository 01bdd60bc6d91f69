"""A runtime without actors: jobs go through their events when the test says so."""

from pathlib import Path
from typing import Literal, NoReturn

import attrs
import trio

from actors.errors import KeyReused, NotRunning, UnknownAgent, UnknownModel
from actors.limits import Limits
from actors.messages import SubmitRequest, Submitted, Why
from storage import events as e
from storage.artifacts import ArtifactStore
from storage.codec import payload
from storage.errors import JobUnknown
from storage.event_log import Append, Fact, Payload, StoredArtifact
from storage.ids import SERVICE_STREAM, IdSource, JobId, StreamName, job_stream
from storage.job_state import JobState, fold
from storage.testing import MemoryEventLog, MemoryStore

START_NS = 1_767_225_600_123_456_789  # 2026-01-01T00:00:00.123456789Z


class FakeLog(MemoryEventLog):
    """The log in memory, which also counts who waits for its next event."""

    waiting = 0

    async def wait_past(self, seq: int, *, stream: StreamName | None = None) -> None:
        self.waiting += 1
        try:
            await super().wait_past(seq, stream=stream)
        finally:
            self.waiting -= 1


def no_death(reason: str) -> NoReturn:
    raise AssertionError(reason)


@attrs.define(kw_only=True)
class FakeHostInfo:
    containment: str = "subreaper"
    containment_why_not: dict[str, str] = attrs.field(
        factory=lambda: {"pidns": "unshare: Operation not permitted"}
    )
    confined: bool = False
    disk_free_bytes: int = 1 << 40
    inodes_free: int = 1 << 20
    degraded: list[str] = attrs.field(factory=list)
    log_pending: int = 0


class FakeAgents:
    def names(self) -> list[str]:
        return ["echo", "shell"]


class FakeRuntime:
    """Takes jobs and leaves them queued; the test moves them on with ``start`` and ``end``."""

    def __init__(self, folder: Path) -> None:
        self.disk = MemoryStore()
        self.ids = IdSource()
        self.log = FakeLog(
            self.disk,
            ids=self.ids,
            clock_ns=lambda: START_NS + (len(self.disk.records) + 1) * 1_000_000_000,
            session="session",
            die=no_death,
        )
        self.artifacts = ArtifactStore(folder / "artifacts")
        self.limits = Limits(capacity=2, queue_depth=4)
        self.agents = FakeAgents()
        self.ready = True
        self.draining = False
        self.refuse: Exception | None = None
        self.requests: list[SubmitRequest] = []
        self.cancels: list[tuple[str, str, str | None]] = []
        self.messages: list[tuple[str, str]] = []
        self._keys: dict[tuple[str, str], tuple[JobId, bytes]] = {}

    async def open(self) -> "FakeRuntime":
        started = e.ServiceStarted(
            version="0.1.0",
            config_digest="c",
            capacity=2,
            queue_depth=4,
            containment="subreaper",
            boot_id="b",
            log_id=self.log.log_id,
        )
        facts = (Fact(event=started), Fact(event=e.ServiceReady(recovered=0)))
        await self.log.append(Append(stream=SERVICE_STREAM, expected_version=0, facts=facts))
        return self

    def note(self, text: bytes) -> Payload:
        return payload(text, self.ids.salt())

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
        job = self.ids.new_job()
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
        await self.add(job, event, payloads=payloads, by=request.by, request_id=request.request_id)
        return Submitted(job_id=job, seq=int(self.log.head))

    async def add(
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
        version, _ = self.disk.stream_head(stream)
        fact = Fact(event=event, epoch=epoch, payloads=payloads, artifacts=artifacts)
        await self.log.append(
            Append(
                stream=stream,
                expected_version=version,
                facts=(fact,),
                by=by,
                request_id=request_id,
            )
        )

    def state(self, job: str) -> JobState | None:
        return fold(self.disk.streams.get(f"job/{job}", []))

    async def start(self, job: JobId, *, base: str | None = None) -> None:
        await self.add(job, e.JobStarted(agent_digest="a", containment="subreaper"), epoch=1)
        kind: Literal["clone", "scratch"] = "scratch" if base is None else "clone"
        prepared = e.WorkspacePrepared(kind=kind, strategy="copy", base_commit=base)
        await self.add(job, prepared, epoch=1)
        keeper = e.ProcessSpawned(keeper="k", pid=1, start_time=1, boot_id="b")
        await self.add(job, keeper, epoch=1)
        await self.add(job, e.AgentStarted(backend="echo"), epoch=1)

    async def print(self, job: JobId, text: bytes, *, stream: Literal["stdout", "stderr"]) -> None:
        tail = self.note(text)
        event = e.OutputRecorded(stream=stream, offset=0, size=len(text), tail=tail.ref)
        await self.add(job, event, epoch=1, payloads=(tail,))

    async def store(self, job: JobId, name: str, data: bytes) -> None:
        row = await self.artifacts.put_bytes(data, self.ids.salt())
        event = e.ArtifactStored(name=name, digest=row.digest, size=len(data))
        await self.add(job, event, epoch=1, artifacts=(row,))

    async def verdict(
        self, job: JobId, *, cause: e.Cause | None = None, result: bytes | None = b"done"
    ) -> None:
        found = None if result is None else self.note(result)
        ended = e.AgentEnded(
            exit=e.ExitStatus(code=0 if cause is None else 3),
            cause=cause,
            result=None if found is None else found.ref,
        )
        await self.add(job, ended, epoch=1, payloads=() if found is None else (found,))
        await self.add(job, e.ProcessReaped(phase="agent", seen=1), epoch=1)

    async def end(self, job: JobId, cause: e.Cause | None = None) -> None:
        await self.add(job, e.ending(cause, artifacts="complete"), epoch=1)

    async def run(self, request: SubmitRequest) -> JobId:
        """Take a job through a whole successful run."""
        job = (await self.submit(request)).job_id
        await self.start(job)
        await self.print(job, b"hello\nworld\n", stream="stdout")
        await self.print(job, b"warned\n", stream="stderr")
        await self.verdict(job)
        await self.end(job)
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
        await self.add(job, e.JobCancelRequested(), by=by, request_id=request_id)
        await self.add(job, e.JobCancelled())
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
