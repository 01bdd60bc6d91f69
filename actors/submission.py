"""The desk where requests become jobs, one for each idempotency key."""

import hashlib
from collections.abc import Callable
from typing import Protocol

import trio

from actors.errors import KeyReused
from actors.messages import SubmitRequest, Submitted
from storage import codec
from storage import events as e
from storage.errors import DuplicateKey, JobUnknown
from storage.event_log import Append, EventLog, Fact
from storage.ids import IdSource, JobId, job_stream
from storage.job_state import JobState, fold


class Accepted(Protocol):
    """Takes a job whose submission is committed."""

    def __call__(
        self, job: JobId, priority: int, submitted_seq: int, *, version: int, owned: bool
    ) -> None:
        """Let the job wait at its place."""
        ...


class SubmissionDesk:
    """Commits submissions; ``reserved`` counts those under way, which have a place already.

    ``check`` raises when a new job may not be accepted now; a replay is answered before it.
    """

    def __init__(
        self,
        log: EventLog,
        ids: IdSource,
        check: Callable[[SubmitRequest], None],
        accepted: Accepted,
    ) -> None:
        self._log = log
        self._ids = ids
        self._check = check
        self._accepted = accepted
        self._keys_in_flight: dict[str, trio.Event] = {}
        self.reserved = 0

    async def submit(self, request: SubmitRequest) -> Submitted:
        """Accept a job, or answer the one that an equal request made; returns after the commit.

        Raises AdmissionError and AppendRefused, with nothing written.
        """
        if request.idempotency_key is None:
            return await self._admit(request, None)
        key = key_digest(request.by, request.idempotency_key)
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
        state = await read_state(self._log, job)
        prompt = await self._log.payload_row(state.submitted.prompt.digest)
        recorded = state.submitted.idempotency
        assert recorded is not None, "a job found by its key has one"
        if prompt is not None:
            body = codec.salted_digest(prompt.salt, request.body_digest_source)
            if body != recorded.body:
                raise KeyReused(job)
        return Submitted(job_id=job, seq=state.submitted_seq, replay=True)

    async def _admit(self, request: SubmitRequest, key: str | None) -> Submitted:
        self._check(request)
        own = request.owner is None
        self.reserved += own
        try:
            job = self._ids.new_job()
            fact = submission(request, key, self._ids)
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
            self._accepted(job, request.priority, seq, version=1, owned=not own)
        finally:
            self.reserved -= own
        return Submitted(job_id=job, seq=seq)


async def read_state(log: EventLog, job: JobId) -> JobState:
    """Answer the state of a job from the log; raises JobUnknown."""
    state = fold(await log.read(job_stream(job)))
    if state is None:
        raise JobUnknown(job)
    return state


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
