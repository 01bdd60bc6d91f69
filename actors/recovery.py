"""Recovery: what becomes of each job that was not over when the service ended.

``plan`` is the crash table of the specification as a pure function; the rest carries it out,
and may itself be killed at any point: every step leaves a state that the next start reads.
"""

from typing import Literal, assert_never

import attrs
import trio

from actors.host import Host
from actors.limits import Limits
from actors.stream import JobStream
from storage import events as e
from storage.event_log import EventLog, JobQuery
from storage.ids import IdSource, JobId, job_stream
from storage.job_state import TERMINAL_STATUSES, JobState, fold

Plan = Literal["queue", "cancel", "requeue", "give_up", "interrupt", "resume"]
PARALLEL_MAX = 64


@attrs.define
class Recovered:
    """What recovery found, for the Supervisor; ``found`` counts the jobs that were not over.

    ``unknown`` are runs that the host can not tell about yet, ``quarantined`` are jobs that are
    over but left processes.
    """

    queued: list[JobStream] = attrs.field(factory=list)
    resumed: list[JobStream] = attrs.field(factory=list)
    unknown: list[JobStream] = attrs.field(factory=list)
    quarantined: list[JobStream] = attrs.field(factory=list)
    found: int = 0


def plan(state: JobState, limits: Limits) -> Plan:
    """Answer what becomes of a job that is not terminal at a start of the service."""
    cancelled = state.cancel_requested_by is not None
    match state.phase:
        case "queued":
            return "cancel" if cancelled else "queue"
        case "started":
            if cancelled:
                return "cancel"
            given_up = state.unbegun_starts >= limits.unbegun_starts_max
            return "give_up" if given_up else "requeue"
        case "begun":
            return "interrupt"
        case "ended" | "interrupted":
            return "resume"
        case "terminal":
            raise AssertionError("a terminal job is not recovered")
        case _:
            assert_never(state.phase)


async def recover(log: EventLog, host: Host, ids: IdSource, limits: Limits) -> Recovered:
    """Bring every unfinished job into a state that can go on; before ``service.ready``."""
    found = Recovered()
    streams = await _unfinished(log, ids)
    found.found = len(streams)
    keep = frozenset(
        (s.job, s.state.epoch) for s in streams if plan(s.state, limits) in ("interrupt", "resume")
    )
    await host.sweep(keep)
    limiter = trio.CapacityLimiter(PARALLEL_MAX)
    async with trio.open_nursery() as nursery:
        for stream in streams:
            await limiter.acquire_on_behalf_of(stream)
            nursery.start_soon(_recover_job, stream, host, limits, found, limiter)
    found.quarantined = await _quarantined(log, ids)
    for some in (found.queued, found.resumed, found.unknown):
        some.sort(key=lambda s: s.state.submitted_seq)
    return found


async def await_known(stream: JobStream, host: Host, limits: Limits) -> bool:
    """Wait until the host knows about a run; answer False when its deadline passed."""
    with trio.move_on_after(limits.unknown_deadline_ms / 1000):
        while True:
            if await _interrupt(stream, host):
                return True
            await trio.sleep(1)
    # Whether its processes live is as unknown: the slot stays taken until a reap has seen the end.
    last = e.JobErrored(cause="outcome_unknown", left=1, artifacts="incomplete")
    await stream.append_surely([last])
    return False


async def _unfinished(log: EventLog, ids: IdSource) -> list[JobStream]:
    streams = []
    for _, job in await log.unfinished():
        state = fold(await log.read(job_stream(JobId(job))))
        assert state is not None, "an unfinished job has events"
        streams.append(JobStream(log, ids, state))
    return streams


async def _quarantined(log: EventLog, ids: IdSource) -> list[JobStream]:
    """Answer the jobs that are over but whose slot was not released."""
    found: list[JobStream] = []
    before: int | None = None
    while len(found) < log.service_state.quarantined:
        page = await log.jobs(JobQuery(status=TERMINAL_STATUSES, before=before))
        if not page:
            break
        for seq, job in page:
            before = int(seq)
            state = fold(await log.read(job_stream(JobId(job))))
            assert state is not None, "a job in the list has events"
            if state.slot_quarantined:
                found.append(JobStream(log, ids, state))
    return found


async def _recover_job(
    stream: JobStream,
    host: Host,
    limits: Limits,
    found: Recovered,
    limiter: trio.CapacityLimiter,
) -> None:
    try:
        await _carry_out(plan(stream.state, limits), stream, host, found)
    finally:
        limiter.release_on_behalf_of(stream)


async def _carry_out(what: Plan, stream: JobStream, host: Host, found: Recovered) -> None:
    state = stream.state
    match what:
        case "queue":
            found.queued.append(stream)
        case "cancel":
            await stream.append_surely([e.JobCancelled()])
        case "requeue":
            await stream.append_surely([e.JobRequeued(why="not_begun")])
            found.queued.append(stream)
        case "give_up":
            await stream.append_surely(
                [e.JobErrored(cause="workspace_failed", detail="never_began")]
            )
        case "interrupt":
            if await _interrupt(stream, host):
                found.resumed.append(stream)
            else:
                found.unknown.append(stream)
        case "resume":
            await host.reap(state.job_id, state.epoch, state.keeper)
            found.resumed.append(stream)
        case _:
            assert_never(what)


async def _interrupt(stream: JobStream, host: Host) -> bool:
    """Reap a run and say that it was interrupted; answer False when its fate is not known."""
    state = stream.state
    assert state.keeper is not None, "a run that began has a keeper"
    if await host.reconcile(state.job_id, state.epoch, state.keeper) == "unknown":
        return False
    reaped = await host.reap(state.job_id, state.epoch, state.keeper)
    await stream.append_surely([reaped, e.RunInterrupted(why="service_died")])
    return True
