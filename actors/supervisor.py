"""The Supervisor: admits jobs, gives slots in order, and owns every job that no run owns."""

from collections import deque
from collections.abc import Callable
from typing import Final, assert_never

import attrs
import trio

from actors.admission import Queue, QueuedJob
from actors.errors import DiskLow, Draining, NotRunning, QueueFull
from actors.host import Host, HostError
from actors.janitor import clean, release_quarantined
from actors.job import ArtifactFiles, Finished, JobActor, Recipe
from actors.kernel import Actor, Reply, StartedOnce
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
from actors.stream import RETRY_S, HandedOver, JobStream
from actors.submission import SubmissionDesk, read_state
from actors.why import waits_for
from storage import events as e
from storage.errors import AppendRefused, DiskFull, LogBusy, LogClosed
from storage.event_log import EventLog
from storage.ids import IdSource, JobId
from storage.job_state import JobState

RETRY_AFTER_S: Final = 5
HAND_OVERS_MAX: Final = 1_000


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
        self._owned = Queue()
        self._resumes: deque[JobStream] = deque()
        self._slots: dict[JobId, _Slot] = {}
        self._quarantined: set[JobId] = set()
        self._unknown: set[JobId] = set()
        self._held: dict[JobId, JobStream] = {}
        self._cancelling: dict[JobId, trio.Event] = {}
        self._runs = 0
        self._killing = False
        self._desk = SubmissionDesk(log, ids, self._check_admission, self._enqueue)
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
                    message.reply.set(await self._desk.submit(message.request))
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

    def _check_admission(self, request: SubmitRequest) -> None:
        """Raise AdmissionPaused when a new job may not be accepted now."""
        if self.draining:
            raise Draining(RETRY_AFTER_S)
        if self._disk_low():
            raise DiskLow(RETRY_AFTER_S)
        if request.owner is None and self._taken() >= self._limits.queue_depth:
            raise QueueFull(RETRY_AFTER_S)

    def _taken(self) -> int:
        """Count what the depth of the queue counts: all that runs, waits or is about to."""
        waiting = len(self._queue) + sum(not owned(s) for s in self._resumes)
        return waiting + len(self._cancelling) + self._slots_taken() + self._desk.reserved

    # --- the other commands ------------------------------------------------------------------------

    async def _cancel(self, command: Cancel) -> CancelAnswer:
        for _ in range(HAND_OVERS_MAX):
            try:
                answer = await self._cancel_where_it_is(command)
            except HandedOver:
                continue
            if answer is not None:
                return answer
            await trio.lowlevel.checkpoint()
        raise Draining(RETRY_AFTER_S)

    async def _cancel_where_it_is(self, command: Cancel) -> CancelAnswer | None:
        """Cancel through the job's writer; None while it is on its way from one to the next."""
        job = command.job
        while job in self._cancelling:
            await self._cancelling[job].wait()
        slot = self._slots.get(job)
        if slot is not None:
            await slot.ready.wait()
            if slot.actor is None:
                return None
            return await slot.actor.cancel(by=command.by, request_id=command.request_id)
        if job in self._held:
            return await self._held[job].request_cancel(
                by=command.by, request_id=command.request_id
            )
        for queue in (self._queue, self._owned):
            entry = queue.take(job)
            if entry is not None:
                return await self._cancel_queued(command, queue, entry)
        state = await self._state(job)
        return "terminal" if state.terminal else None

    async def _cancel_queued(self, command: Cancel, queue: Queue, entry: QueuedJob) -> CancelAnswer:
        """End a job that waits; meanwhile nobody else may write to it."""
        done = self._cancelling[command.job] = trio.Event()
        try:
            stream = JobStream(self._log, self._ids, await self._state(command.job))
            await stream.append(
                [e.JobCancelRequested(), e.JobCancelled()],
                by=command.by,
                request_id=command.request_id,
            )
        except BaseException:
            queue.add(entry)
            self._wake.set()
            raise
        finally:
            del self._cancelling[command.job]
            done.set()
        self._wake.set()
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
        queue = self._owned if job in self._owned else self._queue
        position = queue.position(job)
        return Why(
            status=state.status,
            phase=state.phase,
            position=position,
            waits_for=waits_for(
                state,
                waiting=position is not None,
                draining=self.draining,
                paused=self._paused,
                slots=f"{self._slots_taken()} of {self._limits.capacity}",
            ),
            running=self.running if position is not None else (),
        )

    async def _state(self, job: JobId) -> JobState:
        return await read_state(self._log, job)

    # --- slots ---------------------------------------------------------------------------------------

    def adopt(self, recovered: Recovered) -> None:
        """Take what recovery found; before the service is ready."""
        for stream in recovered.queued:
            self._requeue(stream)
        for stream in recovered.resumed:
            self._await_resume(stream)
        for stream in recovered.unknown:
            self._unknown.add(stream.job)
            self._held[stream.job] = stream
            self._nursery.start_soon(self._await_known, stream)
        for stream in recovered.quarantined:
            self._quarantine(stream)
        self._wake.set()

    async def dispatch(self) -> None:
        """Give free slots to resumed runs, then to the queue, in order; runs until cancelled.

        Jobs that a job owns take no slot: they start at once.
        """
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            # Appenders of one batch are woken together: let all of them reach the queue first.
            await trio.lowlevel.checkpoint()
            while (found := self._next()) is not None:
                if isinstance(found, JobStream):
                    await self._resume(found)
                else:
                    await self._start_queued(found)

    def _next(self) -> JobStream | QueuedJob | None:
        """Take what starts next, None when nothing may."""
        if self.draining or self._paused:
            return None
        free = self._slots_taken() < self._limits.capacity
        for stream in self._resumes:
            if free or owned(stream):
                self._resumes.remove(stream)
                return stream
        return self._owned.take_first() or (self._queue.take_first() if free else None)

    async def stop(self) -> None:
        """Stop admitting, wait for the running jobs up to the drain limit, then kill at once."""
        self.draining = True
        self._look_idle()
        with trio.move_on_after(self._limits.drain_ms / 1000):
            await self._idle.wait()
        self._killing = True
        for slot in self._slots.values():
            if slot.actor is not None:
                slot.actor.stop()
        await self._idle.wait()

    def _slots_taken(self) -> int:
        """Count slots of the service that are not free, for whatever reason."""
        running = sum(not slot.owned for slot in self._slots.values())
        return running + len(self._quarantined) + len(self._unknown)

    def _enqueue(
        self, job: JobId, priority: int, submitted_seq: int, *, version: int, owned: bool
    ) -> None:
        queue = self._owned if owned else self._queue
        queue.add(
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
            owned=owned(stream),
        )

    def _await_resume(self, stream: JobStream) -> None:
        self._held[stream.job] = stream
        self._resumes.append(stream)
        self._wake.set()

    async def _start_queued(self, entry: QueuedJob) -> None:
        slot = self._slots[entry.job] = _Slot(entry.job, entry.owned)
        state = await self._state(entry.job)
        assert state.version == entry.version, "nobody writes to a job that waits"
        if self.draining:
            # The drain began while the stream was read: the job keeps its place in the queue.
            del self._slots[entry.job]
            (self._owned if entry.owned else self._queue).add(entry)
            slot.ready.set()
            self._look_idle()
            return
        await self._run_in(slot, JobStream(self._log, self._ids, state), resume=False)

    async def _resume(self, stream: JobStream) -> None:
        slot = self._slots[stream.job] = _Slot(stream.job, owned(stream))
        self._held.pop(stream.job, None)
        await self._run_in(slot, stream, resume=True)

    async def _run_in(self, slot: _Slot, stream: JobStream, *, resume: bool) -> None:
        slot.actor = JobActor(
            stream, self._host, self._artifacts, self._limits, self._recipe, self._ids.salt
        )
        if self._killing:
            slot.actor.stop()
        slot.ready.set()
        await self._nursery.start(self._run_job, slot.actor, resume)

    async def _run_job(
        self, actor: JobActor, resume: bool, task_status: trio.TaskStatus[None]
    ) -> None:
        once = StartedOnce(task_status)
        self._runs += 1
        try:
            finished = await self._run_to_its_end(actor, resume, once)
            await self._after(actor, finished)
        finally:
            self._runs -= 1
        self._look_idle()

    async def _run_to_its_end(self, actor: JobActor, resume: bool, once: StartedOnce) -> Finished:
        try:
            return await (actor.resume if resume else actor.begin)(once)
        except (DiskFull, LogBusy, LogClosed):
            # Only while stopping: the next start goes on from what is in the log.
            return "interrupted"
        except Exception as error:  # noqa: BLE001  a border: a crashed JobActor ends its job only
            self._on_crash(actor.stream.job, error)
            return await self._end_crashed(actor, error)
        finally:
            once.started()

    async def _after(self, actor: JobActor, finished: Finished) -> None:
        """Free the slot and do what the way the run finished asks for."""
        stream = actor.stream
        if finished != "terminal" and actor.run is not None:
            await self._let_go(actor, remove=finished == "requeued")
        if finished == "not_started":
            self._nursery.start_soon(self._pause)
        if stream.state.slot_quarantined:
            self._quarantine(stream)
        if finished in ("requeued", "not_started"):
            await self._give_back(stream)
        elif finished == "interrupted":
            self._held[stream.job] = stream
        self._slots.pop(stream.job, None)
        self._wake.set()
        if finished == "terminal" and actor.run is not None:
            await self._let_go(actor, remove=True)

    async def _give_back(self, stream: JobStream) -> None:
        """Let a job wait again, unless a request to cancel it came first."""
        if await stream.hand_over():
            del self._slots[stream.job]
            self._requeue(stream)
            return
        try:
            await stream.append_surely([e.JobCancelled()])
        except AppendRefused:
            # Only while stopping; the next start reads the request.
            self._held[stream.job] = stream

    async def _let_go(self, actor: JobActor, *, remove: bool) -> None:
        """Clean up after a run; what can not be done now is done by the next start."""
        assert actor.run is not None, "the caller looked"
        try:
            await clean(actor.stream, actor.run, remove=remove)
        except Exception as error:  # noqa: BLE001  a border: no host's bug ends the service
            self._on_crash(actor.stream.job, error)

    async def _end_crashed(self, actor: JobActor, error: Exception) -> Finished:
        """Take the owner token back: reap, and end the job ``error/internal``."""
        finished: Finished = "interrupted"
        with trio.CancelScope(shield=True):
            left = await self._end_run(actor)
            try:
                await actor.stream.reload()
                if not actor.stream.state.terminal:
                    last = e.JobErrored(cause="internal", detail=type(error).__name__, left=left)
                    await actor.stream.append_surely([last])
                finished = "terminal"
            except (DiskFull, LogBusy, LogClosed):
                # Only while stopping: the next start of the service ends the job.
                return finished
            except AppendRefused as refused:
                self._on_crash(actor.stream.job, refused)
        return finished

    async def _end_run(self, actor: JobActor) -> int:
        """End the processes of a crashed actor's run; answer how many are left, 1: not known."""
        if actor.run is None:
            return 0
        with trio.move_on_after(self._limits.reap_deadline_ms / 1000):
            try:
                return (await actor.run.end(grace_ms=0)).left
            except Exception as error:  # noqa: BLE001  a border: the slot stays quarantined
                self._on_crash(actor.stream.job, error)
        return 1

    def _quarantine(self, stream: JobStream) -> None:
        """Keep a slot taken until nothing of its job is left."""
        self._quarantined.add(stream.job)
        self._nursery.start_soon(self._release, stream)

    async def _release(self, stream: JobStream) -> None:
        async def released() -> None:
            self._quarantined.discard(stream.job)
            self._wake.set()

        await release_quarantined(stream, self._host, released)

    async def _await_known(self, stream: JobStream) -> None:
        known = await await_known(stream, self._host, self._limits)
        self._unknown.discard(stream.job)
        if known:
            self._await_resume(stream)
        else:
            self._held.pop(stream.job, None)
            self._quarantine(stream)

    async def _pause(self) -> None:
        """Start nothing for a moment: the log had no room for ``job.started``."""
        self._paused = True
        await trio.sleep(RETRY_S)
        self._paused = False
        self._wake.set()

    def _look_idle(self) -> None:
        if not self.draining:
            return
        if self._slots or self._runs:
            self._idle = trio.Event() if self._idle.is_set() else self._idle
        else:
            self._idle.set()


def owned(stream: JobStream) -> bool:
    """Answer whether another job owns this one."""
    return stream.state.submitted.owner is not None


def _fail(
    reply: Reply[Submitted] | Reply[CancelAnswer] | Reply[None] | Reply[Why], error: Exception
) -> None:
    if not reply.answered:
        reply.fail(error)
