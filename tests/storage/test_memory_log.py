"""The hooks of the log in memory, with which tests make it fail."""

import pytest
import trio

from storage.errors import DiskFull, OutcomeUnknown
from storage.event_log import Append, Fact
from storage.ids import JobId, job_stream
from storage.testing import submitted


def submit(number):
    stream = job_stream(JobId(f"job_{number:026d}"))
    return Append(stream=stream, expected_version=0, facts=(Fact(event=submitted()),))


@pytest.fixture
def memory(new_maker):
    """A maker of logs in memory."""
    return new_maker("memory")


async def test_the_next_batch_fails_as_it_was_told(memory):
    """A refusal writes nothing, once; the batch after it is committed."""
    async with memory.open() as log:
        log.fail_next(DiskFull())
        with pytest.raises(DiskFull):
            await log.append(submit(1))

        (record,) = await log.append(submit(1))

        assert record.seq == log.head == 1


@pytest.mark.parametrize("written", [True, False])
async def test_an_unknown_outcome_dies_and_the_next_start_finds_the_truth(memory, written):
    """Whether the batch was written is seen only by the log that is opened next."""
    async with memory.open() as log:
        log.fail_next(OutcomeUnknown("io"), written=written)
        with pytest.raises(OutcomeUnknown):
            await log.append(submit(1))
        with pytest.raises(OutcomeUnknown):
            await log.append(submit(2))
        assert log.head == 0
    async with memory.open() as log:
        assert log.head == int(written)

    assert memory.reasons == ["io"]


async def test_appends_that_wait_together_are_one_batch(memory):
    """One failure hits all that were queued at the same time."""
    failed = []

    async def one(log, number):
        try:
            await log.append(submit(number))
        except DiskFull:
            failed.append(number)

    async with memory.open() as log:
        log.fail_next(DiskFull())
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(one, log, number)

    assert sorted(failed) == [0, 1, 2]
