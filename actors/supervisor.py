"""The Supervisor: admits jobs, gives slots in order, and owns every job that no run owns."""

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Final, assert_never

import attrs
import trio

from actors.admission import Queue, QueuedJob
from actors.errors import DiskLow, Draining, KeyReused, NotRunning, QueueFull
from actors.host import Host, HostError
from actors.janitor import clean, release_quarantined
from actors.job import ArtifactFiles, Finished, JobActor, Recipe
from actors.kernel import Actor, Reply
from actors.limits import Limits
from actors.messages import (
    Cancel,
    CancelAnswer,
    Command,
    Explain,
    Submit,
    SubmitRequest,
    Submitted,
    Tell,
    Why,
)
from actors.recovery import Recovered, await_known
from actors.stream import RETRY_S, JobStream
from storage import codec
from storage import events as e
from storage.errors import AppendRefused, DuplicateKey, JobUnknown
from storage.event_log import Append, EventLog, Fact
from storage.ids import IdSource, JobId, job_stream
from storage.job_state import JobState, fold

RETRY_AFTER_S: Final = 5


@attrs.define
class _Slot:
    """A place that a job holds while it runs.

    ``ready`` is set once ``actor`` is there, or once the place was given back without one.
    """

    job: JobId
    owned: bool
    actor: JobActor | None = None
    ready: trio.Event = attrs.field(factory=trio.Event)


