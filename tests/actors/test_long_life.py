"""A runtime that lives long: what it holds in memory, and clocks that jump."""

import gc
from contextlib import asynccontextmanager

import pytest
import trio

from actors.host import AgentOutcome, Captured, Prepared
from actors.limits import Limits
from actors.messages import SubmitRequest
from actors.runtime import RuntimeConfig, Seams, open_runtime
from storage import events as e
from storage.ids import SERVICE_STREAM, job_stream
from storage.job_state import fold
from storage.subscription import Feed

HOUR_NS = 3_600 * 1_000_000_000
START_NS = 1_767_225_600_000_000_000


class TinyRun:
    """A run that ends well as soon as it has begun, and leaves nothing."""

    async def offer(self):
        await trio.lowlevel.checkpoint()
        return Prepared(
            workspace=e.WorkspacePrepared(kind="scratch", strategy="scratch"),
            keeper=e.ProcessSpawned(keeper="k", pid=1, start_time=1, boot_id="b"),
        )

    async def release(self):
        await trio.lowlevel.checkpoint()

    @asynccontextmanager
    async def facts(self):
        async def none():
            for batch in ():
                yield batch

        yield none()

    async def outcome(self):
        return AgentOutcome(exit=e.ExitStatus(code=0), result=b"done")

    async def end(self, *, grace_ms):
        return e.ProcessReaped(phase="agent", seen=1)

    async def capture(self):
        reaped = e.ProcessReaped(phase="capture")
        return Captured(files=(), complete=True, reaped=reaped)

    async def remove(self):
        await trio.lowlevel.checkpoint()

    async def close(self):
        await trio.lowlevel.checkpoint()


class TinyHost:
    """A host whose runs take no time."""

    containment = "none"
    confined = False

    def open_run(self, spec):
        return TinyRun()

    async def sweep(self, keep):
        return 0


@asynccontextmanager
async def open_tiny_host(log_id):
    yield TinyHost()


class Clock:
    """A wall clock that a test sets."""

    def __init__(self):
        self.now_ns = START_NS

    def __call__(self):
        return self.now_ns


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def small_caches(monkeypatch):
    """Bounded caches of the log that are full after a few jobs."""
    monkeypatch.setattr("storage.batch.STREAMS_CACHED_MAX", 20)
    monkeypatch.setitem(Feed.__init__.__kwdefaults__, "ring_events", 64)


@pytest.fixture
async def runtime(tmp_path, clock):
    config = RuntimeConfig(
        data=tmp_path / "data", version="0", limits=Limits(queue_depth=10_000, drain_ms=0)
    )
    seams = Seams(clock_ns=clock, open_host=open_tiny_host, space=lambda _: (1 << 40, 1 << 20))
    async with open_runtime(config, seams) as runtime:
        yield runtime
        await runtime.drain()


async def run_jobs(runtime, count):
    """Run so many jobs to their end; answer their ids."""
    jobs = []
    for number in range(count):
        request = SubmitRequest(prompt=f"job {number}", agent="echo", by="test")
        jobs.append((await runtime.submit(request)).job_id)
    for job in jobs:
        await ended(runtime, job)
    return jobs


async def ended(runtime, job):
    with trio.fail_after(60):
        while True:
            state = fold(await runtime.log.read(job_stream(job)))
            if state.terminal:
                return state
            await runtime.log.wait_past(state.seq, stream=job_stream(job))


async def settled_objects():
    """Count the objects that live, when nobody has anything to do."""
    await trio.testing.wait_all_tasks_blocked(0.05)
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.slow
async def test_finished_jobs_do_not_stay_in_memory(small_caches, runtime):
    """SV115: after hundreds of jobs more there are no more objects than before."""
    await run_jobs(runtime, 50)
    before = await settled_objects()

    jobs = await run_jobs(runtime, 400)

    after = await settled_objects()
    assert after - before < 200, "less than half an object for each job"
    assert (await ended(runtime, jobs[0])).status == "completed"


@pytest.mark.parametrize("jump_ns", [2 * HOUR_NS, 1_000 * HOUR_NS, -2 * HOUR_NS])
async def test_a_wall_clock_that_jumps_changes_no_answer(runtime, clock, jump_ns):
    """SV118: results stay, new jobs run, and recorded times never decrease."""
    (old,) = await run_jobs(runtime, 1)
    seen = await runtime.log.read(job_stream(old))

    clock.now_ns += jump_ns
    (new,) = await run_jobs(runtime, 1)

    assert (await runtime.log.read(job_stream(old)))[: len(seen)] == seen
    assert (await ended(runtime, new)).status == "completed"
    times = [r.recorded_at_ns for r in await runtime.log.read_all(after=0, limit=500)]
    assert times == sorted(times)
    assert len(await runtime.log.read(SERVICE_STREAM)) == 2
