"""The fold of one job: legal histories never raise, illegal ones always do."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import events as e
from storage.errors import IllegalTransition
from storage.event_log import Recorded
from storage.ids import JobId, Seq, StreamName
from storage.job_state import LEGAL_IN, TERMINAL_STATUSES, evolve, fold

STREAM = StreamName("job/job_00000000000000000000000000")
PHASES = ("queued", "started", "begun", "ended", "interrupted", "terminal")
REF = e.PayloadRef(digest="ab" * 32, size=3)
SUBMITTED = e.JobSubmitted(
    agent="echo",
    prompt=REF,
    max_budget_microusd=1,
    timeout_ms=1000,
    workspace=e.WorkspaceRequest(),
)
EXAMPLES = (
    SUBMITTED,
    e.JobCancelRequested(),
    e.JobStarted(agent_digest="d", containment="subreaper"),
    e.WorkspacePrepared(kind="scratch", strategy="empty"),
    e.ProcessSpawned(keeper="k", pid=1, start_time=2, boot_id="b"),
    e.AgentStarted(backend="echo"),
    e.AgentTurnFinished(turn=1, text=REF),
    e.AgentToolCalled(name="bash", arguments=REF),
    e.UsageRecorded(input_tokens=1, output_tokens=2, cost_microusd=3),
    e.AgentMessaged(text=REF),
    e.SessionBound(session_id="s", agent_session="t"),
    e.OutputRecorded(stream="stdout", offset=0, size=3, tail=REF),
    e.OutputRecorded(stream="stderr", offset=3, size=3, tail=REF),
    e.AgentEnded(exit=e.ExitStatus(code=0), result=REF),
    e.AgentEnded(exit=e.ExitStatus(code=1), cause="agent_exit"),
    e.AgentEnded(exit=e.ExitStatus(signal=9), cause="timed_out"),
    e.ProcessReaped(phase="agent"),
    e.ArtifactStored(name="diff", digest="cd" * 32, size=5),
    e.RunInterrupted(why="service_stopped"),
    e.JobRequeued(why="interrupted"),
    e.JobCompleted(),
    e.JobFailed(cause="agent_exit"),
    e.JobTimedOut(),
    e.JobErrored(cause="internal", left=1),
    e.JobCancelled(detail="owner_ended"),
    e.WorkspaceRemoved(),
    e.SlotReleased(),
    e.UsageLate(output_tokens=7, complete=False),
    e.WebhookDelivered(attempt=1),
    e.WebhookGivenUp(attempts=3, why="410"),
    e.ArtifactErased(digest="cd" * 32),
    e.PayloadErased(digests=["ab" * 32]),
)
ENDINGS = tuple(x for x in EXAMPLES if isinstance(x, e.TERMINAL))


def record(event, version, *, epoch=0, n=None, by="alice"):
    return Recorded(
        seq=Seq(version * 3),
        stream=STREAM,
        version=version,
        type=e.event_type(event),
        schema=1,
        recorded_at_ns=version * 1_000,
        session="ses_0",
        by=by,
        request_id=None,
        caused_by=None,
        epoch=epoch,
        n=n,
        prev_leaf=None,
        event=event,
        leaf=f"{version:064x}",
    )


class History:
    """A history that grows event by event, with its fold beside it."""

    def __init__(self, *events):
        self.records = []
        self.state = None
        for event in events:
            self.add(event)

    def add(self, event, **envelope):
        fresh = self.record(event, **envelope)
        self.state = evolve(self.state, fresh)
        self.records.append(fresh)
        return self

    def record(self, event, **envelope):
        epoch = 0 if self.state is None else self.state.epoch
        if isinstance(event, e.JobStarted):
            epoch += 1
        return record(event, len(self.records) + 1, **{"epoch": epoch, **envelope})


QUEUED = (SUBMITTED,)
STARTED = (*QUEUED, EXAMPLES[2])
BEGUN = (*STARTED, e.AgentStarted(backend="echo"))
ENDED = (*BEGUN, e.AgentEnded(exit=e.ExitStatus(code=0)))
INTERRUPTED = (*BEGUN, e.RunInterrupted(why="service_stopped"))
REACHED = {
    "queued": QUEUED,
    "started": STARTED,
    "begun": BEGUN,
    "ended": ENDED,
    "interrupted": INTERRUPTED,
    "terminal": (*ENDED, e.JobCompleted()),
}


def may_follow(state, event):
    """Answer, independently of the product, whether an event may come next."""
    if (state.phase if state else "new") not in LEGAL_IN[type(event)]:
        return False
    if isinstance(event, e.JobStarted | e.JobRequeued):
        return state.cancel_requested_by is None
    if isinstance(event, e.TERMINAL) and state.phase == "ended":
        return getattr(event, "cause", None) in (state.ended.cause, "internal")
    return True


@st.composite
def histories(draw):
    """A random legal history: at every step one of the events that may come."""
    history = History(SUBMITTED)
    for choice in draw(st.lists(st.integers(0, 10_000), max_size=40)):
        possible = [x for x in EXAMPLES if may_follow(history.state, x)]
        history.add(possible[choice % len(possible)])
    return history


def test_the_examples_cover_every_event_of_a_job():
    """The generator below knows each event type of the table."""
    assert {type(x) for x in EXAMPLES} == set(LEGAL_IN)


@given(histories())
def test_a_legal_history_has_one_ending_and_rising_epochs(history):
    """At most one terminal event; epochs count up by one; status and phase agree."""
    kinds = [type(r.event) for r in history.records]
    starts = [r.epoch for r in history.records if isinstance(r.event, e.JobStarted)]
    state = history.state

    assert sum(kind in e.TERMINAL for kind in kinds) == int(state.terminal)
    assert starts == list(range(1, len(starts) + 1))
    assert state.epoch == len(starts)
    assert state.attempts == kinds.count(e.AgentStarted)
    assert state.terminal == (state.status in TERMINAL_STATUSES)
    assert (state.status == "queued") == (state.phase == "queued")
    assert state.version == len(history.records)
    assert state.seq == history.records[-1].seq


@given(histories(), st.data())
def test_a_fold_goes_on_from_any_point(history, data):
    """fold(a + b) is fold(a), then b event by event."""
    cut = data.draw(st.integers(1, len(history.records)))

    state = fold(history.records[:cut])
    for more in history.records[cut:]:
        state = evolve(state, more)

    assert state == fold(history.records) == history.state


@given(histories())
def test_what_the_table_forbids_always_raises(history):
    """After every legal history each event that may not come is refused, and none else."""
    for event in EXAMPLES:
        fresh = history.record(event)
        if may_follow(history.state, event):
            evolve(history.state, fresh)
        else:
            with pytest.raises(IllegalTransition):
                evolve(history.state, fresh)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("event", EXAMPLES, ids=lambda x: type(x).__name__)
def test_each_pair_of_phase_and_event_is_as_the_table_says(phase, event):
    """Every illegal pair raises, naming stream, phase and event."""
    history = History(*REACHED[phase])
    assert history.state.phase == phase

    if may_follow(history.state, event):
        history.add(event)
    else:
        with pytest.raises(IllegalTransition) as caught:
            history.add(event)
        assert caught.value.state == phase
        assert caught.value.event == e.event_type(event)


def test_a_stream_begins_with_its_submission():
    """No other event may come first."""
    for event in EXAMPLES[1:]:
        with pytest.raises(IllegalTransition):
            evolve(None, record(event, 1))


def test_an_event_of_the_service_is_refused_in_a_job():
    """The stream of a job holds no event of the service."""
    with pytest.raises(IllegalTransition):
        History(SUBMITTED, e.ServiceStopped())


def test_a_queued_job_is_cancelled_in_one_append():
    """cancel_requested and job.cancelled follow each other without a run."""
    state = History(SUBMITTED, e.JobCancelRequested(), e.JobCancelled()).state

    assert (state.status, state.cause, state.attempts) == ("cancelled", "cancelled", 0)
    assert state.cancel_requested_by == "alice"


@pytest.mark.parametrize("phase", ["started", "interrupted"])
def test_a_job_whose_cancel_was_requested_is_never_requeued(phase):
    """Recovery may only end it."""
    history = History(*REACHED[phase], e.JobCancelRequested())

    with pytest.raises(IllegalTransition):
        history.add(e.JobRequeued(why="interrupted"))
    assert history.add(e.JobCancelled()).state.status == "cancelled"


def test_a_job_whose_cancel_was_requested_is_never_started():
    """A queued job that somebody wants gone takes no slot."""
    with pytest.raises(IllegalTransition):
        History(SUBMITTED, e.JobCancelRequested(), EXAMPLES[2])


def test_the_first_who_asked_for_a_cancel_is_remembered():
    """A second request changes nothing."""
    history = History(*BEGUN)

    history.add(e.JobCancelRequested(), by="first").add(e.JobCancelRequested(), by="second")

    assert history.state.cancel_requested_by == "first"


@pytest.mark.parametrize("cause", [None, "agent_exit", "timed_out", "budget_exceeded"])
@pytest.mark.parametrize("end", ENDINGS, ids=lambda x: type(x).__name__)
def test_the_verdict_of_the_agent_stands(cause, end):
    """After agent.ended only its own verdict ends the job, or the crash of the one who writes."""
    history = History(*BEGUN, e.AgentEnded(exit=e.ExitStatus(code=0), cause=cause))
    history.add(e.JobCancelRequested())

    if getattr(end, "cause", None) in (cause, "internal"):
        assert history.add(end).state.terminal
    else:
        with pytest.raises(IllegalTransition):
            history.add(end)


def test_a_terminal_event_agrees_with_its_cause():
    """A failed job whose cause means a timeout is a contradiction."""
    for end in (e.JobErrored(cause="agent_exit"), e.JobCancelled(cause="internal")):
        with pytest.raises(IllegalTransition):
            History(*BEGUN, end)


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_a_live_job_can_always_be_errored_by_us(phase):
    """No phase is without a way out."""
    state = History(*REACHED[phase], e.JobErrored(cause="internal")).state

    assert (state.status, state.cause) == ("error", "internal")


def test_an_interrupted_run_can_be_captured_and_requeued():
    """Reaped, stored, removed, requeued; the next run has the next epoch and a clean slate."""
    history = History(
        *INTERRUPTED,
        e.OutputRecorded(stream="stdout", offset=0, size=3, tail=REF),
        e.ProcessReaped(phase="recovery"),
        e.ArtifactStored(name="diff", digest="cd" * 32, size=5),
        e.WorkspaceRemoved(),
        e.JobRequeued(why="interrupted"),
    )
    assert (history.state.status, history.state.workspace_removed_epoch) == ("queued", 1)

    history.add(EXAMPLES[2])

    state = history.state
    assert (state.epoch, state.attempts, state.stdout, state.keeper) == (2, 1, None, None)
    assert state.interrupted_why is None
    assert state.artifact("diff").epoch == 1


def test_starts_that_never_began_are_counted_until_one_begins():
    """Recovery gives up after three; a run that began resets the count."""
    history = History(*STARTED)
    for _ in range(2):
        history.add(e.JobRequeued(why="not_begun")).add(EXAMPLES[2])
    assert (history.state.unbegun_starts, history.state.attempts) == (3, 0)

    history.add(e.AgentStarted(backend="echo"))

    assert (history.state.unbegun_starts, history.state.attempts) == (0, 1)


def test_the_numbers_of_facts_start_anew_with_each_run():
    """(job, epoch, n) is the key: a requeued run's fact 0 is not taken for a repetition."""
    history = History(*BEGUN).add(e.UsageRecorded(input_tokens=1), n=5)
    assert history.state.facts_seen == 5

    history.add(e.RunInterrupted(why="x")).add(e.JobRequeued(why="x")).add(EXAMPLES[2])

    assert history.state.facts_seen == -1


