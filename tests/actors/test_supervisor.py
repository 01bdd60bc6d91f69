"""Promises of admission: order, capacity, depth, idempotency, drain, and what is kept in memory."""

import gc
import math

import pytest
import trio

from actors.errors import DiskLow, Draining, KeyReused, NotRunning, QueueFull
from actors.host import HostError
from actors.limits import Limits
from actors.stream import JobStream
from actors.testing import Script, open_world
from storage import events as e
from storage.errors import DiskFull, JobUnknown
from storage.ids import JobId


async def submit_all(world, count, **fields):
    """Answer the ids of jobs submitted one after the other."""
    return [(await world.submit(**fields)).job_id for _ in range(count)]


def order_of(world, type_):
    """Answer the jobs in the order of their events of this type."""
    return [JobId(r.stream[4:]) for r in world.store.records if r.type == type_]


# --- order and capacity ----------------------------------------------------------------------------


async def test_jobs_start_in_the_order_in_which_they_were_submitted(autojump_clock):
    """Within one priority the seq of ``job.submitted`` decides."""
    async with open_world(limits=Limits(capacity=2)) as world:
        jobs = await submit_all(world, 12)
        await world.until_over(*jobs)

        assert order_of(world, "job.started") == jobs


async def test_jobs_that_are_submitted_at_once_start_in_the_order_of_the_log(autojump_clock):
    """Fifty concurrent requests are ordered by their commit, whatever order their tasks ran in."""
    async with open_world(limits=Limits(capacity=3)) as world:
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(world.submit)
        await world.until_over(*order_of(world, "job.submitted"))

        assert order_of(world, "job.started") == order_of(world, "job.submitted")


async def test_a_higher_priority_starts_first(autojump_clock):
    """Priority is compared before the order of submission."""
    async with open_world(Script(run_s=5), limits=Limits(capacity=1)) as world:
        first = (await world.submit()).job_id
        await world.until_type(first, "job.started")
        low = (await world.submit(priority=-1)).job_id
        middle = await submit_all(world, 2)
        high = (await world.submit(priority=5)).job_id
        await world.until_over(low, *middle, high)

        assert order_of(world, "job.started") == [first, high, *middle, low]


async def test_no_more_jobs_run_than_there_are_slots(autojump_clock):
    """The capacity is reached and never exceeded, at any event."""
    async with open_world(limits=Limits(capacity=3)) as world:
        seen = []
        world.store.after.append(lambda batch: seen.append(batch.service.active))
        jobs = await submit_all(world, 20)
        await world.until_over(*jobs)

        assert max(seen) == 3


async def test_a_queue_takes_its_depth_and_not_one_more(autojump_clock):
    """Running and waiting jobs count together, and so do requests that are being committed."""
    limits = Limits(capacity=2, queue_depth=5)
    async with open_world(Script(run_s=50), limits=limits) as world:
        results = []

        async def submit():
            try:
                results.append(await world.submit())
            except QueueFull as full:
                results.append(full.retry_after_s)

        async with trio.open_nursery() as nursery:
            for _ in range(9):
                nursery.start_soon(submit)

        assert results.count(5) == 4
        assert len(order_of(world, "job.submitted")) == 5
        with pytest.raises(QueueFull):
            await world.submit()
        queued = [j for j in order_of(world, "job.submitted") if not world.state(j).epoch]
        await world.cancel(queued[0])
        await world.submit()


async def test_a_refused_submission_gives_its_place_back(autojump_clock):
    """What the log did not take does not count."""
    limits = Limits(capacity=1, queue_depth=1)
    async with open_world(limits=limits) as world:
        world.log.fail_next(DiskFull())
        with pytest.raises(DiskFull):
            await world.submit()

        job = (await world.submit()).job_id

        assert world.types(job)[0] == "job.submitted"


async def test_no_job_is_accepted_below_the_low_water_mark(autojump_clock):
    """503 ``disk_low`` comes well before the log is full; a replay is still answered."""
    async with open_world() as world:
        known = await world.submit(idempotency_key="k")
        world.disk_low = True

        with pytest.raises(DiskLow):
            await world.submit()
        again = await world.submit(idempotency_key="k")

        assert (again.job_id, again.replay) == (known.job_id, True)


