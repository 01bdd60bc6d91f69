"""Promises of one run: the order of its events, its endings, its limits and its cancel."""

import math

import pytest
import trio

from actors.host import HostError, HostFact
from actors.job import unseen
from actors.limits import Limits
from actors.testing import Script, ScriptedFact, open_world
from storage import events as e
from storage.errors import DiskFull, LogBusy

BEGUN = ["job.submitted", "job.started", "workspace.prepared", "process.spawned", "agent.started"]
CAPTURED = ["process.reaped", "artifact.stored", "process.reaped"]
WHOLE = [*BEGUN, "agent.ended", *CAPTURED]


async def run_one(script, limits=None, **fields):
    """Answer the types of a job's events and its last state, after the janitor has been."""
    async with open_world(script, limits=limits) as world:
        job = (await world.submit(**fields)).job_id
        await world.until_over(job)
        await trio.sleep(1)
        assert not world.world.workspaces
        return world.types(job), world.state(job)


async def test_the_events_of_a_run_are_in_the_order_of_the_specification(autojump_clock):
    """Verdict, reap, capture, reap, terminal, removal: in this order and once each."""
    types, state = await run_one(Script())

    assert types == [*WHOLE, "job.completed", "workspace.removed"]
    assert (state.status, state.attempts, state.epoch) == ("completed", 1, 1)
    assert state.artifact_state == "complete"
    assert [(a.name, a.epoch) for a in state.artifacts] == [("diff", 1)]


ENDINGS = {
    "agent_exit": "failed",
    "no_result": "failed",
    "agent_reported_error": "failed",
    "budget_exceeded": "failed",
    "output_limit": "failed",
    "unlock_failed": "error",
    "lfs_missing": "error",
    "disk_full": "error",
}


@pytest.mark.parametrize("cause", ENDINGS)
async def test_a_verdict_of_the_agent_gives_the_status_of_its_cause(cause, autojump_clock):
    """The table of causes, for those that a run can end with."""
    types, state = await run_one(Script(cause=cause, detail="why", error=b"text"))

    assert (state.cause, state.status, state.detail) == (cause, ENDINGS[cause], "why")
    assert types[: len(WHOLE)] == WHOLE
    assert state.error is not None


async def test_an_agent_that_hangs_ends_at_its_own_limit(autojump_clock):
    """``timeout_ms`` counts the agent's run only: preparing and capturing are not in it."""
    types, state = await run_one(
        Script(run_s=math.inf, prepare_s=100, capture_s=50), timeout_ms=7_000
    )

    assert (state.cause, state.status) == ("timed_out", "timeout")
    assert state.ended_at_ns - state.begun_at_ns == 7_000_000_000
    assert types == [*WHOLE, "job.timed_out", "workspace.removed"]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (HostError("workspace_failed", "no such ref", detail="ref"), "workspace_failed"),
        (HostError("lfs_missing", "no lfs"), "lfs_missing"),
        (HostError("disk_full", "no room"), "disk_full"),
    ],
)
async def test_a_run_that_can_not_be_prepared_ends_without_having_begun(
    error, cause, autojump_clock
):
    """Its trouble is its cause, nothing was attempted, and nothing is left."""
    types, state = await run_one(Script(offer_error=error))

    assert types == ["job.submitted", "job.started", "job.errored"]
    assert (state.cause, state.status, state.attempts) == (cause, "error", 0)
    assert state.detail == error.detail


async def test_preparing_has_a_deadline(autojump_clock):
    """A checkout that never ends is given up as ``workspace_failed``."""
    limits = Limits(prepare_deadline_ms=5_000)

    types, state = await run_one(Script(prepare_s=math.inf), limits)

    assert (state.cause, types[-1]) == ("workspace_failed", "job.errored")
    assert state.finished_at_ns - state.started_at_ns == pytest.approx(5e9, rel=0.01)


async def test_an_agent_that_can_not_be_spawned_is_an_error_of_ours(autojump_clock):
    """The run had begun, so that it is captured like any other."""
    types, state = await run_one(Script(release_error=HostError("spawn_failed", "exec")))

    assert (state.cause, state.status) == ("spawn_failed", "error")
    assert types == [*WHOLE, "job.errored", "workspace.removed"]


async def test_facts_are_recorded_once_and_in_order(autojump_clock):
    """They arrive at least once; each is one event, with its epoch and number."""
    facts = tuple(
        ScriptedFact(0.1 * n, e.UsageRecorded(input_tokens=n, output_tokens=1)) for n in range(5)
    )
    async with open_world(Script(facts=facts, repeats_facts=True)) as world:
        job = (await world.submit()).job_id
        await world.until_over(job)

        usage = [r for r in world.history(job) if r.type == "usage.recorded"]

        assert [(r.epoch, r.n) for r in usage] == [(1, n) for n in range(5)]
        assert world.state(job).usage.input_tokens == 10
        assert world.state(job).usage.output_tokens == 5