@pytest.mark.parametrize(
    "event",
    [x for x in EXAMPLES if type(x) in (e.OutputRecorded, e.ArtifactStored, e.ProcessReaped)],
    ids=lambda x: type(x).__name__,
)
def test_a_fact_of_an_older_run_changes_nothing(event):
    """Only seq, version and leaf move; the state is that of the newest run."""
    history = History(*INTERRUPTED, e.JobRequeued(why="x"), *BEGUN[1:])
    before = history.state

    history.add(event, epoch=1, n=99)

    after = history.state
    assert attrs.evolve(before, seq=after.seq, version=after.version, leaf=after.leaf) == after


@pytest.mark.parametrize("event", [*ENDINGS, e.AgentEnded(exit=e.ExitStatus())], ids=repr)
def test_an_older_run_can_not_end_the_job(event):
    """A writer of an older epoch is a bug, whatever the phase allows."""
    history = History(*INTERRUPTED, e.JobRequeued(why="x"), *BEGUN[1:])

    with pytest.raises(IllegalTransition):
        history.add(event, epoch=1)


def test_usage_of_an_older_run_counts():
    """usage.late adds up in any phase, and says when the sum is a lower bound."""
    history = History(*INTERRUPTED, e.JobRequeued(why="x"), *BEGUN[1:])

    history.add(e.UsageLate(output_tokens=7, complete=False), epoch=1)

    assert (history.state.usage.output_tokens, history.state.usage.complete) == (7, False)