async def test_an_owned_job_takes_no_slot_of_the_service(autojump_clock):
    """It starts while all slots are taken: otherwise its owner could wait for it for ever."""
    async with open_world(Script(run_s=20), limits=Limits(capacity=1, queue_depth=1)) as world:
        owner = (await world.submit()).job_id
        await world.until_type(owner, "agent.started")

        child = (await world.submit(owner=owner)).job_id
        await world.until_type(child, "agent.started")

        assert world.store.tip.service.active == 1
        assert world.store.tip.service.owned_active == 1
        assert await world.cancel(child) == "accepted"


# --- idempotency -----------------------------------------------------------------------------------


async def test_fifty_equal_requests_with_one_key_are_one_job(autojump_clock):
    """All get the same id; one place was taken, and one of them made it."""
    async with open_world(limits=Limits(queue_depth=1)) as world:
        answers = []

        async def submit():
            answers.append(await world.submit(idempotency_key="k"))

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(submit)

        assert len(order_of(world, "job.submitted")) == 1
        assert {a.job_id for a in answers} == set(order_of(world, "job.submitted"))
        assert [a.replay for a in answers].count(False) == 1
        assert len({a.seq for a in answers}) == 1


async def test_a_key_with_another_body_is_refused(autojump_clock):
    """``KeyReused`` names the job that has the key."""
    async with open_world() as world:
        job = (await world.submit("one", idempotency_key="k")).job_id

        with pytest.raises(KeyReused) as reused:
            await world.submit("two", idempotency_key="k")

        assert reused.value.job_id == job


async def test_a_key_belongs_to_its_principal(autojump_clock):
    """Two clients may use the same word."""
    async with open_world() as world:
        one = await world.submit(idempotency_key="k", by="one")
        two = await world.submit(idempotency_key="k", by="two")

        assert one.job_id != two.job_id


async def test_a_key_is_remembered_over_a_restart(autojump_clock):
    """It is kept as long as its job."""
    async with open_world() as world:
        job = (await world.submit(idempotency_key="k")).job_id
        await world.restart()

        again = await world.submit(idempotency_key="k")

        assert (again.job_id, again.replay) == (job, True)


async def test_a_key_whose_request_was_refused_is_free(autojump_clock):
    """The next request with it makes the job."""
    async with open_world() as world:
        world.log.fail_next(DiskFull())
        with pytest.raises(DiskFull):
            await world.submit(idempotency_key="k")

        assert not (await world.submit(idempotency_key="k")).replay


# --- cancel, messages, why ---------------------------------------------------------------------------


async def test_many_cancels_of_a_queued_job_are_all_answered(autojump_clock):
    """One ends it; the others wait for that, and no writer gets in another's way."""
    async with open_world(Script(run_s=50), limits=Limits(capacity=1)) as world:
        await world.submit()
        job = (await world.submit()).job_id
        answers = []

        async def cancel():
            answers.append(await world.cancel(job))

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(cancel)

        assert sorted(answers) == ["accepted"] + ["terminal"] * 9
        assert world.types(job) == ["job.submitted", "job.cancel_requested", "job.cancelled"]


async def test_a_cancel_that_the_log_refuses_leaves_the_job_in_its_place(autojump_clock):
    """The asker gets the error; the job starts as if nothing had been asked."""
    async with open_world(Script(run_s=5), limits=Limits(capacity=1)) as world:
        first, second, third = await submit_all(world, 3)
        await world.until_type(first, "agent.started")
        world.log.fail_next(DiskFull())

        with pytest.raises(DiskFull):
            await world.cancel(second)
        await world.until_over(second, third)

        assert order_of(world, "job.started") == [first, second, third]


async def test_a_job_that_waits_to_be_resumed_can_be_cancelled(autojump_clock):
    """After a restart it neither runs nor waits in the queue, and still has one writer."""
    async with open_world(Script(run_s=5, capture_s=20), limits=Limits(capacity=1)) as world:
        first = (await world.submit(max_attempts=3)).job_id
        await world.until_type(first, "agent.ended")
        second = (await world.submit(max_attempts=3)).job_id
        await trio.sleep(0.1)
        world.supervisor._limits = Limits(capacity=2)
        await world.submit()
        await world.until_type(second, "agent.started")
        await world.restart()
        assert world.types(second)[-1] == "run.interrupted"

        answers = [await world.cancel(second), await world.cancel(second)]
        await world.until_over(first, second)

        assert answers == ["accepted", "accepted"]
        assert world.state(first).status == "completed"
        assert world.state(second).status == "cancelled"
        assert world.crashes == []