async def test_facts_of_another_epoch_or_seen_before_are_not_fresh(autojump_clock):
    """The key of a fact is (job, epoch, n), also within one batch."""
    async with open_world() as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.started")
        state = world.state(job)

        batch = [
            HostFact(job=job, epoch=epoch, n=n, event=e.UsageRecorded())
            for epoch, n in ((1, 0), (1, 0), (2, 1), (1, 1), (1, 0))
        ]

        assert [(f.epoch, f.n) for f in unseen(batch, state)] == [(1, 0), (1, 1)]


async def test_a_lost_keeper_is_an_interruption(autojump_clock):
    """``error/interrupted`` with the detail ``keeper_lost``, captured."""
    types, state = await run_one(Script(keeper_lost_s=0.5))

    assert (state.cause, state.detail, state.status) == ("interrupted", "keeper_lost", "error")
    assert types == [*BEGUN, "run.interrupted", *CAPTURED, "job.errored", "workspace.removed"]


async def test_an_interrupted_run_is_followed_by_another_one_while_attempts_are_left(
    autojump_clock,
):
    """Captured, removed, requeued with the next epoch; the last attempt is the end."""
    types, state = await run_one(Script(keeper_lost_s=0.5), max_attempts=2)

    once = [*BEGUN[1:], "run.interrupted", *CAPTURED]
    again = ["workspace.removed", "job.requeued"]
    assert types == ["job.submitted", *once, *again, *once, "job.errored", "workspace.removed"]
    assert (state.epoch, state.attempts) == (2, 2)


@pytest.mark.parametrize("capture", ["fails", "hangs", "incomplete"])
async def test_the_verdict_stands_when_the_capture_does_not(capture, autojump_clock):
    """The job ends with its own status and says that its artifacts are incomplete."""
    limits = Limits(capture_deadline_ms=9_000)

    types, state = await run_one(Script(capture=capture), limits)

    assert (state.status, state.artifact_state) == ("completed", "incomplete")
    assert types.count("process.reaped") == 2
    assert types[-2:] == ["job.completed", "workspace.removed"]


async def test_a_capture_that_hangs_leaves_no_process(autojump_clock):
    """What the capture had started is ended before the terminal event."""
    async with open_world(Script(capture="hangs"), limits=Limits(capture_deadline_ms=9_000)) as w:
        job = (await w.submit()).job_id
        await w.until_over(job)

        assert w.world.alive == 0
        assert [r.event.phase for r in w.history(job) if r.type == "process.reaped"] == [
            "agent",
            "capture",
        ]


async def test_a_store_that_can_not_keep_a_file_does_not_change_the_verdict(
    autojump_clock, monkeypatch
):
    """A full disk of artifacts is ``artifacts: incomplete``, not ``error/internal``."""

    async def adopt(self, source, salt):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("actors.testing.host.FakeArtifacts.adopt", adopt)

    _, state = await run_one(Script())

    assert (state.status, state.artifact_state) == ("completed", "incomplete")


