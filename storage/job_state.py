"""The fold of one job's stream: the same pure function for actor, HTTP read and auditor."""

from collections.abc import Iterable
from typing import Final, Literal, assert_never

import attrs

from storage import events as e
from storage.errors import IllegalTransition
from storage.event_log import Recorded
from storage.ids import JobId, job_of_stream

Status = Literal["queued", "running", "completed", "failed", "timeout", "error", "cancelled"]
Phase = Literal["queued", "started", "begun", "ended", "interrupted", "terminal"]
TERMINAL_STATUSES: Final[frozenset[Status]] = frozenset(
    {"completed", "failed", "timeout", "error", "cancelled"}
)

_ANY_LIVE: Final = frozenset({"queued", "started", "begun", "ended", "interrupted"})
_RUNNING: Final = frozenset({"started", "begun", "ended", "interrupted"})
LEGAL_IN: Final[dict[type[e.Event], frozenset[str]]] = {
    e.JobSubmitted: frozenset({"new"}),
    e.JobCancelRequested: _ANY_LIVE,
    e.JobStarted: frozenset({"queued"}),
    e.WorkspacePrepared: frozenset({"started"}),
    e.ProcessSpawned: frozenset({"started"}),
    e.AgentStarted: frozenset({"started"}),
    e.AgentTurnFinished: frozenset({"begun"}),
    e.AgentToolCalled: frozenset({"begun"}),
    e.UsageRecorded: frozenset({"begun", "ended", "interrupted"}),
    e.AgentMessaged: frozenset({"begun"}),
    e.SessionBound: frozenset({"begun"}),
    e.OutputRecorded: frozenset({"begun", "ended", "interrupted"}),
    e.AgentEnded: frozenset({"begun"}),
    e.ProcessReaped: _RUNNING | {"terminal"},
    e.ArtifactStored: _RUNNING,
    e.RunInterrupted: frozenset({"started", "begun"}),
    e.JobRequeued: frozenset({"started", "interrupted"}),
    e.JobCompleted: frozenset({"ended"}),
    e.JobFailed: frozenset({"ended"}),
    e.JobTimedOut: frozenset({"ended"}),
    e.JobErrored: _ANY_LIVE,
    e.JobCancelled: _ANY_LIVE,
    e.WorkspaceRemoved: frozenset({"terminal"}) | _RUNNING,
    e.SlotReleased: frozenset({"terminal"}),
    e.UsageLate: frozenset({"terminal"}) | _ANY_LIVE,
    e.WebhookDelivered: frozenset({"terminal"}),
    e.WebhookGivenUp: frozenset({"terminal"}),
    e.ArtifactErased: frozenset({"terminal"}),
    e.PayloadErased: frozenset({"terminal"}),
}
"""In which phase an event may come; ``new`` is a stream without an event."""

_OF_THE_CURRENT_RUN: Final = (e.AgentStarted, e.AgentEnded, e.RunInterrupted, e.JobRequeued)
_COUNTED_FROM_ANY_RUN: Final = (e.UsageLate, e.SlotReleased, e.ArtifactErased, e.PayloadErased)


@attrs.frozen(kw_only=True, slots=True)
class Usage:
    """Sums over the job's runs; ``complete`` false: the true figures are higher."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_microusd: int = 0
    turns: int = 0
    complete: bool = True


@attrs.frozen(kw_only=True, slots=True)
class ArtifactView:
    """One stored artifact; of several with one name, the last epoch's counts."""

    name: str
    digest: str
    size: int
    epoch: int
    erased: bool = False


@attrs.frozen(kw_only=True, slots=True)
class OutputTail:
    """The newest tail of one output stream; ``total`` bytes were written so far."""

    tail: e.PayloadRef
    offset: int
    total: int


@attrs.frozen(kw_only=True, slots=True)
class JobState:
    """All that is known of a job at one seq; times are UTC nanoseconds, None: not yet."""

    job_id: JobId
    submitted: e.JobSubmitted
    submitted_seq: int
    submitted_by: str
    created_at_ns: int
    status: Status = "queued"
    phase: Phase = "queued"
    seq: int
    version: int
    leaf: str
    epoch: int = 0
    attempts: int = 0
    unbegun_starts: int = 0
    started_at_ns: int | None = None
    begun_at_ns: int | None = None
    ended_at_ns: int | None = None
    finished_at_ns: int | None = None
    cancel_requested_by: str | None = None
    containment: str | None = None
    confined: bool = False
    agent_digest: str | None = None
    workspace: e.WorkspacePrepared | None = None
    workspace_removed_epoch: int = 0
    keeper: e.ProcessSpawned | None = None
    backend: str | None = None
    agent_session: str | None = None
    ended: e.AgentEnded | None = None
    interrupted_why: str | None = None
    cause: e.Cause | None = None
    detail: str | None = None
    error: e.PayloadRef | None = None
    result: e.PayloadRef | None = None
    left: int = 0
    slot_quarantined: bool = False
    artifact_state: e.ArtifactState = "none"
    stdout: OutputTail | None = None
    stderr: OutputTail | None = None
    usage: Usage = Usage()
    artifacts: tuple[ArtifactView, ...] = ()
    reaped_left: int = 0
    facts_seen: int = -1
    erased: frozenset[str] = frozenset()

    @property
    def terminal(self) -> bool:
        """Whether the one terminal event has been committed."""
        return self.phase == "terminal"

    def artifact(self, name: str) -> ArtifactView | None:
        """Answer the newest artifact of a name; None when there is none."""
        found = [a for a in self.artifacts if a.name == name]
        return max(found, key=lambda a: a.epoch) if found else None


