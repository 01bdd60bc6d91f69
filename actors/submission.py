"""What a request becomes in the log: the event of its submission."""

import hashlib

from actors.messages import SubmitRequest
from storage import codec
from storage import events as e
from storage.event_log import Fact
from storage.ids import IdSource


def key_digest(by: str, idempotency_key: str) -> str:
    """Answer the digest of a client's idempotency key, which is its own for each principal."""
    return hashlib.sha256(f"{by}\0{idempotency_key}".encode()).hexdigest()


def submission(request: SubmitRequest, key: str | None, ids: IdSource) -> Fact:
    """Answer ``job.submitted`` with its texts salted; ``key`` is the digest of the client's key."""
    prompt = codec.payload(request.prompt.encode(), ids.salt())
    payloads = [prompt]
    metadata = webhook = idempotency = None
    if request.metadata is not None:
        payloads.append(codec.payload(request.metadata, ids.salt()))
        metadata = payloads[-1].ref
    if request.webhook is not None:
        payloads.append(codec.payload(request.webhook.encode(), ids.salt()))
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
