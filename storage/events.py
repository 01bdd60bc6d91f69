"""The vocabulary of the log: every fact that can ever be written, as a closed union.

Each class is one event type; its tag is the name in the log. Times are UTC nanoseconds,
durations milliseconds, money integer micro-dollars, sizes bytes. Text that people or agents
wrote is never here: a :class:`PayloadRef` stands for it, and the bytes lie beside the log, where
they can be erased without touching a hash.
"""

from typing import Final, Literal

import msgspec

from storage.ids import JobId

JobKind = Literal["agent", "tool", "graph"]
WorkspaceKind = Literal["clone", "scratch"]
OutputStream = Literal["stdout", "stderr"]
ReapPhase = Literal["agent", "capture", "recovery"]
UsageSource = Literal["reported", "priced", "lower_bound"]
ArtifactState = Literal["complete", "incomplete", "none"]
ToolOutcome = Literal["ok", "failed", "denied"]

Cause = Literal[
    "agent_exit",
    "no_result",
    "agent_reported_error",
    "budget_exceeded",
    "output_limit",
    "timed_out",
    "cancelled",
    "workspace_failed",
    "unlock_failed",
    "lfs_missing",
    "disk_full",
    "spawn_failed",
    "interrupted",
    "outcome_unknown",
    "internal",
]


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value inside an event; fields at their default are left out of the body."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """A committed fact, or one about to be committed."""


class PayloadRef(Part, frozen=True, kw_only=True):
    """Stands for bytes that can be erased: ``sha256(salt + bytes)`` in hex, and their number."""

    digest: str
    size: int


class WorkspaceRequest(Part, frozen=True, kw_only=True):
    """What the submitter asked of the workspace; None leaves the choice to the configuration."""

    repo: str | None = None
    ref: str | None = None
    kind: WorkspaceKind = "scratch"


class Lineage(Part, frozen=True, kw_only=True):
    """Where a job that repeats or continues another one comes from."""

    job: JobId
    how: Literal["retry", "fork"]
    seq: int
    leaf: str
    commit: str | None = None


class IdempotencyRef(Part, frozen=True, kw_only=True):
    """Digests of the client's key (scoped to its principal) and of the request's body."""

    key: str
    body: str


class ExitStatus(Part, frozen=True, kw_only=True):
    """How a process ended: an exit code, or the signal that killed it; both None: not known."""

    code: int | None = None
    signal: int | None = None


class ReapedProcess(Part, frozen=True, kw_only=True):
    """One process that was seen to end; ``how`` is ``exit N``, ``signal N`` or ``gone``."""

    pid: int
    how: str


# msgspec inherits neither ``kw_only`` nor, for type checkers, ``frozen``: every class says both.


# --- events of a job --------------------------------------------------------------------------


class JobSubmitted(Event, tag="job.submitted", frozen=True, kw_only=True):
    """A job was accepted. ``owner`` None is the service; ``timeout_ms`` counts the agent's run."""

    kind: JobKind = "agent"
    owner: JobId | None = None
    agent: str
    model: str | None = None
    prompt: PayloadRef
    metadata: PayloadRef | None = None
    max_budget_microusd: int
    timeout_ms: int
    workspace: WorkspaceRequest
    priority: int = 0
    max_attempts: int = 1
    session_id: str | None = None
    webhook: PayloadRef | None = None
    labels: dict[str, str] = {}
    idempotency: IdempotencyRef | None = None
    parent: Lineage | None = None


class JobCancelRequested(Event, tag="job.cancel_requested", frozen=True, kw_only=True):
    """Somebody (the envelope's ``by``) asked for the job to end."""


class JobStarted(Event, tag="job.started", frozen=True, kw_only=True):
    """A run (the envelope's ``epoch``) has its slot."""

    agent_digest: str
    containment: str
    confined: bool = False


class WorkspacePrepared(Event, tag="workspace.prepared", frozen=True, kw_only=True):
    """The checkout stands. ``base_commit`` None: no repository, or one without a commit."""

    kind: WorkspaceKind
    strategy: str
    repo: str | None = None
    ref: str | None = None
    base_commit: str | None = None
    stale: bool = False
    stale_why: str | None = None


class ProcessSpawned(Event, tag="process.spawned", frozen=True, kw_only=True):
    """The keeper of this run exists; a pid is its process only if start time and boot agree."""

    keeper: str
    pid: int
    start_time: int
    boot_id: str


class AgentStarted(Event, tag="agent.started", frozen=True, kw_only=True):
    """The run has begun: from here on the agent may have had an effect."""

    backend: str


