"""Promises of recovery: every row of the crash table, at every event, and in recovery itself."""

import math

import attrs
import pytest
import trio

from actors.host import HostError
from actors.limits import Limits
from actors.recovery import plan
from actors.testing import Crashed, Script, ScriptedFact, open_world
from storage import events as e
from storage.errors import OutcomeUnknown
from storage.ids import JobId

BEGUN = ["job.submitted", "job.started", "workspace.prepared", "process.spawned", "agent.started"]
TERMINAL = {"job.completed", "job.failed", "job.timed_out", "job.errored", "job.cancelled"}
FACT = ScriptedFact(0.5, e.UsageRecorded(input_tokens=1))


def crash_at(world, type_, when, count=1):
    """Let the service die around the commit of the ``count``-th event of a type."""
    left = [count]

    def watch(batch):
        if any(record.type == type_ for record in batch.records):
            left[0] -= 1
            if left[0] == 0:
                world.crash_now()
                raise Crashed

    getattr(world.store, when).append(watch)


async def end_of(world, job):
    """Wait for the job's end and its clean-up."""
    await world.until_over(job)
    await trio.sleep(2)
    assert world.world.alive == 0
    assert not world.world.workspaces
    assert sum(t in TERMINAL for t in world.types(job)) == 1


def check_runs(world):
    """No epoch was released twice, and none that the log does not know."""
    assert all(times == 1 for times in world.world.released.values())
    started = {
        (JobId(r.stream[4:]), r.epoch) for r in world.store.records if r.type == "agent.started"
    }
    assert set(world.world.released) <= started


# --- the table, row by row -------------------------------------------------------------------------


async def test_a_queued_job_keeps_its_place(autojump_clock):
    """``job.submitted`` is the last word: queued, in the old order, before all that is new."""
    async with open_world(Script(run_s=5), limits=Limits(capacity=1)) as world:
        first = (await world.submit()).job_id
        await world.until_type(first, "agent.started")
        waiting = [(await world.submit()).job_id for _ in range(3)]
        await world.restart()
        waiting.append((await world.submit()).job_id)

        await world.until_over(first, *waiting)

        started = [r.stream[4:] for r in world.store.records if r.type == "job.started"]
        assert started == [first, *waiting]


async def test_a_start_that_had_not_begun_is_repeated_with_the_next_epoch(autojump_clock):
    """Nothing had an effect; what it had prepared is swept away."""
    async with open_world(Script(prepare_s=5)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "job.started")
        await trio.sleep(1)
        await world.restart()
        await end_of(world, job)

        assert world.types(job)[:4] == [
            "job.submitted",
            "job.started",
            "job.requeued",
            "job.started",
        ]
        assert (world.state(job).status, world.state(job).epoch) == ("completed", 2)
        assert world.state(job).attempts == 1
        check_runs(world)


async def test_three_starts_that_did_not_begin_are_enough(autojump_clock):
    """The third is ``error/workspace_failed``: it may be what kills the service."""
    async with open_world(Script(prepare_s=5)) as world:
        job = (await world.submit()).job_id
        for start in range(1, 4):
            await world.until_type(job, "job.started", count=start)
            await world.restart()
        await end_of(world, job)

        assert world.types(job).count("job.started") == 3
        assert (world.state(job).cause, world.state(job).detail) == (
            "workspace_failed",
            "never_began",
        )