async def test_a_capture_that_finds_no_room_does_not_change_the_verdict(
    autojump_clock, monkeypatch
):
    """Also when not one file could be made, the job ends with its own status."""

    async def capture(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("actors.testing.host.FakeRun.capture", capture)

    types, state = await run_one(Script())

    assert (state.status, state.artifact_state) == ("completed", "incomplete")
    assert types.count("process.reaped") == 2


async def test_processes_that_can_not_be_ended_do_not_hold_the_end_for_ever(autojump_clock):
    """After the deadline the job ends with ``left``, and its slot is quarantined."""
    limits = Limits(capacity=1, reap_deadline_ms=1_000)
    async with open_world(Script(stuck=2, stuck_s=30), limits=limits) as world:
        first = (await world.submit()).job_id
        second = (await world.submit()).job_id
        await world.until_over(first)

        assert (world.state(first).left, world.state(first).slot_quarantined) == (2, True)
        assert world.supervisor.degraded == [f"job {first} left processes behind"]
        await trio.sleep(10)
        assert world.types(second) == ["job.submitted"]

        await world.until_type(first, "slot.released")
        await world.until_type(second, "job.started")
        assert trio.current_time() >= 30
        assert not world.state(first).slot_quarantined


# --- cancel --------------------------------------------------------------------------------------


async def test_a_queued_job_is_cancelled_in_one_append(autojump_clock):
    """Request and end are committed together; no run was ever started."""
    async with open_world(Script(run_s=50), limits=Limits(capacity=1)) as world:
        await world.submit()
        job = (await world.submit()).job_id

        assert await world.cancel(job) == "accepted"

        assert world.types(job) == ["job.submitted", "job.cancel_requested", "job.cancelled"]
        assert world.state(job).cancel_requested_by == "me"
        assert await world.cancel(job) == "terminal"


async def test_a_job_that_is_being_prepared_is_cancelled(autojump_clock):
    """The preparation is undone and the agent never begins."""
    async with open_world(Script(prepare_s=50)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "job.started")
        await trio.sleep(1)

        assert await world.cancel(job) == "accepted"
        await world.until_over(job)

        assert world.types(job)[2:] == ["job.cancel_requested", "job.cancelled"]
        assert not world.world.released
        await trio.sleep(1)
        assert not world.world.workspaces
        assert trio.current_time() < 10


async def test_a_running_job_is_cancelled_by_the_ladder_and_captured(autojump_clock):
    """TERM is enough for one that listens."""
    async with open_world(Script(run_s=50, children=3)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.started")
        await trio.sleep(1)

        assert await world.cancel(job) == "accepted"
        await world.until_type(job, "workspace.removed")

        tail = ["job.cancel_requested", "agent.ended", *CAPTURED]
        assert world.types(job) == [*BEGUN, *tail, "job.cancelled", "workspace.removed"]
        assert world.state(job).cause == "cancelled"
        assert world.world.alive == 0


async def test_an_agent_that_ignores_term_is_killed_after_the_grace(autojump_clock):
    """The ladder waits its grace time and no longer."""
    limits = Limits(grace_ms=4_000)
    async with open_world(Script(run_s=50, ignores_term=True), limits=limits) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.started")
        await trio.sleep(1)

        await world.cancel(job)
        await world.until_type(job, "process.reaped")

        reaped = next(r.event for r in world.history(job) if r.type == "process.reaped")
        assert 4_000 <= reaped.duration_ms < 4_100
        assert {p.how for p in reaped.pids} == {"signal 9"}


async def test_what_is_left_after_a_normal_exit_is_killed_at_once(autojump_clock):
    """Daemons of an agent that ended by itself get no grace."""
    async with open_world(Script(children=4, ignores_term=True)) as world:
        job = (await world.submit()).job_id
        await world.until_over(job)

        reaped = next(r.event for r in world.history(job) if r.type == "process.reaped")

        assert reaped.duration_ms < 100
        assert len(list(reaped.pids)) == 5


async def test_a_cancel_after_the_verdict_changes_nothing(autojump_clock):
    """It is accepted and recorded; the job ends with the agent's own verdict."""
    async with open_world(Script(capture_s=20)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.ended")

        assert await world.cancel(job) == "accepted"
        await world.until_over(job)

        assert world.state(job).status == "completed"
        assert world.types(job).count("job.cancel_requested") == 1
        assert world.types(job).count("artifact.stored") == 1


async def test_two_cancels_are_one_request(autojump_clock):
    """Both are accepted; the log has one."""
    async with open_world(Script(run_s=50, term_s=2)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.started")

        assert await world.cancel(job) == "accepted"
        assert await world.cancel(job, by="other") == "accepted"
        await world.until_over(job)

        assert world.types(job).count("job.cancel_requested") == 1
        assert world.state(job).cancel_requested_by == "me"


async def test_a_cancelled_job_is_not_requeued(autojump_clock):
    """Its run was interrupted and attempts are left, but the last word is the cancel."""
    async with open_world(Script(keeper_lost_s=1, capture_s=20)) as world:
        job = (await world.submit(max_attempts=5)).job_id
        await world.until_type(job, "run.interrupted")

        await world.cancel(job)
        await world.until_over(job)

        assert world.state(job).status == "cancelled"
        assert "job.requeued" not in world.types(job)


@pytest.mark.parametrize("delay_ms", range(0, 1_400, 25))
async def test_a_cancel_at_any_moment_ends_the_job_once(delay_ms, autojump_clock):
    """Whatever it races with, it is answered, and the job ends cancelled or by its verdict."""
    script = Script(keeper_lost_s=0.5, capture_s=0.2)
    async with open_world(script, limits=Limits(grace_ms=100)) as world:
        job = (await world.submit(max_attempts=2)).job_id
        await trio.sleep(delay_ms / 1000)

        answer = await world.cancel(job)
        await world.until_over(job)
        await trio.sleep(5)

        assert answer == "accepted"
        types = world.types(job)
        assert sum(t in TERMINAL for t in types) == 1
        assert world.state(job).status == "cancelled"
        cancelled = types.index("job.cancel_requested")
        assert "job.started" not in types[cancelled:]
        assert "agent.started" not in types[cancelled:]
        assert world.crashes == []


TERMINAL = {"job.completed", "job.failed", "job.timed_out", "job.errored", "job.cancelled"}


@pytest.mark.parametrize("count", range(1, 14))
async def test_a_cancel_that_follows_any_event_at_once_is_answered(count, autojump_clock):
    """The request goes into the same scheduling pass as the event; nothing fails."""
    async with open_world(Script(keeper_lost_s=0.5), limits=Limits(grace_ms=100)) as world:
        job = (await world.submit(max_attempts=2)).job_id
        await world.until(lambda: len(world.history(job)) >= count)

        answer = await world.cancel(job)
        await world.until_over(job)
        await trio.sleep(5)

        assert answer == "accepted"
        assert world.state(job).status == "cancelled"
        assert world.crashes == []


# --- the disk is full ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [DiskFull(), LogBusy(1)], ids=["disk_full", "busy"])
async def test_a_job_that_can_not_be_started_for_want_of_room_stays_queued(error, autojump_clock):
    """``job.started`` was refused: the job waits at its place and starts when there is room."""
    async with open_world(limits=Limits(capacity=1)) as world:
        world.refuse = lambda append: (
            error
            if trio.current_time() < 0.9 and isinstance(append.facts[0].event, e.JobStarted)
            else None
        )
        job = (await world.submit()).job_id
        await trio.sleep(0.5)

        assert world.types(job) == ["job.submitted"]
        assert world.supervisor.degraded == ["the log has no room; appends are being retried"]
        assert (await world.why(job)).position == 0

        await world.until_over(job)
        assert world.state(job).status == "completed"
        assert world.state(job).epoch == 1


async def test_a_terminal_event_without_room_is_retried(autojump_clock):
    """The job keeps its slot until its end is in the log."""
    async with open_world() as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "process.reaped")
        for _ in range(5):
            world.log.fail_next(DiskFull())
        await trio.sleep(3)

        assert not world.state(job).terminal
        assert world.supervisor.running == (job,)
        assert world.supervisor.degraded

        await world.until_over(job)
        assert world.state(job).status == "completed"


# --- messages and crashes -----------------------------------------------------------------------


async def test_a_message_reaches_the_running_agent_and_the_log(autojump_clock):
    """It is recorded with who said it."""
    async with open_world(Script(run_s=10)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.started")
        await trio.sleep(1)

        await world.message(job, "hello")

        assert world.world.messages == [((job, 1), "hello")]
        assert world.history(job)[-1].type == "agent.messaged"


async def test_a_job_actor_that_crashes_ends_its_job_only(autojump_clock):
    """``error/internal``, its processes ended, its slot free for the next."""
    scripts = {"bad": Script(crash=RuntimeError("bug"), children=2), "good": Script()}
    async with open_world(lambda s: scripts[s.prompt], limits=Limits(capacity=1)) as world:
        bad = (await world.submit("bad")).job_id
        good = (await world.submit("good")).job_id
        await world.until_over(bad, good)
        await trio.sleep(1)

        assert (world.state(bad).cause, world.state(bad).detail) == ("internal", "RuntimeError")
        assert world.state(good).status == "completed"
        assert [name for name, _ in world.crashes] == [bad]
        assert world.world.alive == 0
        assert not world.world.workspaces


async def test_the_end_of_a_crashed_job_waits_for_room(autojump_clock):
    """Also the Supervisor retries a terminal event while the disk is full."""
    async with open_world(Script(crash=RuntimeError("bug"))) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.started")
        await trio.sleep(0.5)
        for _ in range(3):
            world.log.fail_next(DiskFull())
        await world.until_over(job)

        assert world.state(job).cause == "internal"
        assert world.alive.ready.is_set()


async def test_a_crashed_job_that_can_not_be_ended_before_a_stop_is_left_to_the_next_start(
    autojump_clock,
):
    """A log without room while stopping is no crash of its own; the job is not lost."""
    script = Script(crash=RuntimeError("bug"))
    async with open_world(script, limits=Limits(drain_ms=1_000)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.started")
        world.refuse = lambda append: LogBusy(1) if append.stream != "service" else None
        await trio.sleep(2)

        await world.stop()
        assert [type(error) for _, error in world.crashes] == [RuntimeError]
        world.refuse = None
        await world.start()
        await world.until_over(job)

        assert (world.state(job).cause, world.world.alive) == ("interrupted", 0)


async def test_a_workspace_that_can_not_be_removed_is_left_to_the_next_start(autojump_clock):
    """The job is over all the same; the log does not claim the removal."""
    async with open_world(Script(remove_error=HostError("internal", "busy"))) as world:
        job = (await world.submit()).job_id
        await world.until_over(job)
        await trio.sleep(1)

        assert world.types(job)[-1] == "job.completed"
        assert world.world.workspaces

        await world.restart()
        assert not world.world.workspaces