class AgentTurnFinished(Event, tag="agent.turn_finished", frozen=True, kw_only=True):
    """The agent finished one turn (counted from 1)."""

    turn: int
    text: PayloadRef | None = None


class AgentToolCalled(Event, tag="agent.tool_called", frozen=True, kw_only=True):
    """A tool call of the agent has ended; the arguments are cut to a bounded length."""

    name: str
    arguments: PayloadRef | None = None
    outcome: ToolOutcome = "ok"
    duration_ms: int | None = None


class UsageRecorded(Event, tag="usage.recorded", frozen=True, kw_only=True):
    """Tokens and cost to be added; ``complete`` false: more was used than could be known."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_microusd: int = 0
    source: UsageSource = "reported"
    complete: bool = True
    model: str | None = None


class AgentMessaged(Event, tag="agent.messaged", frozen=True, kw_only=True):
    """A message reached the running agent."""

    text: PayloadRef


class SessionBound(Event, tag="session.bound", frozen=True, kw_only=True):
    """Our session and the agent's own name for it."""

    session_id: str
    agent_session: str


class OutputRecorded(Event, tag="output.recorded", frozen=True, kw_only=True):
    """A tail of what was written: ``tail`` ends at ``offset + size`` bytes of the stream."""

    stream: OutputStream
    offset: int
    size: int
    tail: PayloadRef


class AgentEnded(Event, tag="agent.ended", frozen=True, kw_only=True):
    """The agent's verdict, which stands from here; ``cause`` None is success."""

    exit: ExitStatus
    cause: Cause | None = None
    detail: str | None = None
    error: PayloadRef | None = None
    result: PayloadRef | None = None


class ProcessReaped(Event, tag="process.reaped", frozen=True, kw_only=True):
    """What was seen when the processes of a run were ended; ``left`` could not be ended."""

    phase: ReapPhase
    pids: list[ReapedProcess] = []
    seen: int = 0
    left: int = 0
    duration_ms: int = 0


class ArtifactStored(Event, tag="artifact.stored", frozen=True, kw_only=True):
    """A file is on disk; ``digest`` is salted, as for a payload."""

    name: str
    digest: str
    size: int


class RunInterrupted(Event, tag="run.interrupted", frozen=True, kw_only=True):
    """A run ended without a verdict: the service or its keeper went away under it."""

    why: str


class JobRequeued(Event, tag="job.requeued", frozen=True, kw_only=True):
    """The job waits for a slot again, at its old place; the next run has the next epoch."""

    why: str


class JobEnding(Event, frozen=True, kw_only=True):
    """What every terminal event says; ``left`` processes survived (0 but for the escape)."""

    detail: str | None = None
    error: PayloadRef | None = None
    left: int = 0
    artifacts: ArtifactState = "none"


class JobCompleted(JobEnding, tag="job.completed", frozen=True, kw_only=True):
    """The agent ended well."""


class JobFailed(JobEnding, tag="job.failed", frozen=True, kw_only=True):
    """The agent ended badly."""

    cause: Cause


class JobTimedOut(JobEnding, tag="job.timed_out", frozen=True, kw_only=True):
    """The agent ran into its own limit."""

    cause: Cause = "timed_out"


class JobErrored(JobEnding, tag="job.errored", frozen=True, kw_only=True):
    """We could not run the job."""

    cause: Cause


class JobCancelled(JobEnding, tag="job.cancelled", frozen=True, kw_only=True):
    """The job was cancelled."""

    cause: Cause = "cancelled"


class WorkspaceRemoved(Event, tag="workspace.removed", frozen=True, kw_only=True):
    """The checkout of this epoch is gone from its place."""


class SlotReleased(Event, tag="slot.released", frozen=True, kw_only=True):
    """A slot that was quarantined because processes were left is free again."""


class UsageLate(Event, tag="usage.late", frozen=True, kw_only=True):
    """Usage of a run whose job had already ended, or that belongs to an older epoch."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_microusd: int = 0
    source: UsageSource = "reported"
    complete: bool = True
    model: str | None = None


class WebhookDelivered(Event, tag="webhook.delivered", frozen=True, kw_only=True):
    """The webhook's receiver answered 2xx at this attempt (counted from 1)."""

    attempt: int


class WebhookGivenUp(Event, tag="webhook.given_up", frozen=True, kw_only=True):
    """The webhook was not delivered in all its attempts."""

    attempts: int
    why: str


