"""What is shown of a job: pure functions of its fold and its payloads.

The same bytes come out for the live job and for the same seq years later. A field whose payload
was erased is null, and its name is in the list ``erased``.
"""

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from storage import events as e
from storage.event_log import Recorded
from storage.job_state import JobState
from storage.projections import ServiceState
from web.service import Why
from web.text import one_line

ERROR_CHARACTERS_MAX: Final = 2_000
PROMPT_PREVIEW_CHARACTERS: Final = 200
EVENT_TEXT_BYTES_MAX: Final = 16 * 1024
MICRO: Final = 1_000_000

# Any: a JSON object on its way out.
Json = dict[str, Any]
_encoder = msgspec.json.Encoder()


def encode(value: Json) -> bytes:
    """Answer the bytes of a JSON object; keys keep their order."""
    return _encoder.encode(value)


def timestamp(at_ns: int | None) -> str | None:
    """Answer a time as RFC 3339 in UTC with milliseconds; None stays None."""
    if at_ns is None:
        return None
    seconds, rest = divmod(at_ns, 1_000_000_000)
    at = dt.datetime.fromtimestamp(seconds, dt.UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03d}Z"


def parse_timestamp(text: str) -> int:
    """Answer an RFC 3339 time as UTC nanoseconds; raises ValueError."""
    at = dt.datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError("the time needs its zone, for example Z")
    whole = int(at.replace(microsecond=0).timestamp())
    at_ns = whole * 1_000_000_000 + at.microsecond * 1_000
    if not 0 <= at_ns < 1 << 63:
        raise ValueError("the time is out of range")
    return at_ns


# --- one job ------------------------------------------------------------------------------------


def job_digests(state: JobState) -> list[str]:
    """Answer the digests of the payloads that :func:`job_view` wants."""
    return [ref.digest for ref in _job_refs(state).values() if ref is not None]


def job_view(state: JobState, payloads: Mapping[str, bytes]) -> bytes:
    """Answer the JSON of ``GET /jobs/{id}``; a wanted payload that is missing was erased."""
    refs = _job_refs(state)
    data = {name: None if ref is None else payloads.get(ref.digest) for name, ref in refs.items()}
    erased = [name for name, ref in refs.items() if ref is not None and data[name] is None]
    submitted = state.submitted
    view: Json = {
        "job_id": state.job_id,
        "status": state.status,
        "cause": state.cause,
        "prompt": _text(data["prompt"]),
        "agent": submitted.agent,
        "model": submitted.model,
        "metadata": _raw_json(data["metadata"]),
        "created_at": timestamp(state.created_at_ns),
        "started_at": timestamp(state.started_at_ns),
        "finished_at": timestamp(state.finished_at_ns),
        "exit_code": exit_code(state.ended),
        "result": _text(data["result"]),
        "output": _lines(data["output"]),
        "stderr": _text(data["stderr"]) or "",
        "error": error_line(state, data["error"]),
        "usage": _usage(state),
        "workspace": _workspace(state),
        "attempts": state.attempts,
        "owner": submitted.owner,
        "seq": state.seq,
    }
    return encode(view | _more(state, erased))


def job_row(state: JobState, payloads: Mapping[str, bytes]) -> Json:
    """Answer the short form of a job, as lists show it; the prompt is cut."""
    prompt = payloads.get(state.submitted.prompt.digest)
    return {
        "job_id": state.job_id,
        "status": state.status,
        "cause": state.cause,
        "agent": state.submitted.agent,
        "model": state.submitted.model,
        "prompt": None if prompt is None else one_line(_decode(prompt), PROMPT_PREVIEW_CHARACTERS),
        "created_at": timestamp(state.created_at_ns),
        "started_at": timestamp(state.started_at_ns),
        "finished_at": timestamp(state.finished_at_ns),
        "exit_code": exit_code(state.ended),
        "usage": _usage(state),
        "attempts": state.attempts,
        "owner": state.submitted.owner,
        "labels": state.submitted.labels,
        "priority": state.submitted.priority,
        "seq": state.seq,
    }


def exit_code(ended: e.AgentEnded | None) -> int | None:
    """Answer the exit code; the negative number of the signal that killed the agent."""
    if ended is None:
        return None
    if ended.exit.code is not None:
        return ended.exit.code
    return None if ended.exit.signal is None else -ended.exit.signal


def error_line(state: JobState, error: bytes | None) -> str | None:
    """Answer why a job did not complete, on one line; None while it may still complete."""
    if state.cause is None:
        return None
    if error is not None and (text := one_line(_decode(error), ERROR_CHARACTERS_MAX)):
        return text
    detail = f" ({state.detail})" if state.detail else ""
    return _error_text(state) + detail


def _error_text(state: JobState) -> str:
    cause = state.cause
    match cause:
        case "agent_exit":
            code = exit_code(state.ended)
            return f"the agent ended with exit code {code}"
        case "timed_out":
            return f"the agent ran into its limit of {_seconds(state.submitted.timeout_ms)} s"
        case "budget_exceeded":
            budget = state.submitted.max_budget_microusd / MICRO
            return f"the agent used up its budget of {budget:g} USD"
        case "cancelled":
            by = state.cancel_requested_by
            return f"cancelled by {by}" if by else "cancelled"
        case "interrupted":
            return f"the run was interrupted: {state.interrupted_why or 'its keeper went away'}"
        case _:
            return _ERROR_TEXTS.get(str(cause), str(cause))