async def test_a_job_whose_fate_is_not_known_can_be_cancelled(autojump_clock):
    """The request is committed by its one writer; once its fate is known it ends cancelled."""
    async with open_world(Script(run_s=50, survives_crash=True, unknown_s=9)) as world:
        job = (await world.submit(max_attempts=3)).job_id
        await world.until_type(job, "agent.started")
        await world.restart()

        assert await world.cancel(job) == "accepted"
        await world.until_over(job)

        assert world.state(job).status == "cancelled"
        assert world.crashes == []


async def test_an_unknown_job_is_said_to_be_unknown(autojump_clock):
    """Cancel, message and why name the job that does not exist."""
    async with open_world() as world:
        nobody = JobId("job_00000000000000000000000000")
        for call in (world.cancel(nobody), world.message(nobody, "x"), world.why(nobody)):
            with pytest.raises(JobUnknown, match=nobody):
                await call


async def test_only_a_running_agent_takes_messages(autojump_clock):
    """Queued, preparing and finished jobs say so."""
    limits = Limits(capacity=1)
    async with open_world(Script(prepare_s=5), limits=limits) as world:
        running, queued = await submit_all(world, 2)
        await world.until_type(running, "job.started")

        for job in (running, queued):
            with pytest.raises(NotRunning):
                await world.message(job, "hello")
        await world.until_over(running)
        with pytest.raises(NotRunning, match="completed"):
            await world.message(running, "hello")


async def test_a_message_that_the_agent_can_not_take_is_not_recorded(autojump_clock):
    """The log says only what happened."""
    script = Script(run_s=9, message_error=HostError("internal", "deaf"))
    async with open_world(script) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.started")
        await trio.sleep(1)

        with pytest.raises(NotRunning):
            await world.message(job, "hello")

        assert "agent.messaged" not in world.types(job)


@pytest.mark.parametrize("delay_ms", range(1_050, 1_400, 10))
async def test_a_message_that_races_with_the_end_is_answered(delay_ms, autojump_clock):
    """It is either in the log before the verdict, or refused as NotRunning."""
    async with open_world(Script(run_s=1.0)) as world:
        job = (await world.submit()).job_id
        await trio.sleep(delay_ms / 1000)
        try:
            await world.message(job, "hello")
            told = True
        except NotRunning:
            told = False
        await world.until_over(job)

        assert ("agent.messaged" in world.types(job)) == told
        assert world.crashes == []


async def test_why_says_what_a_job_waits_for(autojump_clock):
    """Position, reason and who runs instead."""
    async with open_world(Script(run_s=50), limits=Limits(capacity=1)) as world:
        first, second, third = await submit_all(world, 3)
        await world.until_type(first, "agent.started")

        why = await world.why(third)

        assert (why.status, why.position, why.running) == ("queued", 1, (first,))
        assert why.waits_for == "a slot: 1 of 1 are taken"
        assert (await world.why(first)).waits_for == "its agent to finish"
        await world.cancel(second)
        assert (await world.why(second)).waits_for == "nothing: it is over"


# --- drain -------------------------------------------------------------------------------------------


async def test_a_drain_waits_for_what_runs_and_leaves_the_queue(autojump_clock):
    """Running jobs end by themselves; queued ones are queued at the next start."""
    async with open_world(Script(run_s=5), limits=Limits(capacity=1, drain_ms=60_000)) as world:
        first, second = await submit_all(world, 2)
        await world.until_type(first, "agent.started")

        await world.stop()

        assert world.state(first).status == "completed"
        assert world.types(second) == ["job.submitted"]
        types = [r.type for r in world.store.records]
        assert types[-1] == "service.stopped"
        await world.start()
        await world.until_over(second)


async def test_a_draining_service_takes_no_jobs_but_answers_replays(autojump_clock):
    """Draining is said at once, with when to come back."""
    async with open_world(Script(run_s=5)) as world:
        known = await world.submit(idempotency_key="k")
        await world.until_type(known.job_id, "agent.started")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.stop)
            await trio.sleep(1)

            with pytest.raises(Draining) as draining:
                await world.submit()
            assert (await world.submit(idempotency_key="k")).replay

            assert draining.value.retry_after_s == 5