class Supervisor(Actor[Command]):
    """Takes commands in order; whatever waits (a commit, a run) is a task of its nursery."""

    def __init__(
        self,
        *,
        log: EventLog,
        host: Host,
        artifacts: ArtifactFiles,
        ids: IdSource,
        limits: Limits,
        recipe: Recipe,
        nursery: trio.Nursery,
        disk_low: Callable[[], bool],
        on_crash: Callable[[JobId, Exception], None],
    ) -> None:
        super().__init__("supervisor", limits.mailbox_max)
        self._log = log
        self._host = host
        self._artifacts = artifacts
        self._ids = ids
        self._limits = limits
        self._recipe = recipe
        self._nursery = nursery
        self._disk_low = disk_low
        self._on_crash = on_crash
        self._queue = Queue()
        self._resumes: deque[JobStream] = deque()
        self._slots: dict[JobId, _Slot] = {}
        self._quarantined: set[JobId] = set()
        self._unknown: set[JobId] = set()
        self._reserved = 0
        self._keys_in_flight: dict[str, trio.Event] = {}
        self._wake = trio.Event()
        self._idle = trio.Event()
        self._paused = False
        self.draining = False

    # --- state that others read -----------------------------------------------------------------

    @property
    def running(self) -> tuple[JobId, ...]:
        """The jobs that hold a slot."""
        return tuple(self._slots)

    @property
    def degraded(self) -> list[str]:
        """What is not as it should be, in words; empty when all is well."""
        words = [f"job {job} left processes behind" for job in sorted(self._quarantined)]
        words += [f"the fate of job {job} is not known" for job in sorted(self._unknown)]
        pending = any(s.actor and s.actor.stream.pending_retry for s in self._slots.values())
        if pending or self._paused:
            words.append("the log has no room; appends are being retried")
        return words

    # --- commands ---------------------------------------------------------------------------------

    async def receive(self, message: Command) -> bool:
        """Start the task that carries a command out; never waits for it."""
        self._nursery.start_soon(self._answer, message)
        return True

    async def _answer(self, message: Command) -> None:
        """Carry a command out and answer it, also with an expected error."""
        try:
            match message:
                case Submit():
                    message.reply.set(await self._submit(message.request))
                case Cancel():
                    message.reply.set(await self._cancel(message))
                case Tell():
                    await self._tell(message)
                    message.reply.set(None)
                case Explain():
                    message.reply.set(await self._explain(message.job))
                case _:
                    assert_never(message)
        except Exception as error:  # noqa: BLE001  a border: the asker gets the error
            _fail(message.reply, error)
        except BaseException:
            _fail(message.reply, Draining(RETRY_AFTER_S))
            raise

    # --- submission -------------------------------------------------------------------------------

    async def _submit(self, request: SubmitRequest) -> Submitted:
        if request.idempotency_key is None:
            return await self._admit(request, None)
        key = hashlib.sha256(f"{request.by}\0{request.idempotency_key}".encode()).hexdigest()
        while key in self._keys_in_flight:
            await self._keys_in_flight[key].wait()
        landed = self._keys_in_flight[key] = trio.Event()
        try:
            existing = await self._log.job_for_key(key)
            if existing is not None:
                return await self._replay(request, JobId(existing))
            return await self._admit(request, key)
        except DuplicateKey as error:
            return await self._replay(request, JobId(error.job_id))
        finally:
            del self._keys_in_flight[key]
            landed.set()

    async def _replay(self, request: SubmitRequest, job: JobId) -> Submitted:
        state = await self._state(job)
        prompt = await self._log.payload_row(state.submitted.prompt.digest)
        recorded = state.submitted.idempotency
        assert recorded is not None, "a job found by its key has one"
        if prompt is not None:
            body = codec.salted_digest(prompt.salt, request.body_digest_source)
            if body != recorded.body:
                raise KeyReused(job)
        return Submitted(job_id=job, seq=state.submitted_seq, replay=True)

    async def _admit(self, request: SubmitRequest, key: str | None) -> Submitted:
        if self.draining:
            raise Draining(RETRY_AFTER_S)
        if self._disk_low():
            raise DiskLow(RETRY_AFTER_S)
        owned = request.owner is not None
        if not owned and self._taken() >= self._limits.queue_depth:
            raise QueueFull(RETRY_AFTER_S)
        self._reserved += 1
        try:
            job = self._ids.new_job()
            fact = self._submission(request, key)
            committed = await self._log.append(
                Append(
                    stream=job_stream(job),
                    expected_version=0,
                    facts=(fact,),
                    by=request.by,
                    request_id=request.request_id,
                )
            )
            seq = int(committed[-1].seq)
            self._enqueue(job, request.priority, seq, version=1, owned=owned)
        finally:
            self._reserved -= 1
        return Submitted(job_id=job, seq=seq)

    def _taken(self) -> int:
        waiting = len(self._queue) + len(self._resumes)
        return waiting + len(self._slots) + len(self._quarantined) + self._reserved

    def _submission(self, request: SubmitRequest, key: str | None) -> Fact:
        prompt = codec.payload(request.prompt.encode(), self._ids.salt())
        payloads = [prompt]
        metadata = webhook = idempotency = None
        if request.metadata is not None:
            payloads.append(codec.payload(request.metadata, self._ids.salt()))
            metadata = payloads[-1].ref
        if request.webhook is not None:
            payloads.append(codec.payload(request.webhook.encode(), self._ids.salt()))
            webhook = payloads[-1].ref
        if key is not None:
            body = codec.salted_digest(prompt.salt, request.body_digest_source)
            idempotency = e.IdempotencyRef(key=key, body=body)
        event = e.JobSubmitted(
            kind=request.kind,
            owner=request.owner,
            agent=request.agent,
            model=request.model,
            prompt=prompt.ref,
            metadata=metadata,
            max_budget_microusd=request.max_budget_microusd,
            timeout_ms=request.timeout_ms,
            workspace=request.workspace,
            priority=request.priority,
            max_attempts=request.max_attempts,
            session_id=request.session_id,
            webhook=webhook,
            labels=dict(sorted(request.labels.items())),
            idempotency=idempotency,
            parent=request.parent,
        )
        return Fact(event=event, payloads=tuple(payloads))

    # --- the other commands ------------------------------------------------------------------------

    async def _cancel(self, command: Cancel) -> CancelAnswer:
        slot = self._slots.get(command.job)
        if slot is not None:
            await slot.ready.wait()
            if slot.actor is None:
                return await self._cancel(command)
            return await slot.actor.cancel(by=command.by, request_id=command.request_id)
        entry = self._queue.take(command.job)
        if entry is None:
            return await self._cancel_elsewhere(command)
        try:
            stream = JobStream(self._log, self._ids, await self._state(command.job))
            await stream.append(
                [e.JobCancelRequested(), e.JobCancelled()],
                by=command.by,
                request_id=command.request_id,
            )
        except BaseException:
            self._queue.add(entry)
            raise
        self._wake.set()
        self._look_idle()
        return "accepted"

    async def _cancel_elsewhere(self, command: Cancel) -> CancelAnswer:
        """Cancel a job that neither waits nor runs here: it is over, or left to the next start."""
        state = await self._state(command.job)
        if state.terminal:
            return "terminal"
        if command.job in self._slots or command.job in self._queue:
            return await self._cancel(command)
        if state.cancel_requested_by is None:
            stream = JobStream(self._log, self._ids, state)
            await stream.append(
                [e.JobCancelRequested()], by=command.by, request_id=command.request_id
            )
        return "accepted"

    async def _tell(self, command: Tell) -> None:
        slot = self._slots.get(command.job)
        if slot is None or slot.actor is None:
            state = await self._state(command.job)
            raise NotRunning(command.job, state.status)
        try:
            await slot.actor.message(command.text, by=command.by, request_id=command.request_id)
        except HostError as error:
            raise NotRunning(command.job, str(error)) from error

    async def _explain(self, job: JobId) -> Why:
        state = await self._state(job)
        position = self._queue.position(job)
        return Why(
            status=state.status,
            phase=state.phase,
            position=position,
            waits_for=self._waits_for(state, position),
            running=self.running if position is not None else (),
        )

    def _waits_for(self, state: JobState, position: int | None) -> str:
        if state.terminal:
            return "nothing: it is over"
        if position is not None:
            if self.draining:
                return "the next start: the service is stopping"
            if self._paused:
                return "room on the disk of the log"
            return f"a slot: {len(self._slots)} of {self._limits.capacity} are taken"
        return _WAITS_FOR.get(state.phase, "the next start of the service")

    async def _state(self, job: JobId) -> JobState:
        state = fold(await self._log.read(job_stream(job)))
        if state is None:
            raise JobUnknown(job)
        return state

    # --- slots ---------------------------------------------------------------------------------------

    def adopt(self, recovered: Recovered) -> None:
        """Take what recovery found; before the service is ready."""
        for stream in recovered.queued:
            self._requeue(stream)
        self._resumes.extend(recovered.resumed)
        for stream in recovered.unknown:
            self._unknown.add(stream.job)
            self._nursery.start_soon(self._await_known, stream)
        self._wake.set()

    async def dispatch(self) -> None:
        """Give free slots to resumed runs, then to the queue, in order; runs until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            # Appenders of one batch are woken together: let all of them reach the queue first.
            await trio.lowlevel.checkpoint()
            while self._may_start():
                if self._resumes:
                    await self._start(self._resumes.popleft(), resume=True)
                    continue
                entry = self._queue.take_first()
                if entry is None:
                    break
                await self._start_queued(entry)

    async def stop(self) -> None:
        """Stop admitting, wait for the running jobs up to the drain limit, then kill at once."""
        self.draining = True
        self._look_idle()
        with trio.move_on_after(self._limits.drain_ms / 1000):
            await self._idle.wait()
        for slot in self._slots.values():
            if slot.actor is not None:
                slot.actor.stop()
        await self._idle.wait()

    def _may_start(self) -> bool:
        used = sum(not s.owned for s in self._slots.values()) + len(self._quarantined)
        return used < self._limits.capacity and not self.draining and not self._paused

    def _enqueue(
        self, job: JobId, priority: int, submitted_seq: int, *, version: int, owned: bool
    ) -> None:
        self._queue.add(
            QueuedJob.of(
                job,
                priority=priority,
                submitted_seq=submitted_seq,
                version=version,
                owned=owned,
            )
        )
        self._wake.set()

    def _requeue(self, stream: JobStream) -> None:
        state = stream.state
        self._enqueue(
            state.job_id,
            state.submitted.priority,
            state.submitted_seq,
            version=state.version,
            owned=state.submitted.owner is not None,
        )

    async def _start_queued(self, entry: QueuedJob) -> None:
        slot = self._slots[entry.job] = _Slot(entry.job, entry.owned)
        state = await self._state(entry.job)
        assert state.version == entry.version, "nobody writes to a job that waits"
        if self.draining:
            # The drain began while the stream was read: the job keeps its place in the queue.
            del self._slots[entry.job]
            self._queue.add(entry)
            slot.ready.set()
            self._look_idle()
            return
        await self._run_in(slot, JobStream(self._log, self._ids, state), resume=False)

    async def _start(self, stream: JobStream, *, resume: bool) -> None:
        slot = self._slots[stream.job] = _Slot(stream.job, stream.state.submitted.owner is not None)
        await self._run_in(slot, stream, resume=resume)

    async def _run_in(self, slot: _Slot, stream: JobStream, *, resume: bool) -> None:
        slot.actor = JobActor(
            stream, self._host, self._artifacts, self._limits, self._recipe, self._ids.salt
        )
        slot.ready.set()
        await self._nursery.start(self._run_job, slot.actor, resume)

    async def _run_job(
        self, actor: JobActor, resume: bool, task_status: trio.TaskStatus[None]
    ) -> None:
        once = _StartedOnce(task_status)
        try:
            run = actor.resume if resume else actor.begin
            finished = await run(once)
        except Exception as error:  # noqa: BLE001  a border: a crashed JobActor ends its job only
            self._on_crash(actor.stream.job, error)
            finished = await self._end_crashed(actor, error)
        finally:
            once.started()
            if actor.run is not None and not actor.stream.state.terminal:
                await _close(actor)
        await self._after(actor, finished)

    async def _after(self, actor: JobActor, finished: Finished) -> None:
        """Free the slot and do what the way the run finished asks for."""
        stream = actor.stream
        if stream.state.slot_quarantined:
            self._quarantined.add(stream.job)
            self._nursery.start_soon(self._release, stream)
        if finished == "not_started":
            self._nursery.start_soon(self._pause)
        del self._slots[stream.job]
        if finished in ("requeued", "not_started"):
            if stream.state.cancel_requested_by is not None:
                await stream.append_surely([e.JobCancelled()])
            else:
                self._requeue(stream)
        self._wake.set()
        if finished == "terminal" and actor.run is not None:
            await clean(stream, actor.run)
        self._look_idle()

    async def _end_crashed(self, actor: JobActor, error: Exception) -> Finished:
        """Take the owner token back: reap, and end the job ``error/internal``."""
        finished: Finished = "interrupted"
        with trio.CancelScope(shield=True):
            left = 0
            if actor.run is not None:
                left = 1
                with trio.move_on_after(self._limits.reap_deadline_ms / 1000):
                    left = (await actor.run.end(grace_ms=0)).left
            try:
                await actor.stream.reload()
                if not actor.stream.state.terminal:
                    last = e.JobErrored(cause="internal", detail=type(error).__name__, left=left)
                    await actor.stream.append([last])
                finished = "terminal"
            except AppendRefused as refused:
                # The log takes nothing: the next start of the service ends the job.
                self._on_crash(actor.stream.job, refused)
        return finished

    async def _release(self, stream: JobStream) -> None:
        async def released() -> None:
            self._quarantined.discard(stream.job)
            self._wake.set()

        await release_quarantined(stream, self._host, released)

    async def _await_known(self, stream: JobStream) -> None:
        known = await await_known(stream, self._host, self._limits)
        self._unknown.discard(stream.job)
        if known:
            self._resumes.append(stream)
            self._wake.set()

    async def _pause(self) -> None:
        """Start nothing for a moment: the log had no room for ``job.started``."""
        self._paused = True
        await trio.sleep(RETRY_S)
        self._paused = False
        self._wake.set()

    def _look_idle(self) -> None:
        if not self.draining:
            return
        if self._slots:
            self._idle = trio.Event() if self._idle.is_set() else self._idle
        else:
            self._idle.set()


class _StartedOnce(trio.TaskStatus[None]):
    """Passes the first call on and swallows the rest, so that a crash can always report."""

    def __init__(self, status: trio.TaskStatus[None]) -> None:
        self._status: trio.TaskStatus[None] | None = status

    def started(self, value: None = None) -> None:
        """Report the start, once."""
        status, self._status = self._status, None
        if status is not None:
            status.started(value)


_WAITS_FOR: Final = {
    "started": "its workspace to be prepared",
    "begun": "its agent to finish",
    "ended": "its processes to be reaped and its work to be stored",
    "interrupted": "its work to be stored after an interruption",
}


async def _close(actor: JobActor) -> None:
    assert actor.run is not None, "the caller looked"
    with trio.CancelScope(shield=True), trio.move_on_after(30):
        if actor.stream.state.phase == "queued":
            await actor.run.remove()
        await actor.run.close()


def _fail(
    reply: Reply[Submitted] | Reply[CancelAnswer] | Reply[None] | Reply[Why], error: Exception
) -> None:
    if not reply.answered:
        reply.fail(error)