_ERROR_TEXTS: Final = {
    "no_result": "the agent ended without a result",
    "agent_reported_error": "the agent reported an error",
    "output_limit": "the agent wrote more than its output limit",
    "workspace_failed": "the workspace could not be prepared",
    "unlock_failed": "git-crypt could not unlock the workspace",
    "lfs_missing": "the repository needs git-lfs, which is not installed",
    "disk_full": "the disk was full",
    "spawn_failed": "the agent could not be started",
    "outcome_unknown": "it could not be found out how the run ended; nothing was repeated",
    "internal": "an internal error of watchkeeper; see the service's log",
}


def _job_refs(state: JobState) -> dict[str, e.PayloadRef | None]:
    return {
        "prompt": state.submitted.prompt,
        "metadata": state.submitted.metadata,
        "result": state.result,
        "output": None if state.stdout is None else state.stdout.tail,
        "stderr": None if state.stderr is None else state.stderr.tail,
        "error": state.error,
    }


def _more(state: JobState, erased: list[str]) -> Json:
    submitted = state.submitted
    parent = submitted.parent
    return {
        "kind": submitted.kind,
        "detail": state.detail,
        "labels": submitted.labels,
        "priority": submitted.priority,
        "max_attempts": submitted.max_attempts,
        "max_budget_usd": submitted.max_budget_microusd / MICRO,
        "timeout_seconds": _seconds(submitted.timeout_ms),
        "session_id": submitted.session_id,
        "submitted_by": state.submitted_by,
        "cancel_requested_by": state.cancel_requested_by,
        "containment": state.containment,
        "confined": state.confined,
        "backend": state.backend,
        "processes_left": state.left,
        "artifacts": {
            "state": state.artifact_state,
            "names": sorted({a.name for a in state.artifacts}),
        },
        "parent": None if parent is None else {"job_id": parent.job, "how": parent.how},
        "erased": erased,
    }


def _usage(state: JobState) -> Json:
    usage = state.usage
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cost_usd": usage.cost_microusd / MICRO,
        "turns": usage.turns,
        "complete": usage.complete,
    }


def _workspace(state: JobState) -> Json:
    asked, prepared = state.submitted.workspace, state.workspace
    if prepared is None:
        return {"repo": asked.repo, "ref": asked.ref, "base_commit": None, "kind": asked.kind}
    return {
        "repo": prepared.repo,
        "ref": prepared.ref,
        "base_commit": prepared.base_commit,
        "kind": prepared.kind,
        "strategy": prepared.strategy,
        "stale": prepared.stale,
    }


# --- events, the service ------------------------------------------------------------------------


def event_refs(event: e.AnyEvent) -> dict[str, e.PayloadRef]:
    """Answer the payloads that an event stands for, by the names of its fields."""
    values = ((name, getattr(event, name)) for name in event.__struct_fields__)
    return {name: value for name, value in values if isinstance(value, e.PayloadRef)}


def event_view(record: Recorded, payloads: Mapping[str, bytes]) -> Json:
    """Answer one event: its envelope, ``data`` as in the log, and the texts it stands for.

    ``texts`` holds ``{text, truncated}`` by field, or ``{erased: true}``.
    """
    view: Json = {
        "seq": int(record.seq),
        "stream": record.stream,
        "version": record.version,
        "type": record.type,
        "recorded_at": timestamp(record.recorded_at_ns),
        "by": record.by,
        "request_id": record.request_id,
        "caused_by": record.caused_by,
        "session": record.session,
        "epoch": record.epoch,
        "n": record.n,
        "leaf": record.leaf,
        "data": msgspec.to_builtins(record.event),
    }
    refs = event_refs(record.event)
    if refs:
        view["texts"] = {name: _event_text(payloads.get(r.digest)) for name, r in refs.items()}
    return view


def events_digests(records: Iterable[Recorded]) -> list[str]:
    """Answer the digests of the payloads of events."""
    return [ref.digest for record in records for ref in event_refs(record.event).values()]


def health_view(state: ServiceState) -> Json:
    """Answer the five public fields of ``/health``."""
    return {
        "status": "ok",
        "busy": state.busy,
        "active": state.active,
        "queued": state.queued,
        "capacity": state.capacity,
    }


def health_more(state: ServiceState) -> Json:
    """Answer the rest of the fold that ``/health`` shows to a caller with a token."""
    return {
        "seq": state.seq,
        "ready": state.ready,
        "draining": state.draining,
        "finished": state.finished,
        "quarantined": state.quarantined,
        "owned_active": state.owned_active,
        "owned_queued": state.owned_queued,
        "queue_depth": state.queue_depth,
        "version": state.version,
        "containment": state.containment,
        "confined": state.confined,
        "log_id": state.log_id,
    }


def why_view(job_id: str, why: Why) -> Json:
    """Answer the JSON of ``GET /jobs/{id}/why``."""
    return {
        "job_id": job_id,
        "status": why.status,
        "state": why.phase,
        "position": why.position,
        "waits_for": why.waits_for,
        "running": list(why.running),
    }


def _event_text(data: bytes | None) -> Json:
    if data is None:
        return {"erased": True}
    cut = len(data) > EVENT_TEXT_BYTES_MAX
    return {"text": _decode(data[:EVENT_TEXT_BYTES_MAX]), "truncated": cut}


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _text(data: bytes | None) -> str | None:
    return None if data is None else _decode(data)


def _raw_json(data: bytes | None) -> msgspec.Raw | None:
    return None if data is None else msgspec.Raw(data)


def _lines(data: bytes | None) -> list[str]:
    if not data:
        return []
    lines = _decode(data).split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _seconds(milliseconds: int) -> int | float:
    return milliseconds // 1000 if milliseconds % 1000 == 0 else milliseconds / 1000