def fold(history: Iterable[Recorded]) -> JobState | None:
    """Answer the state after a history in order; None for an empty one."""
    state: JobState | None = None
    for record in history:
        state = evolve(state, record)
    return state


def evolve(state: JobState | None, record: Recorded) -> JobState:
    """Answer the state after one more event; raises IllegalTransition.

    Reads nothing but its arguments. Facts of an older epoch leave the state as it is, but for
    the seq and the version.
    """
    check_legal(state, record)
    if state is None:
        assert isinstance(record.event, e.JobSubmitted), "checked by the table"
        return _submitted(record, record.event)
    assert record.version == state.version + 1, "a stream is folded without a gap"
    moved = attrs.evolve(state, seq=int(record.seq), version=record.version, leaf=record.leaf)
    if _of_older_run(state, record) and not isinstance(record.event, _COUNTED_FROM_ANY_RUN):
        return moved
    if record.n is not None:
        moved = attrs.evolve(moved, facts_seen=max(moved.facts_seen, record.n))
    return _apply(moved, record)


def check_legal(state: JobState | None, record: Recorded) -> None:
    """Raise IllegalTransition unless the event may come in this state."""
    phase = "new" if state is None else state.phase
    legal = phase in LEGAL_IN.get(type(record.event), frozenset())
    if not legal or (state is not None and _contradicts(state, record)):
        raise IllegalTransition(record.stream, phase, record.type)


def _contradicts(state: JobState, record: Recorded) -> bool:
    """Answer whether an event that its phase allows contradicts what was recorded before it."""
    event = record.event
    if isinstance(event, e.JobStarted):
        return record.epoch != state.epoch + 1 or state.cancel_requested_by is not None
    if record.epoch > state.epoch:
        return True
    if isinstance(event, (*_OF_THE_CURRENT_RUN, *e.TERMINAL)) and _of_older_run(state, record):
        return True
    if isinstance(event, e.JobRequeued):
        return state.cancel_requested_by is not None
    if isinstance(event, e.TERMINAL):
        return _contradicts_verdict(state, event)
    return False


def _contradicts_verdict(state: JobState, event: e.TerminalEvent) -> bool:
    cause: e.Cause | None = None if isinstance(event, e.JobCompleted) else event.cause
    if type(event) is not type(e.ending(cause)):
        return True
    # The verdict stands; only the crash of whoever was to write the end may replace it.
    return state.ended is not None and cause not in (state.ended.cause, "internal")


def _of_older_run(state: JobState, record: Recorded) -> bool:
    # Epoch 0 is "no run": a request to cancel, for example, belongs to the job as a whole.
    return 0 < record.epoch < state.epoch


def _submitted(record: Recorded, event: e.JobSubmitted) -> JobState:
    job_id = job_of_stream(record.stream)
    assert job_id is not None, "job.submitted belongs to a job's stream"
    return JobState(
        job_id=job_id,
        submitted=event,
        submitted_seq=int(record.seq),
        submitted_by=record.by,
        created_at_ns=record.recorded_at_ns,
        seq=int(record.seq),
        version=record.version,
        leaf=record.leaf,
    )