class ArtifactErased(Event, tag="artifact.erased", frozen=True, kw_only=True):
    """The bytes of an artifact were erased for good."""

    digest: str


class PayloadErased(Event, tag="payload.erased", frozen=True, kw_only=True):
    """The bytes of payloads were erased for good; their digests stay."""

    digests: list[str]


# --- events of the service ----------------------------------------------------------------------


class ServiceStarted(Event, tag="service.started", frozen=True, kw_only=True):
    """The log was checked and is ours; recovery's appends follow."""

    version: str
    config_digest: str
    capacity: int
    queue_depth: int
    containment: str
    boot_id: str
    log_id: str
    confined: bool = False


class ServiceReady(Event, tag="service.ready", frozen=True, kw_only=True):
    """Recovery is over; ``recovered`` jobs were not terminal at the start."""

    recovered: int


class ServiceConfigured(Event, tag="service.configured", frozen=True, kw_only=True):
    """The limits have changed without a restart."""

    capacity: int
    queue_depth: int
    config_digest: str


class ServiceDraining(Event, tag="service.draining", frozen=True, kw_only=True):
    """No job is admitted any more; running ones have ``drain_ms`` left."""

    drain_ms: int


class ServiceStopped(Event, tag="service.stopped", frozen=True, kw_only=True):
    """The service ended by itself."""


class TokenCreated(Event, tag="token.created", frozen=True, kw_only=True):
    """An API token exists; ``digest`` is the hash at rest."""

    name: str
    scopes: list[str]
    digest: str


class TokenRevoked(Event, tag="token.revoked", frozen=True, kw_only=True):
    """An API token is refused from here on."""

    name: str


TerminalEvent = JobCompleted | JobFailed | JobTimedOut | JobErrored | JobCancelled
JobEvent = (
    JobSubmitted
    | JobCancelRequested
    | JobStarted
    | WorkspacePrepared
    | ProcessSpawned
    | AgentStarted
    | AgentTurnFinished
    | AgentToolCalled
    | UsageRecorded
    | AgentMessaged
    | SessionBound
    | OutputRecorded
    | AgentEnded
    | ProcessReaped
    | ArtifactStored
    | RunInterrupted
    | JobRequeued
    | JobCompleted
    | JobFailed
    | JobTimedOut
    | JobErrored
    | JobCancelled
    | WorkspaceRemoved
    | SlotReleased
    | UsageLate
    | WebhookDelivered
    | WebhookGivenUp
    | ArtifactErased
    | PayloadErased
)
ServiceEvent = (
    ServiceStarted
    | ServiceReady
    | ServiceConfigured
    | ServiceDraining
    | ServiceStopped
    | TokenCreated
    | TokenRevoked
)
AnyEvent = JobEvent | ServiceEvent

TERMINAL: Final = (JobCompleted, JobFailed, JobTimedOut, JobErrored, JobCancelled)
STATUS_OF_CAUSE: Final[dict[Cause, str]] = {
    "agent_exit": "failed",
    "no_result": "failed",
    "agent_reported_error": "failed",
    "budget_exceeded": "failed",
    "output_limit": "failed",
    "timed_out": "timeout",
    "cancelled": "cancelled",
    "workspace_failed": "error",
    "unlock_failed": "error",
    "lfs_missing": "error",
    "disk_full": "error",
    "spawn_failed": "error",
    "interrupted": "error",
    "outcome_unknown": "error",
    "internal": "error",
}


def event_type(event: AnyEvent) -> str:
    """Answer the name of an event in the log, for example ``job.started``."""
    tag = event.__struct_config__.tag
    assert isinstance(tag, str), "every event class has its tag"
    return tag


def ending(
    cause: Cause | None,
    *,
    detail: str | None = None,
    error: PayloadRef | None = None,
    left: int = 0,
    artifacts: ArtifactState = "none",
) -> TerminalEvent:
    """Answer the terminal event for a cause; None is completion."""
    if cause is None:
        return JobCompleted(detail=detail, error=error, left=left, artifacts=artifacts)
    match STATUS_OF_CAUSE[cause]:
        case "failed":
            return JobFailed(
                cause=cause, detail=detail, error=error, left=left, artifacts=artifacts
            )
        case "timeout":
            return JobTimedOut(detail=detail, error=error, left=left, artifacts=artifacts)
        case "cancelled":
            return JobCancelled(detail=detail, error=error, left=left, artifacts=artifacts)
        case status:
            assert status == "error", f"cause {cause} has no terminal event"
            return JobErrored(
                cause=cause, detail=detail, error=error, left=left, artifacts=artifacts
            )
