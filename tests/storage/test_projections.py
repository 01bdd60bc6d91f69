"""The folds over all streams: their counters are always a recount of the rows."""

import attrs
from hypothesis import given
from hypothesis import strategies as st

from storage import events as e
from storage.event_log import Recorded
from storage.ids import Seq, StreamName
from storage.job_state import LEGAL_IN, evolve
from storage.projections import ServiceState, evolve_row, evolve_service, fold_service

REF = e.PayloadRef(digest="ab" * 32, size=3)
STARTED = e.ServiceStarted(
    version="0.1.0",
    config_digest="c",
    capacity=2,
    queue_depth=10,
    containment="subreaper",
    boot_id="boot",
    log_id="log",
)
SERVICE = (
    STARTED,
    e.ServiceReady(recovered=0),
    e.ServiceConfigured(capacity=3, queue_depth=5, config_digest="d"),
    e.ServiceDraining(drain_ms=1),
    e.ServiceStopped(),
    e.TokenCreated(name="t", scopes=["read"], digest="x"),
    e.TokenRevoked(name="t"),
)
LIFE = (
    e.JobStarted(agent_digest="d", containment="subreaper"),
    e.AgentStarted(backend="echo"),
    e.AgentEnded(exit=e.ExitStatus(code=0)),
    e.RunInterrupted(why="x"),
    e.JobRequeued(why="x"),
    e.JobCompleted(),
    e.JobErrored(cause="internal", left=1),
    e.JobCancelled(),
    e.SlotReleased(),
    e.UsageLate(output_tokens=1),
)


def submitted(job):
    owner = f"job_{job - 1}" if job % 3 == 2 else None
    return e.JobSubmitted(
        agent="echo",
        owner=owner,
        prompt=REF,
        max_budget_microusd=1,
        timeout_ms=1,
        workspace=e.WorkspaceRequest(),
        priority=job,
        labels={"b": "2", "a": "1"},
    )


class Log:
    """A growing history of the whole log that takes only what is legal."""

    def __init__(self):
        self.records = []
        self.states = {}

    def add(self, stream, event):
        state = self.states.get(stream)
        epoch = (state.epoch if state else 0) + isinstance(event, e.JobStarted)
        version = sum(r.stream == stream for r in self.records) + 1
        seq = len(self.records) + 1
        fresh = Recorded(
            seq=Seq(seq),
            stream=StreamName(stream),
            version=version,
            type=e.event_type(event),
            schema=1,
            recorded_at_ns=seq,
            session="s",
            by="service",
            request_id=None,
            caused_by=None,
            epoch=epoch,
            n=None,
            prev_leaf=None,
            event=event,
            leaf="",
        )
        if stream != "service":
            self.states[stream] = evolve(state, fresh)
        self.records.append(fresh)


def legal(state, event):
    if isinstance(event, e.JobCompleted | e.JobCancelled) and state.phase == "ended":
        return isinstance(event, e.JobCompleted)
    return state.phase in LEGAL_IN[type(event)]


@st.composite
def logs(draw):
    log = Log()
    log.add("service", STARTED)
    for choice, which in draw(
        st.lists(st.tuples(st.integers(0, 9_999), st.integers(0, 9)), max_size=60)
    ):
        if which == 0:
            log.add("service", SERVICE[choice % len(SERVICE)])
        elif which <= 3 or not log.states:
            job = len(log.states)
            log.add(f"job/job_{job}", submitted(job))
        else:
            stream = f"job/job_{choice % len(log.states)}"
            possible = [x for x in LIFE if legal(log.states[stream], x)]
            log.add(stream, possible[choice % len(possible)])
    return log


def recount(rows):
    own = [r for r in rows if not r.owner]
    owned = [r for r in rows if r.owner]
    return {
        "active": sum(r.status == "running" for r in own),
        "queued": sum(r.status == "queued" for r in own),
        "owned_active": sum(r.status == "running" for r in owned),
        "owned_queued": sum(r.status == "queued" for r in owned),
        "quarantined": sum(r.quarantined for r in rows),
        "finished": sum(r.status not in ("running", "queued") for r in rows),
    }


@given(logs())
def test_the_counters_are_a_recount_of_the_rows_after_every_event(log):
    """Never negative, and equal to counting the jobs; each row agrees with the job's own fold."""
    rows = {}
    state = ServiceState()
    for record in log.records:
        before = rows.get(record.stream)
        after = evolve_row(before, record)
        if after is not None:
            rows[record.stream] = after
        state = evolve_service(state, record, before, after)

        counted = recount(rows.values())
        assert {name: getattr(state, name) for name in counted} == counted
        assert min(counted.values()) >= 0

    assert state == fold_service(log.records)
    for stream, job in log.states.items():
        row = rows[stream]
        assert (row.status, row.epoch, row.quarantined) == (
            job.status,
            job.epoch,
            job.slot_quarantined,
        )
        assert (row.submitted_seq, row.created_at_ns) == (job.submitted_seq, job.created_at_ns)


@given(logs())
def test_the_service_state_names_the_last_event(log):
    """seq is that of the newest event folded."""
    assert fold_service(log.records).seq == len(log.records)


def test_a_row_holds_what_the_list_of_jobs_shows():
    """Labels are sorted, the owner of a job of the service is the empty string."""
    log = Log()
    log.add("job/job_0", submitted(0))

    row = evolve_row(None, log.records[0])

    assert (row.job_id, row.owner, row.agent, row.priority) == ("job_0", "", "echo", 0)
    assert row.labels == (("a", "1"), ("b", "2"))


def test_a_start_forgets_what_the_last_process_said_but_not_the_jobs():
    """ready and draining begin anew; queued jobs stay counted."""
    log = Log()
    for stream, event in (
        ("service", STARTED),
        ("service", SERVICE[1]),
        ("job/job_0", submitted(0)),
        ("service", e.ServiceDraining(drain_ms=1)),
        ("service", STARTED),
    ):
        log.add(stream, event)

    state = fold_service(log.records)

    assert (state.started, state.ready, state.draining, state.queued) == (True, False, False, 1)


def test_tokens_change_nothing_but_the_seq():
    """A token's events are facts of the log, not of health."""
    log = Log()
    log.add("service", STARTED)
    before = fold_service(log.records)

    log.add("service", SERVICE[5])

    assert fold_service(log.records) == attrs.evolve(before, seq=2)


def test_a_service_is_busy_when_its_slots_are_taken_or_quarantined():
    """A slot held by survivors is a slot taken."""
    free = ServiceState(capacity=2, active=1)

    assert not free.busy
    assert attrs.evolve(free, active=2).busy
    assert attrs.evolve(free, quarantined=1).busy
