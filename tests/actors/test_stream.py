"""Promises of the owner token of a job's stream."""

import pytest
import trio

from actors.stream import CancelledFirst, HandedOver, JobStream
from actors.testing import open_world
from storage import events as e
from storage.errors import DiskFull, IllegalTransition, LogBusy, VersionConflict
from storage.event_log import Append, Fact
from storage.ids import job_stream
from storage.testing import submitted


async def open_stream(world):
    """Answer the stream of a job that no Supervisor knows of."""
    job = world.ids.new_job()
    await world.log.append(
        Append(stream=job_stream(job), expected_version=0, facts=(Fact(event=submitted()),))
    )
    return JobStream(world.log, world.ids, world.state(job))


def start():
    return e.JobStarted(agent_digest="d", containment="fake")


async def test_the_state_of_a_stream_is_the_fold_of_what_was_committed(autojump_clock):
    """After an append its state is that of the log, and not a step ahead before it."""
    async with open_world() as world:
        stream = await open_stream(world)

        await stream.append([start()], epoch=1, by="me", request_id="r1")

        assert stream.state == world.state(stream.job)
        record = world.history(stream.job)[-1]
        assert (record.by, record.request_id, record.epoch) == ("me", "r1", 1)


async def test_an_illegal_event_does_not_reach_the_log(autojump_clock):
    """A transition that the fold refuses is refused before anything is written."""
    async with open_world() as world:
        stream = await open_stream(world)

        with pytest.raises(IllegalTransition):
            await stream.append([e.JobCompleted()])

        assert world.types(stream.job) == ["job.submitted"]
        assert stream.state.version == 1


async def test_a_second_writer_is_refused(autojump_clock):
    """Whoever writes without the owner token gets a version conflict, and nothing is written."""
    async with open_world() as world:
        stream = await open_stream(world)
        other = JobStream(world.log, world.ids, stream.state)
        await stream.append([start()], epoch=1)

        with pytest.raises(VersionConflict):
            await other.append([e.JobCancelRequested()])


async def test_appends_of_many_tasks_take_their_turns(autojump_clock):
    """No append of one stream sees a version conflict because of another one."""
    async with open_world() as world:
        stream = await open_stream(world)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(stream.append, [e.JobCancelRequested()])

        assert stream.state.version == 21


async def test_an_append_is_not_cancelled_half_way(autojump_clock):
    """A cancelled caller gets its commit, and is cancelled at its next wait."""
    async with open_world() as world:
        stream = await open_stream(world)

        with trio.CancelScope() as scope:
            scope.cancel()
            committed = await stream.append([start()], epoch=1)

        assert [record.type for record in committed] == ["job.started"]


@pytest.mark.parametrize("error", [DiskFull(), LogBusy(1)], ids=["disk_full", "busy"])
async def test_a_sure_append_is_retried_until_there_is_room(error, autojump_clock):
    """While the log refuses for want of room it is tried again each second, and says so."""
    async with open_world() as world:
        stream = await open_stream(world)
        for _ in range(3):
            world.log.fail_next(error)
        seen = []

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: stream.append_surely([start()], epoch=1))
            await trio.sleep(2.5)
            seen.append(stream.pending_retry)

        assert seen == [True]
        assert not stream.pending_retry
        assert trio.current_time() >= 3
        assert world.types(stream.job) == ["job.submitted", "job.started"]


async def test_a_stream_that_stops_retrying_raises_what_the_log_said(autojump_clock):
    """A service that stops does not wait for a disk that stays full."""
    async with open_world() as world:
        stream = await open_stream(world)
        stream.giving_up = True
        world.log.fail_next(DiskFull())

        with pytest.raises(DiskFull):
            await stream.append_surely([start()], epoch=1)

        assert world.types(stream.job) == ["job.submitted"]


async def test_an_event_that_may_not_follow_a_cancel_is_not_written_after_one(autojump_clock):
    """``unless_cancelled`` is decided in the stream's own order."""
    async with open_world() as world:
        stream = await open_stream(world)
        refused = []

        async def begin():
            try:
                await stream.append([start()], epoch=1, unless_cancelled=True)
            except CancelledFirst:
                refused.append(True)

        async with stream._turn():
            world.nursery.start_soon(lambda: stream.request_cancel(by="me", request_id=None))
            await trio.testing.wait_all_tasks_blocked()
            world.nursery.start_soon(begin)
            await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()

        assert refused == [True]
        assert world.types(stream.job) == ["job.submitted", "job.cancel_requested"]


async def test_many_requests_to_cancel_are_one_event(autojump_clock):
    """The first is committed; the others are accepted without a word in the log."""
    async with open_world() as world:
        stream = await open_stream(world)
        answers = []

        async def cancel():
            answers.append(await stream.request_cancel(by="me", request_id=None))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(cancel)

        assert answers == ["accepted"] * 5
        assert world.types(stream.job) == ["job.submitted", "job.cancel_requested"]


async def test_a_cancel_that_waited_for_the_terminal_event_is_told_so(autojump_clock):
    """It lost the race and is answered, not failed."""
    async with open_world() as world:
        stream = await open_stream(world)
        answers = []

        async def cancel():
            answers.append(await stream.request_cancel(by="me", request_id=None))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.append, [e.JobErrored(cause="internal")])
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(cancel)

        assert answers == ["terminal"]


async def test_a_stream_that_was_handed_over_takes_nothing_more(autojump_clock):
    """Also who waited for its turn before the hand-over is sent to the next writer."""
    async with open_world() as world:
        stream = await open_stream(world)

        assert await stream.hand_over()

        with pytest.raises(HandedOver):
            await stream.request_cancel(by="me", request_id=None)
        with pytest.raises(HandedOver):
            await stream.append([start()], epoch=1)


async def test_a_cancelled_stream_is_not_handed_over(autojump_clock):
    """Its writer must end the job itself."""
    async with open_world() as world:
        stream = await open_stream(world)
        await stream.request_cancel(by="me", request_id=None)

        assert not await stream.hand_over()

        await stream.append([e.JobCancelled()])
        assert stream.state.status == "cancelled"


async def test_texts_are_salted_and_referred_to(autojump_clock):
    """The event holds a digest; the bytes lie beside it, and equal texts differ."""
    async with open_world() as world:
        stream = await open_stream(world)
        await stream.append([start()], epoch=1)

        facts = [stream.fact(e.JobErrored(cause="internal"), error=b"same") for _ in range(2)]
        await stream.append([facts[0]])

        error = world.state(stream.job).error
        assert error is not None
        assert await world.log.payload(error.digest) == b"same"
        assert facts[0].payloads[0].digest != facts[1].payloads[0].digest


async def test_a_reloaded_stream_is_what_the_log_says(autojump_clock):
    """After a crashed writer the token goes on from the truth."""
    async with open_world() as world:
        stream = await open_stream(world)
        old = JobStream(world.log, world.ids, stream.state)
        await stream.append([start()], epoch=1)

        await old.reload()

        assert old.state == stream.state