@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_a_run_has_the_next_epoch(epoch):
    """job.started with any other epoch is refused; so is a fact of a run yet to come."""
    history = History(*INTERRUPTED, e.JobRequeued(why="x"))

    with pytest.raises(IllegalTransition):
        history.add(EXAMPLES[2], epoch=epoch)
    with pytest.raises(IllegalTransition):
        history.add(e.UsageLate(), epoch=2)


def test_processes_left_keep_the_slot_until_it_is_released():
    """The escape: terminal with survivors, quarantined, then released by the janitor."""
    history = History(*BEGUN, e.JobErrored(cause="internal", left=2))
    assert (history.state.left, history.state.slot_quarantined) == (2, True)

    history.add(e.SlotReleased())

    assert (history.state.left, history.state.slot_quarantined) == (0, False)


def test_what_was_erased_shows_as_erased():
    """Digests of payloads are remembered, and the artifact is marked."""
    state = History(
        *BEGUN,
        e.ArtifactStored(name="diff", digest="cd" * 32, size=5),
        e.AgentEnded(exit=e.ExitStatus(code=0)),
        e.JobCompleted(),
        e.ArtifactErased(digest="cd" * 32),
        e.PayloadErased(digests=["ab" * 32]),
    ).state

    assert state.artifact("diff").erased
    assert state.erased == {"ab" * 32}


def test_a_job_state_knows_its_name_and_when_it_was_made():
    """The first event gives the id, the seq and the time."""
    state = History(SUBMITTED).state

    assert state.job_id == JobId("job_00000000000000000000000000")
    assert (state.submitted_seq, state.created_at_ns, state.submitted_by) == (3, 1_000, "alice")
