"""The folds over all streams: service health, and the row that the list of jobs shows."""

from typing import Final

import attrs

from storage import events as e
from storage.event_log import Recorded
from storage.ids import job_of_stream
from storage.job_state import Status, status_of


@attrs.frozen(kw_only=True, slots=True)
class ServiceState:
    """What the log says of the service at one seq; ``active`` counts running jobs of its own.

    ``owned_active`` counts running jobs whose owner is another job: they take no service slot.
    ``degraded`` counts jobs that ended with processes left, whose slot is not released yet.
    """

    seq: int = 0
    started: bool = False
    ready: bool = False
    draining: bool = False
    active: int = 0
    queued: int = 0
    owned_active: int = 0
    owned_queued: int = 0
    quarantined: int = 0
    capacity: int = 0
    queue_depth: int = 0
    version: str = ""
    containment: str = ""
    confined: bool = False
    boot_id: str = ""
    log_id: str = ""
    finished: int = 0

    @property
    def busy(self) -> bool:
        """Whether all slots are taken."""
        return self.active + self.quarantined >= self.capacity


@attrs.frozen(kw_only=True, slots=True)
class JobRow:
    """The indexed facts of one job; ``epoch`` is the newest run, ``left`` survivors."""

    job_id: str
    submitted_seq: int
    created_at_ns: int
    owner: str
    agent: str
    priority: int
    status: Status = "queued"
    epoch: int = 0
    last_seq: int = 0
    quarantined: bool = False
    workspace_epoch: int = 0
    labels: tuple[tuple[str, str], ...] = ()


CHANGES_ROW: Final = (
    e.JobSubmitted,
    e.JobStarted,
    e.JobRequeued,
    *e.TERMINAL,
    e.SlotReleased,
)
"""Only these events change a job's row; all others leave the projections alone."""


def evolve_row(row: JobRow | None, record: Recorded) -> JobRow | None:
    """Answer a job's row after one of its events."""
    event = record.event
    seq = int(record.seq)
    if isinstance(event, e.JobSubmitted):
        job_id = job_of_stream(record.stream)
        assert job_id is not None, "job.submitted belongs to a job's stream"
        return JobRow(
            job_id=job_id,
            submitted_seq=seq,
            created_at_ns=record.recorded_at_ns,
            owner=event.owner or "",
            agent=event.agent,
            priority=event.priority,
            last_seq=seq,
            labels=tuple(sorted(event.labels.items())),
        )
    if row is None or not isinstance(event, CHANGES_ROW):
        return row
    if isinstance(event, e.JobStarted):
        return attrs.evolve(row, status="running", epoch=record.epoch, last_seq=seq)
    if isinstance(event, e.JobRequeued):
        return attrs.evolve(row, status="queued", last_seq=seq)
    if isinstance(event, e.SlotReleased):
        return attrs.evolve(row, quarantined=False, last_seq=seq)
    cause = None if isinstance(event, e.JobCompleted) else event.cause
    return attrs.evolve(row, status=status_of(cause), quarantined=event.left > 0, last_seq=seq)


def evolve_service(
    state: ServiceState, record: Recorded, before: JobRow | None, after: JobRow | None
) -> ServiceState:
    """Answer the service's state after an event; ``before`` and ``after`` are its job's rows."""
    state = attrs.evolve(state, seq=int(record.seq))
    match record.event:
        case e.ServiceStarted() as event:
            return attrs.evolve(
                state,
                started=True,
                ready=False,
                draining=False,
                capacity=event.capacity,
                queue_depth=event.queue_depth,
                version=event.version,
                containment=event.containment,
                confined=event.confined,
                boot_id=event.boot_id,
                log_id=event.log_id,
            )
        case e.ServiceReady():
            return attrs.evolve(state, ready=True)
        case e.ServiceConfigured() as event:
            return attrs.evolve(state, capacity=event.capacity, queue_depth=event.queue_depth)
        case e.ServiceDraining():
            return attrs.evolve(state, draining=True)
        case e.ServiceStopped():
            return attrs.evolve(state, started=False, ready=False, draining=False)
        case _:
            return _count(_count(state, before, -1), after, +1)


def fold_service(history: list[Recorded], state: ServiceState | None = None) -> ServiceState:
    """Answer the service's state after a history of the whole log, from its first event."""
    rows: dict[str, JobRow | None] = {}
    folded = state or ServiceState()
    for record in history:
        before = rows.get(record.stream)
        after = evolve_row(before, record)
        rows[record.stream] = after
        folded = evolve_service(folded, record, before, after)
    return folded


def _count(state: ServiceState, row: JobRow | None, sign: int) -> ServiceState:
    if row is None:
        return state
    owned = bool(row.owner)
    running, queued = row.status == "running", row.status == "queued"
    return attrs.evolve(
        state,
        active=state.active + sign * (running and not owned),
        queued=state.queued + sign * (queued and not owned),
        owned_active=state.owned_active + sign * (running and owned),
        owned_queued=state.owned_queued + sign * (queued and owned),
        quarantined=state.quarantined + sign * row.quarantined,
        finished=state.finished + sign * (not running and not queued),
    )
