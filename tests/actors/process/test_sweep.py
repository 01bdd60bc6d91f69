"""The sweep finds what a lost keeper left, and signals nobody else."""

import os
import signal
import subprocess
import sys

import pytest
import trio

from actors.process.identity import Mark, ProcessIdentity, current_boot_id
from actors.process.keeper import read_process
from actors.process.sweep import become_subreaper, marks_of_log, sweep_marked, sweep_run

pytestmark = pytest.mark.acceptance

MARK = Mark(job="job_x", epoch=2, log_id=f"log-{os.getpid()}")


async def lose(keeper):
    os.kill(keeper.identity.pid, signal.SIGKILL)
    with trio.fail_after(5):
        await keeper.wait_lost()
    await keeper.close()


async def test_marked_processes_of_a_lost_keeper_are_found(keeper, env, traces):
    """What kept the mark is ended by it, in a session of its own or not (SV047)."""
    script = f"setsid sleep {traces.mark} & sleep {traces.mark} & wait"
    await keeper.spawn(["/bin/sh", "-c", script], env=env | MARK.environment(), cwd="/")
    await traces.appear(2)
    await lose(keeper)

    reaped = await sweep_run(MARK, deadline_ms=5_000)

    assert traces.pids() == set()
    assert reaped.left == 0
    assert reaped.seen >= 2


async def test_orphans_without_a_mark_come_to_the_service(pool, env, traces):
    """A daemon with an empty environment is found as a child of the service that nobody knows."""
    become_subreaper()
    keeper = await pool.acquire()
    script = f"setsid env -i sleep {traces.mark} & (setsid env -i sleep {traces.mark} &) ; sleep {traces.mark}"
    await keeper.spawn(["/bin/sh", "-c", script], env=env, cwd="/")
    await traces.appear(3)
    other = await pool.acquire()
    bystander = subprocess.Popen(["sleep", "60"])
    await lose(keeper)

    await sweep_run(MARK, registry=pool.registry, deadline_ms=5_000)

    assert traces.pids() == set()
    assert not other.lost
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


async def test_another_run_and_another_log_are_left_alone(env, traces):
    """Job, epoch and log must all be those of the mark."""
    others = [
        Mark(job="job_y", epoch=2, log_id=MARK.log_id),
        Mark(job="job_x", epoch=3, log_id=MARK.log_id),
        Mark(job="job_x", epoch=2, log_id="other"),
    ]
    started = [
        subprocess.Popen(["sleep", traces.mark], env=env | mark.environment()) for mark in others
    ]
    await traces.appear(3)

    reaped = await sweep_run(MARK, deadline_ms=1_000)

    assert reaped.seen == 0
    assert len(traces.pids()) == 3
    for process in started:
        process.kill()
        process.wait()


async def test_a_pid_with_another_start_time_is_never_signalled(traces):
    """A recorded pid that has a new owner is nobody of ours (SV047)."""
    stranger = subprocess.Popen(["sleep", traces.mark])
    now = read_process(stranger.pid)
    for start_time, boot_id in ((now.start_time - 1, current_boot_id()), (now.start_time, "other")):
        recorded = ProcessIdentity(pid=stranger.pid, start_time=start_time, boot_id=boot_id)

        reaped = await sweep_run(MARK, keeper=recorded, deadline_ms=1_000)

        assert reaped.seen == 0
        assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


async def test_a_recorded_keeper_ends_with_its_descendants(traces):
    """The recorded process and what descends from it are ended, marked or not."""
    script = f"import subprocess,time; subprocess.Popen(['sleep','{traces.mark}']); time.sleep(600)"
    left = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    await traces.appear(2)
    now = read_process(left.pid)
    recorded = ProcessIdentity(pid=left.pid, start_time=now.start_time, boot_id=current_boot_id())

    reaped = await sweep_run(MARK, keeper=recorded, deadline_ms=5_000)

    left.wait()
    assert traces.pids() == set()
    assert reaped.left == 0


async def test_the_sweep_of_a_log_spares_the_runs_to_keep(env, traces):
    """Processes of every run of the log are ended, but for those that are to be kept."""
    marks = [Mark(job=f"job_{n}", epoch=1, log_id=MARK.log_id) for n in range(3)]
    started = [
        subprocess.Popen(["sleep", traces.mark], env=env | mark.environment()) for mark in marks
    ]
    await traces.appear(3)

    found = await marks_of_log(MARK.log_id)
    reports = await sweep_marked(found, keep=frozenset({("job_1", 1)}), deadline_ms=5_000)

    assert sum(report.seen for report in reports) == 2
    assert traces.pids() == {started[1].pid}
    started[1].kill()
    for process in started:
        process.wait()