def _apply(state: JobState, record: Recorded) -> JobState:  # noqa: C901
    # One arm an event type, each a straight line: a table of functions would hide the same length.
    event = record.event
    at_ns = record.recorded_at_ns
    match event:
        case e.JobCancelRequested():
            return attrs.evolve(state, cancel_requested_by=state.cancel_requested_by or record.by)
        case e.JobStarted():
            return _started(state, record, event)
        case e.WorkspacePrepared():
            return attrs.evolve(state, workspace=event)
        case e.ProcessSpawned():
            return attrs.evolve(state, keeper=event)
        case e.AgentStarted():
            return _began(state, event, at_ns)
        case e.AgentTurnFinished():
            turns = state.usage.turns + 1
            return attrs.evolve(state, usage=attrs.evolve(state.usage, turns=turns))
        case e.UsageRecorded() | e.UsageLate():
            return attrs.evolve(state, usage=_add_usage(state.usage, event))
        case e.SessionBound():
            return attrs.evolve(state, agent_session=event.agent_session)
        case e.OutputRecorded():
            return _output_recorded(state, event)
        case e.AgentEnded():
            return _agent_ended(state, event, at_ns)
        case e.ProcessReaped():
            return attrs.evolve(state, reaped_left=event.left)
        case e.ArtifactStored():
            return _artifact_stored(state, event, record.epoch)
        case e.RunInterrupted():
            return attrs.evolve(state, phase="interrupted", interrupted_why=event.why)
        case e.JobRequeued():
            return _requeued(state)
        case e.JobCompleted() | e.JobFailed() | e.JobTimedOut() | e.JobErrored() | e.JobCancelled():
            return _ended_for_good(state, event, at_ns)
        case e.WorkspaceRemoved():
            return attrs.evolve(state, workspace_removed_epoch=record.epoch)
        case e.SlotReleased():
            return attrs.evolve(state, slot_quarantined=False, left=0)
        case e.ArtifactErased():
            return _artifact_erased(state, event)
        case e.PayloadErased():
            return attrs.evolve(state, erased=state.erased | frozenset(event.digests))
        case e.AgentToolCalled() | e.AgentMessaged() | e.WebhookDelivered() | e.WebhookGivenUp():
            return state
        case (
            e.JobSubmitted()
            | e.ServiceStarted()
            | e.ServiceReady()
            | e.ServiceConfigured()
            | e.ServiceDraining()
            | e.ServiceStopped()
            | e.TokenCreated()
            | e.TokenRevoked()
        ):
            raise IllegalTransition(record.stream, state.phase, record.type)
        case _:
            assert_never(event)


def _began(state: JobState, event: e.AgentStarted, at_ns: int) -> JobState:
    return attrs.evolve(
        state,
        phase="begun",
        backend=event.backend,
        attempts=state.attempts + 1,
        unbegun_starts=0,
        begun_at_ns=at_ns,
    )


def _output_recorded(state: JobState, event: e.OutputRecorded) -> JobState:
    tail = OutputTail(tail=event.tail, offset=event.offset, total=event.offset + event.size)
    if event.stream == "stdout":
        return attrs.evolve(state, stdout=tail)
    return attrs.evolve(state, stderr=tail)


def _agent_ended(state: JobState, event: e.AgentEnded, at_ns: int) -> JobState:
    return attrs.evolve(
        state,
        phase="ended",
        ended=event,
        ended_at_ns=at_ns,
        result=event.result,
        error=event.error,
        detail=event.detail,
    )


def _requeued(state: JobState) -> JobState:
    return attrs.evolve(
        state, status="queued", phase="queued", keeper=None, workspace=None, reaped_left=0
    )


def _artifact_stored(state: JobState, event: e.ArtifactStored, epoch: int) -> JobState:
    stored = ArtifactView(name=event.name, digest=event.digest, size=event.size, epoch=epoch)
    kept = tuple(a for a in state.artifacts if (a.name, a.epoch) != (stored.name, stored.epoch))
    return attrs.evolve(state, artifacts=(*kept, stored))


def _artifact_erased(state: JobState, event: e.ArtifactErased) -> JobState:
    artifacts = tuple(
        attrs.evolve(a, erased=a.erased or a.digest == event.digest) for a in state.artifacts
    )
    return attrs.evolve(state, artifacts=artifacts)


def _started(state: JobState, record: Recorded, event: e.JobStarted) -> JobState:
    assert record.epoch == state.epoch + 1, "epochs follow each other"
    return attrs.evolve(
        state,
        status="running",
        phase="started",
        epoch=record.epoch,
        facts_seen=-1 if record.n is None else record.n,
        unbegun_starts=state.unbegun_starts + 1,
        started_at_ns=state.started_at_ns or record.recorded_at_ns,
        containment=event.containment,
        confined=event.confined,
        agent_digest=event.agent_digest,
        interrupted_why=None,
        ended=None,
        ended_at_ns=None,
        begun_at_ns=None,
        stdout=None,
        stderr=None,
    )


def _ended_for_good(state: JobState, event: e.TerminalEvent, at_ns: int) -> JobState:
    cause: e.Cause | None = None if isinstance(event, e.JobCompleted) else event.cause
    return attrs.evolve(
        state,
        status=status_of(cause),
        phase="terminal",
        cause=cause,
        detail=event.detail or state.detail,
        error=event.error or state.error,
        left=event.left,
        slot_quarantined=event.left > 0,
        artifact_state=event.artifacts,
        finished_at_ns=at_ns,
    )


def status_of(cause: e.Cause | None) -> Status:
    """Answer the terminal status of a cause; None is completion."""
    if cause is None:
        return "completed"
    status = e.STATUS_OF_CAUSE[cause]
    for known in TERMINAL_STATUSES:
        if known == status:
            return known
    raise AssertionError(status)


def _add_usage(usage: Usage, event: e.UsageRecorded | e.UsageLate) -> Usage:
    return attrs.evolve(
        usage,
        input_tokens=usage.input_tokens + event.input_tokens,
        output_tokens=usage.output_tokens + event.output_tokens,
        cost_microusd=usage.cost_microusd + event.cost_microusd,
        complete=usage.complete and event.complete,
    )