async def test_after_the_drain_limit_what_runs_is_killed_and_interrupted(autojump_clock):
    """KILL at once, ``run.interrupted``, no capture; the next start captures and ends it."""
    limits = Limits(drain_ms=7_000)
    async with open_world(Script(run_s=math.inf, ignores_term=True), limits=limits) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.started")
        began_at = trio.current_time()

        await world.stop()

        assert trio.current_time() - began_at == pytest.approx(7, abs=0.2)
        assert world.types(job)[-2:] == ["process.reaped", "run.interrupted"]
        assert world.world.alive == 0
        await world.start()
        await world.until_over(job)
        assert (world.state(job).cause, world.state(job).detail) == (
            "interrupted",
            "service_stopped",
        )
        assert "artifact.stored" in world.types(job)


@pytest.mark.parametrize("stage", ["job.started", "agent.started", "agent.ended", "process.reaped"])
async def test_a_drain_at_any_stage_leaves_a_log_that_the_next_start_ends(stage, autojump_clock):
    """With no time to drain, each stage is cut off and gone on from."""
    limits = Limits(drain_ms=0)
    script = Script(prepare_s=5, run_s=5, capture_s=5, end_s=0.5)
    async with open_world(script, limits=limits) as world:
        job = (await world.submit(max_attempts=2)).job_id
        await world.until_type(job, stage)

        await world.stop()
        assert not world.state(job).terminal
        assert world.world.alive == 0
        await world.start()
        await world.until_over(job)

        assert world.state(job).status == "completed"
        assert world.crashes == []


async def test_a_drain_kills_a_run_that_is_just_being_started(autojump_clock):
    """A job whose slot is taken but whose actor is not made yet does not hold the drain."""
    for passes in range(12):
        limits = Limits(drain_ms=0)
        async with open_world(Script(run_s=math.inf), limits=limits) as world:
            await world.submit(timeout_ms=10_000_000)
            for _ in range(passes):
                await trio.lowlevel.checkpoint()

            with trio.fail_after(60):
                await world.stop()

            assert world.world.alive == 0


async def test_a_drain_does_not_wait_for_a_disk_that_stays_full(autojump_clock):
    """An end that can not be written is left to the next start."""
    async with open_world(limits=Limits(drain_ms=2_000)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "process.reaped")
        world.refuse = lambda append: DiskFull() if append.stream != "service" else None

        with trio.fail_after(60):
            await world.stop()

        assert not world.state(job).terminal
        world.refuse = None
        await world.start()
        await world.until_over(job)
        assert world.state(job).status == "completed"


# --- memory ------------------------------------------------------------------------------------------


async def test_nothing_is_held_for_a_job_that_is_over(autojump_clock):
    """Neither its actor, nor its stream, nor an entry in any table."""
    async with open_world(limits=Limits(capacity=4)) as world:
        jobs = await submit_all(world, 30)
        await world.until_over(*jobs)
        await trio.sleep(5)
        gc.collect()

        supervisor = world.supervisor
        held = [
            name
            for name, value in vars(supervisor).items()
            if isinstance(value, (dict, set, list)) and value
        ]
        assert held == []
        streams = [o for o in gc.get_objects() if isinstance(o, JobStream)]
        assert [s for s in streams if s._log is world.log] == []


async def test_an_exception_of_a_run_that_can_not_be_let_go_is_reported(autojump_clock):
    """A bug of the host in the clean-up ends nothing else."""

    class Bad(Exception):
        pass

    async with open_world(Script(remove_error=Bad("bug"))) as world:
        job, other = await submit_all(world, 2)
        await world.until_over(job, other)
        await trio.sleep(1)

        assert {name for name, _ in world.crashes} == {job, other}
        assert (await world.submit()).job_id


async def test_a_cancel_event_is_by_who_asked(autojump_clock):
    """The envelope names the principal."""
    async with open_world(Script(run_s=9)) as world:
        job = (await world.submit(by="alice")).job_id
        await world.until_type(job, "agent.started")
        await world.cancel(job, by="bob")

        by = {r.type: r.by for r in world.history(job)}

        assert (by["job.submitted"], by["job.cancel_requested"]) == ("alice", "bob")
        assert isinstance(world.history(job)[0].event, e.JobSubmitted)
