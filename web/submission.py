"""A parsed request becomes a job to be accepted."""

import re
from typing import Final

import attrs

from storage import events as e
from web.auth import Principal
from web.errors import bad_field, bad_parameter
from web.schemas import ExecuteBody, WorkspaceBody, canonical
from web.service import SubmitRequest

MICRO: Final = 1_000_000
KEY_CHARACTERS_MAX: Final = 255

_REMOTE: Final = re.compile(r"(?:https?|ssh|git)://[^\s]+|[\w.-]+@[\w.-]+:[^:\s][^\s]*", re.ASCII)
_HELPER: Final = re.compile(r"[A-Za-z0-9+.-]+::")


@attrs.frozen(kw_only=True)
class WorkspaceDefaults:
    """What the configuration says of workspaces; None: nothing.

    ``local_repositories`` lets every caller name a repository of this machine.
    """

    repo: str | None = None
    ref: str | None = None
    kind: e.WorkspaceKind | None = None
    local_repositories: bool = False


def submit_request(
    body: ExecuteBody,
    principal: Principal,
    defaults: WorkspaceDefaults,
    *,
    request_id: str | None = None,
    idempotency_key: str | None = None,
) -> SubmitRequest:
    """Answer the job that a body asks for, in the units of the runtime; raises Problem."""
    local = principal.local or defaults.local_repositories
    return SubmitRequest(
        prompt=body.prompt,
        agent=body.agent,
        model=body.model,
        max_budget_microusd=max(1, round(body.max_budget_usd * MICRO)),
        timeout_ms=round(body.timeout_seconds * 1000),
        metadata=bytes(body.metadata) or None,
        workspace=workspace_request(body.workspace or WorkspaceBody(), defaults, local=local),
        priority=body.priority,
        max_attempts=body.max_attempts,
        session_id=body.session_id,
        labels=dict(body.labels or {}),
        webhook=body.webhook,
        by=principal.name,
        request_id=request_id,
        idempotency_key=idempotency_key,
        body_digest_source=canonical(body),
        local=local,
    )


def workspace_request(
    asked: WorkspaceBody, defaults: WorkspaceDefaults, *, local: bool
) -> e.WorkspaceRequest:
    """Answer the workspace that was asked for, completed by the defaults.

    The configured ref goes with the configured repository only. Raises Problem for an address
    that is refused, and for a clone without one.
    """
    check_repository(asked.repo, configured=defaults.repo, local=local)
    if asked.ref is not None and asked.ref.startswith("-"):
        raise bad_field("workspace.ref", "must not begin with a dash")
    kind = asked.kind
    if kind is None and asked.repo is not None:
        kind = "clone"
    if kind is None:
        kind = defaults.kind or ("clone" if defaults.repo else "scratch")
    if kind == "scratch":
        if asked.repo is not None:
            raise bad_field("workspace.kind", "a scratch workspace has no repository")
        return e.WorkspaceRequest(kind="scratch")
    repo = asked.repo or defaults.repo
    if repo is None:
        raise bad_field("workspace.repo", "is needed for a clone: none is configured")
    ref = asked.ref or (defaults.ref if asked.repo is None else None)
    return e.WorkspaceRequest(repo=repo, ref=ref, kind="clone")


def check_repository(repo: str | None, *, configured: str | None, local: bool) -> None:
    """Raise Problem unless a job of this caller may clone from the address."""
    if repo is None or repo == configured:
        return
    if repo.startswith("-") or _HELPER.match(repo):
        raise bad_field("workspace.repo", "this form of address is refused")
    if not local and not _REMOTE.fullmatch(repo):
        raise bad_field(
            "workspace.repo",
            "must be an https, ssh or git address; paths of this machine need a local caller",
        )


def idempotency_key(value: str | None) -> str | None:
    """Answer a client's key; raises Problem when it is no header that we can keep."""
    if value is None:
        return None
    if not 1 <= len(value) <= KEY_CHARACTERS_MAX or not value.isascii() or not value.isprintable():
        raise bad_parameter(
            "Idempotency-Key", f"must be 1 to {KEY_CHARACTERS_MAX} printable ASCII characters"
        )
    return value
