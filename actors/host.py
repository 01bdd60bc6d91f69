"""The seam to where jobs run: the verbs a JobActor uses, and the facts that come back.

The JobActor issues each verb after the event before it has been committed. Facts carry
(job, epoch, n), arrive at least once, and are de-duplicated by that key.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

import attrs

from storage import events as e
from storage.ids import JobId

Reconciled = Literal["alive", "gone", "unknown"]


@attrs.frozen(kw_only=True)
class RunSpec:
    """All that a host needs to run one epoch of a job; ``prompt`` is the text itself."""

    job: JobId
    epoch: int
    agent: str
    backend: str
    argv: tuple[str, ...] = ()
    prompt: str
    prompt_by: Literal["stdin", "file"] = "stdin"
    line_format: Literal["text", "jsonl"] = "text"
    model: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    workspace: e.WorkspaceRequest
    timeout_ms: int
    max_budget_microusd: int
    grace_ms: int
    output_bytes_max: int
    session_id: str | None = None


@attrs.frozen(kw_only=True)
class Prepared:
    """Answer of ``offer``: the workspace stands and the keeper waits for the agent's spec."""

    workspace: e.WorkspacePrepared
    keeper: e.ProcessSpawned


@attrs.frozen(kw_only=True)
class HostFact:
    """Something that happened in a run; ``payloads`` are the texts its event refers to.

    ``texts`` maps field names of the event to text that the JobActor salts and stores; the
    event's own fields of those names are placeholders (digest "").
    """

    job: JobId
    epoch: int
    n: int
    event: e.JobEvent
    texts: tuple[tuple[str, bytes], ...] = ()


@attrs.frozen(kw_only=True)
class CapturedFile:
    """An artifact file made by capture, already durable at ``path`` inside the data folder."""

    name: str
    path: str
    sha256: str
    size: int


@attrs.frozen(kw_only=True)
class Captured:
    """Answer of ``capture``: the files made, and what was reaped after it."""

    files: tuple[CapturedFile, ...]
    complete: bool
    reaped: e.ProcessReaped


@attrs.frozen(kw_only=True)
class AgentOutcome:
    """How the agent's run ended, before anything is reaped."""

    exit: e.ExitStatus
    cause: e.Cause | None = None
    detail: str | None = None
    error: bytes | None = None
    result: bytes | None = None
    interrupted: bool = False


class HostError(Exception):
    """A run could not be prepared or started; ``cause`` says which kind of trouble it is."""

    def __init__(self, cause: e.Cause, message: str, *, detail: str | None = None) -> None:
        super().__init__(message)
        self.cause: e.Cause = cause
        self.detail = detail


class Run(Protocol):
    """One epoch of one job on a host. All methods are called by its one JobActor."""

    async def offer(self) -> Prepared:
        """Make the workspace and the keeper; raises HostError. Cancelling it undoes it."""
        ...

    async def release(self) -> None:
        """Start the agent (its begun-batch is committed); raises HostError ``spawn_failed``."""
        ...

    def facts(self) -> AbstractAsyncContextManager[AsyncGenerator[Sequence[HostFact], None]]:
        """Batches of facts until the agent has ended; output facts coalesce, others never drop."""
        ...

    async def outcome(self) -> AgentOutcome:
        """Wait for the agent's own end (exit, result, limit); does not reap."""
        ...

    async def message(self, text: str) -> None:
        """Say something to the running agent; raises HostError when it can not be told."""
        ...

    async def end(self, *, grace_ms: int) -> e.ProcessReaped:
        """Ladder: TERM to all, grace, KILL to all, reap. ``grace_ms`` 0 kills at once.

        Shielded by the caller. Safe to call twice, and after the keeper was lost.
        """
        ...

    async def capture(self) -> Captured:
        """Store diff, changed files, bundle and output of this epoch, inside containment."""
        ...

    async def remove(self) -> None:
        """Move the workspace out of its place (its deletion goes on in the background)."""
        ...

    async def close(self) -> None:
        """End the keeper and let go of everything; the last call. Safe to call twice."""
        ...


class Host(Protocol):
    """A place where jobs run."""

    @property
    def containment(self) -> str:
        """The mechanism in force, for example ``subreaper``."""
        ...

    @property
    def containment_why_not(self) -> Mapping[str, str]:
        """Why each stronger mechanism is not in force; empty when the strongest is."""
        ...

    @property
    def confined(self) -> bool:
        """Whether jobs see only what is theirs."""
        ...

    def open_run(self, spec: RunSpec) -> Run:
        """Answer the run of this epoch; starts nothing yet."""
        ...

    async def reconcile(self, job: JobId, epoch: int, keeper: e.ProcessSpawned) -> Reconciled:
        """Answer whether a run of an earlier service process is alive."""
        ...

    async def reap(
        self, job: JobId, epoch: int, keeper: e.ProcessSpawned | None
    ) -> e.ProcessReaped:
        """End every process that an earlier service process left of this run."""
        ...

    def adopt_run(self, spec: RunSpec, workspace: e.WorkspacePrepared | None) -> Run:
        """Answer a run whose workspace exists already, to capture and remove it after a crash."""
        ...

    async def sweep(self, keep: frozenset[tuple[JobId, int]]) -> int:
        """Remove workspaces and processes of no run in ``keep``; answer how many were found."""
        ...
