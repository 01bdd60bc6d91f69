"""Reads of jobs straight from the log: fetch, fold, show. They never wait for an actor."""

import base64
import binascii
import re
from typing import Final

import trio

from storage.errors import JobUnknown, PointNotInLog
from storage.event_log import EVENTS_PER_PAGE_MAX, JobQuery, Recorded
from storage.ids import ID_PATTERN, JobId, job_stream
from storage.job_state import TERMINAL_STATUSES, JobState, fold
from web import views
from web.errors import bad_parameter
from web.service import ServiceLog

JOBS_PER_PAGE_MAX: Final = 200
WAIT_SECONDS_MAX: Final = 3_600.0
INTEGER_MAX: Final = (1 << 63) - 1
STATUSES: Final = ("queued", "running", *sorted(TERMINAL_STATUSES))


async def job_state(log: ServiceLog, job_id: str, *, at_seq: int | None = None) -> JobState:
    """Answer a job's fold, now or at a seq; raises JobUnknown, PointNotInLog."""
    if re.fullmatch(ID_PATTERN, job_id) is None:
        raise JobUnknown(job_id[:64])
    check_point(log, at_seq)
    state = fold(await log.read(job_stream(JobId(job_id)), upto_seq=at_seq))
    if state is None:
        raise JobUnknown(job_id)
    return state


def check_point(log: ServiceLog, at_seq: int | None) -> None:
    """Raise PointNotInLog for a seq past the head."""
    if at_seq is not None and at_seq > log.head:
        raise PointNotInLog(at_seq, log.head)


async def job_view(log: ServiceLog, state: JobState) -> bytes:
    """Answer the JSON of a job."""
    return views.job_view(state, await log.payloads(views.job_digests(state)))


async def wait_terminal(log: ServiceLog, job_id: str, timeout_s: float) -> JobState:
    """Answer the job when it is terminal, or as it is at the limit."""
    state = await job_state(log, job_id)
    with trio.move_on_after(timeout_s):
        while not state.terminal:
            await log.wait_past(state.seq, stream=job_stream(state.job_id))
            state = await job_state(log, job_id)
    return state


async def jobs_page(log: ServiceLog, query: JobQuery) -> views.Json:
    """Answer one page of jobs, newest first; ``next_cursor`` None is the last page."""
    found = await log.jobs(query)
    states = [await job_state(log, job_id) for _, job_id in found]
    prompts = await log.payloads([state.submitted.prompt.digest for state in states])
    full = len(found) == query.limit
    return {
        "jobs": [views.job_row(state, prompts) for state in states],
        "next_cursor": cursor_of(found[-1][0]) if found and full else None,
    }


async def events_page(
    log: ServiceLog, records: list[Recorded], *, after: int, limit: int
) -> views.Json:
    """Answer one page of events; ``next_after`` is where the next page begins."""
    page = records[:limit]
    payloads = await log.payloads(views.events_digests(page))
    return {
        "events": [views.event_view(record, payloads) for record in page],
        "next_after": int(page[-1].seq) if page else after,
        "more": len(records) > limit,
        "head": int(log.head),
    }


def cursor_of(seq: int) -> str:
    """Answer an opaque cursor."""
    return base64.urlsafe_b64encode(f"1:{seq}".encode()).decode().rstrip("=")


def seq_of_cursor(cursor: str) -> int:
    """Answer the seq in a cursor; raises Problem 400."""
    try:
        text = base64.b64decode(
            cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True
        ).decode()
    except (binascii.Error, ValueError) as error:
        raise bad_parameter("cursor", "is not one of ours") from error
    version, _, seq = text.partition(":")
    if version != "1":
        raise bad_parameter("cursor", "is not one of ours")
    return parse_integer("cursor", seq)


def parse_integer(name: str, text: str, *, low: int = 0, high: int = INTEGER_MAX) -> int:
    """Answer an integer parameter within its range; raises Problem 400."""
    if re.fullmatch(r"-?[0-9]{1,19}", text, re.ASCII) is None or not low <= int(text) <= high:
        most = "" if high == INTEGER_MAX else f" to {high}"
        raise bad_parameter(name, f"must be an integer from {low}{most}")
    return int(text)


def parse_seconds(name: str, text: str, *, high: float) -> float:
    """Answer a number of seconds; raises Problem 400."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text, re.ASCII) is None or float(text) > high:
        raise bad_parameter(name, f"must be seconds from 0 to {high:g}")
    return float(text)


def parse_time(name: str, text: str) -> int:
    """Answer an RFC 3339 time as nanoseconds; raises Problem 400."""
    try:
        return views.parse_timestamp(text.replace(" ", "+"))
    except (ValueError, OverflowError) as error:
        raise bad_parameter(name, "must be a time like 2026-01-31T12:00:00Z") from error


def job_query(arguments: dict[str, list[str]]) -> JobQuery:
    """Answer the filter that query parameters ask for; raises Problem 400 naming one."""
    known = {"status", "agent", "label", "owner", "since", "until", "limit", "cursor"}
    for name in arguments:
        if name not in known:
            raise bad_parameter(name[:100], f"is not known; known are {', '.join(sorted(known))}")
    first = {name: values[0] for name, values in arguments.items()}
    statuses = [s for value in arguments.get("status", []) for s in value.split(",")]
    for status in statuses:
        if status not in STATUSES:
            raise bad_parameter("status", f"must be one of {', '.join(STATUSES)}")
    return JobQuery(
        status=frozenset(statuses) or None,
        agent=first.get("agent"),
        owner=first.get("owner"),
        label=_label(first.get("label")),
        since_ns=parse_time("since", first["since"]) if "since" in first else None,
        until_ns=parse_time("until", first["until"]) if "until" in first else None,
        before=seq_of_cursor(first["cursor"]) if "cursor" in first else None,
        limit=parse_integer("limit", first.get("limit", "50"), low=1, high=JOBS_PER_PAGE_MAX),
    )


def page_limit(text: str | None) -> int:
    """Answer how many events a page may have; one less than the log reads at once."""
    return parse_integer("limit", text or "200", low=1, high=EVENTS_PER_PAGE_MAX - 1)


def _label(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    key, colon, value = text.partition(":")
    if not colon or not key:
        raise bad_parameter("label", "must be KEY:VALUE")
    return key, value
