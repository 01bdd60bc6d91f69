"""What the Supervisor can be asked, and what it answers."""

from typing import Literal

import attrs

from actors.kernel import Reply
from storage import events as e
from storage.ids import JobId

CancelAnswer = Literal["accepted", "terminal"]


@attrs.frozen(kw_only=True)
class SubmitRequest:
    """A job to be accepted; parsed, so that every value is in its range.

    ``metadata`` is JSON text. ``idempotency_key`` is the client's own, None when it sent none;
    ``body_digest_source`` are the bytes that two equal requests share. ``local`` allows the
    ``shell`` agent and repositories on this machine.
    """

    prompt: str
    agent: str
    model: str | None = None
    max_budget_microusd: int = 5_000_000
    timeout_ms: int = 2_700_000
    metadata: bytes | None = None
    workspace: e.WorkspaceRequest = e.WorkspaceRequest()
    priority: int = 0
    max_attempts: int = 1
    session_id: str | None = None
    labels: dict[str, str] = attrs.field(factory=dict)
    webhook: str | None = None
    by: str = "service"
    request_id: str | None = None
    idempotency_key: str | None = None
    body_digest_source: bytes = b""
    kind: e.JobKind = "agent"
    owner: JobId | None = None
    parent: e.Lineage | None = None
    local: bool = False


@attrs.frozen(kw_only=True)
class Submitted:
    """The accepted job; ``replay`` when an earlier request with the same key made it."""

    job_id: JobId
    seq: int
    replay: bool = False


@attrs.frozen(kw_only=True)
class Why:
    """Why a job is in its state: ``position`` is how many start before it (None: not queued)."""

    status: str
    phase: str
    position: int | None
    waits_for: str
    running: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Submit:
    """Accept a job."""

    request: SubmitRequest
    reply: Reply[Submitted]


@attrs.frozen(kw_only=True)
class Cancel:
    """End a job."""

    job: JobId
    by: str
    request_id: str | None
    reply: Reply[CancelAnswer]


@attrs.frozen(kw_only=True)
class Tell:
    """Say something to the agent of a job."""

    job: JobId
    text: str
    by: str
    request_id: str | None
    reply: Reply[None]


@attrs.frozen(kw_only=True)
class Explain:
    """Say why a job is in its state."""

    job: JobId
    reply: Reply[Why]


Command = Submit | Cancel | Tell | Explain