async def test_a_run_that_the_host_says_is_gone_is_interrupted(autojump_clock):
    """Captured, then ``error/interrupted``."""
    async with open_world(Script(run_s=50)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.started")
        await world.restart()
        await end_of(world, job)

        assert (world.state(job).status, world.state(job).cause) == ("error", "interrupted")
        assert world.state(job).detail == "service_died"
        tail = world.types(job)[len(BEGUN) :]
        assert tail[:2] == ["process.reaped", "run.interrupted"]
        assert "artifact.stored" in tail
        check_runs(world)


async def test_an_interrupted_run_with_attempts_left_runs_again(autojump_clock):
    """Captured, removed, requeued with the next epoch, and its place is that of its submission."""
    async with open_world(Script(run_s=5), limits=Limits(capacity=1)) as world:
        job = (await world.submit(max_attempts=2)).job_id
        other = (await world.submit()).job_id
        await world.until_type(job, "agent.started")
        await world.restart()
        await world.until_over(other)
        await end_of(world, job)

        assert (world.state(job).status, world.state(job).attempts) == ("completed", 2)
        assert [a.epoch for a in world.state(job).artifacts] == [1, 2]
        started = [r.stream[4:] for r in world.store.records if r.type == "job.started"]
        assert started == [job, job, other]
        check_runs(world)


async def test_a_run_that_outlived_the_service_is_reaped_before_it_is_interrupted(autojump_clock):
    """A tree that is still alive at the start does not survive it, and is in the log."""
    async with open_world(Script(run_s=500, survives_crash=True, children=2)) as world:
        job = (await world.submit(max_attempts=2)).job_id
        await world.until_type(job, "agent.started")
        await trio.sleep(1)
        await world.restart()

        reaped = next(r.event for r in world.history(job) if r.type == "process.reaped")

        assert (reaped.phase, len(reaped.pids), reaped.left) == ("recovery", 4, 0)


async def test_a_run_whose_fate_is_not_known_stays_running_until_it_is(autojump_clock):
    """Degraded, in its slot, for as long as the host can not tell."""
    script = Script(run_s=500, survives_crash=True, unknown_s=20)
    async with open_world(script, limits=Limits(capacity=1)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.started")
        other = (await world.submit()).job_id
        await world.restart()
        await trio.sleep(10)

        assert world.state(job).status == "running"
        assert world.supervisor.degraded == [f"the fate of job {job} is not known"]
        assert world.types(other) == ["job.submitted"]

        await end_of_one(world, job)
        assert world.state(job).cause == "interrupted"


async def end_of_one(world, job):
    await world.until_over(job)
    await trio.sleep(1)


async def test_a_fate_that_stays_unknown_is_outcome_unknown_and_never_requeued(autojump_clock):
    """After its deadline the job ends; its slot stays taken until a reap has seen the end."""
    script = Script(run_s=500, survives_crash=True, unknown_s=100, stuck=1, stuck_s=50)
    limits = Limits(unknown_deadline_ms=30_000, capacity=1)
    async with open_world(script, limits=limits) as world:
        job = (await world.submit(max_attempts=5)).job_id
        await world.until_type(job, "agent.started")
        await trio.sleep(1)
        await world.restart()
        other = (await world.submit()).job_id
        await world.until_over(job)

        assert (world.state(job).cause, world.state(job).status) == ("outcome_unknown", "error")
        assert world.state(job).slot_quarantined
        await trio.sleep(10)
        assert world.types(other) == ["job.submitted"]
        await world.until_type(job, "slot.released")
        await world.until_type(other, "job.started")
        assert world.types(job).count("job.started") == 1


async def test_a_cancel_that_was_committed_is_carried_out_after_a_crash(autojump_clock):
    """Captured and ``job.cancelled``, although attempts are left."""
    async with open_world(Script(run_s=50, ignores_term=True)) as world:
        job = (await world.submit(max_attempts=5)).job_id
        await world.until_type(job, "agent.started")
        await world.cancel(job)
        await world.restart()
        await end_of(world, job)

        assert world.state(job).status == "cancelled"
        assert "artifact.stored" in world.types(job)
        check_runs(world)


async def test_a_cancel_before_the_run_began_is_carried_out_after_a_crash(autojump_clock):
    """There is nothing to capture."""
    async with open_world(Script(prepare_s=50)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "job.started")
        crash_at(world, "job.cancel_requested", "after")
        with pytest.raises(Exception, match=r"ended|stopping"):
            await world.cancel(job)
        await world.alive.gone.wait()
        await world.start()
        await end_of(world, job)

        assert world.types(job)[-2:] == ["job.cancel_requested", "job.cancelled"]


@pytest.mark.parametrize("code", [0, 3])
async def test_a_verdict_stands_over_a_crash(code, autojump_clock):
    """``agent.ended`` is gone on from: the terminal event is the agent's own."""
    async with open_world(Script(exit_code=code, capture_s=20)) as world:
        job = (await world.submit(max_attempts=5)).job_id
        await world.until_type(job, "agent.ended")
        await world.restart()
        await end_of(world, job)

        assert world.state(job).status == ("failed" if code else "completed")
        assert world.types(job).count("job.started") == 1
        assert world.state(job).artifact_state == "complete"


async def test_a_quarantined_slot_is_quarantined_after_a_crash_too(autojump_clock):
    """What a job left is reaped by the next start, and the slot is released in the log."""
    limits = Limits(capacity=1, reap_deadline_ms=500)
    async with open_world(Script(stuck=1, stuck_s=40), limits=limits) as world:
        job = (await world.submit()).job_id
        await world.until_over(job)
        assert world.store.tip.service.quarantined == 1
        await world.restart()
        other = (await world.submit()).job_id
        await trio.sleep(5)

        assert world.types(other) == ["job.submitted"]
        assert world.supervisor.degraded == [f"job {job} left processes behind"]
        await world.until_type(job, "slot.released")
        await world.until_type(other, "job.started")
        assert world.store.tip.service.quarantined == 0


async def test_a_workspace_of_a_job_that_is_over_is_swept(autojump_clock):
    """A crash between the end and the removal leaves nothing behind."""
    async with open_world() as world:
        job = (await world.submit()).job_id
        crash_at(world, "job.completed", "after")
        await world.alive.gone.wait()
        assert world.world.workspaces
        await world.start()

        assert not world.world.workspaces
        assert world.state(job).status == "completed"


# --- a crash at every event ------------------------------------------------------------------------

LIFE = [
    "job.started",
    "workspace.prepared",
    "usage.recorded",
    "agent.ended",
    "process.reaped",
    "artifact.stored",
    "job.completed",
    "workspace.removed",
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("type_", LIFE)
@pytest.mark.parametrize("attempts", [1, 2])
async def test_a_crash_around_any_event_loses_no_job_and_doubles_no_run(
    type_, when, attempts, autojump_clock
):
    """Before or after the commit: the next start ends the job, once, as the table says."""
    async with open_world(Script(facts=(FACT,))) as world:
        crash_at(world, type_, when)
        job = (await world.submit(max_attempts=attempts)).job_id
        await world.alive.gone.wait()
        assert await world.start()
        await end_of(world, job)

        begun = world.types(job).count("agent.started")
        verdict = world.types(job).count("agent.ended")
        if verdict or attempts == 2:
            assert world.state(job).status == "completed"
        else:
            assert (world.state(job).cause, begun) == ("interrupted", 1)
        check_runs(world)
        assert world.crashes == []


RECOVERY = [
    "service.started",
    "process.reaped",
    "run.interrupted",
    "job.requeued",
    "service.ready",
    "artifact.stored",
    "job.started",
    "job.cancelled",
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("type_", RECOVERY)
async def test_a_crash_in_recovery_is_recovered_from(type_, when, autojump_clock):
    """Recovery is itself safe to kill at any event that it writes."""
    scripts = {
        "begun": Script(run_s=3),
        "preparing": Script(prepare_s=3),
        "cancelled": Script(run_s=3, ignores_term=True),
        "ended": Script(run_s=0.1, capture_s=3),
    }
    async with open_world(lambda spec: scripts[spec.prompt], limits=Limits(capacity=4)) as world:
        jobs = {name: (await world.submit(name, max_attempts=2)).job_id for name in scripts}
        await world.until_type(jobs["ended"], "agent.ended")
        await world.until_type(jobs["cancelled"], "agent.started")
        await world.cancel(jobs["cancelled"])
        await world.crash()
        crash_at(world, type_, when)
        await world.start()
        await world.alive.gone.wait()
        await world.restart()
        for job in jobs.values():
            await world.until_over(job)
        for job in jobs.values():
            await end_of(world, job)

        statuses = {name: world.state(job).status for name, job in jobs.items()}
        assert statuses == {
            "begun": "completed",
            "preparing": "completed",
            "cancelled": "cancelled",
            "ended": "completed",
        }
        check_runs(world)


VERBS = ["offer", "release", "end", "capture", "adopt", "remove", "close"]


@pytest.mark.parametrize("when", ["", ".done"])
@pytest.mark.parametrize("verb", VERBS)
async def test_a_crash_around_any_act_on_the_host_is_recovered_from(verb, when, autojump_clock):
    """Each act follows its event: a crash before or after it is the same to the next start."""
    crashed = []

    def boundary(name, _key):
        if name == verb + when and not crashed:
            crashed.append(name)
            world.crash_now()
            raise Crashed

    async with open_world(Script(run_s=1), boundary=boundary) as world:
        job = (await world.submit(max_attempts=2)).job_id
        await world.until_over(job) if verb == "close" else None
        if verb + when != "close.done":
            await world.alive.gone.wait()
        await world.restart()
        await end_of(world, job)

        assert world.state(job).status == "completed"
        check_runs(world)


async def test_a_commit_whose_outcome_is_unknown_ends_the_service(autojump_clock):
    """Written or not: the restart reads what is true."""
    for written in (False, True):
        async with open_world(Script(run_s=1)) as world:
            job = (await world.submit()).job_id
            await world.until_type(job, "agent.started")
            await trio.sleep(0.5)
            world.log.fail_next(OutcomeUnknown("fsync"), written=written)
            await world.alive.gone.wait()

            assert ("agent.ended" in world.types(job)) == written
            await world.start()
            await end_of(world, job)
            assert world.state(job).status == ("completed" if written else "error")


# --- the plan as a pure function -------------------------------------------------------------------


async def test_the_plan_covers_every_phase(autojump_clock):
    """Each row of the table, with and without a cancel."""
    limits = Limits(unbegun_starts_max=3)
    async with open_world(Script(run_s=math.inf, prepare_s=1, capture_s=9)) as world:
        job = (await world.submit()).job_id
        queued = world.state(job)
        await world.until_type(job, "job.started")
        started = world.state(job)
        await world.until_type(job, "agent.started")
        begun = world.state(job)
        await world.cancel(job)
        cancelled = world.state(job)
        await world.until_type(job, "agent.ended")
        ended = world.state(job)

    tried = attrs.evolve(started, unbegun_starts=3)
    once_less = attrs.evolve(started, unbegun_starts=2)
    asked = [attrs.evolve(s, cancel_requested_by="me") for s in (queued, started, begun)]
    assert plan(queued, limits) == "queue"
    assert plan(started, limits) == "requeue"
    assert plan(once_less, limits) == "requeue"
    assert plan(tried, limits) == "give_up"
    assert plan(begun, limits) == "interrupt"
    assert plan(cancelled, limits) == "interrupt"
    assert plan(ended, limits) == "resume"
    assert [plan(s, limits) for s in asked] == ["cancel", "cancel", "interrupt"]


async def test_a_job_without_its_agent_definition_is_ended_by_its_own_verdict(
    autojump_clock, monkeypatch
):
    """What is left to do after a restart needs neither definition nor prompt."""
    async with open_world(Script(capture_s=20)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.ended")

        async def gone(self, state, epoch):
            raise HostError("spawn_failed", "agent 'echo' is not defined any more")

        monkeypatch.setattr(type(world), "_recipe", gone)
        await world.restart()
        await end_of(world, job)

        assert world.state(job).status == "completed"
        assert world.state(job).artifact_state == "complete"
