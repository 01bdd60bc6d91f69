"""Real processes under real keepers: what is started is ended, whatever it does."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import trio

from actors.process.pool import open_keeper_pool
from actors.process.process_table import how_ended, read_process
from actors.process.runner import KEEPER_FILE, KeeperLost, SpawnFailed

pytestmark = pytest.mark.acceptance

HOSTILE = """
trap '' TERM
sleep {mark} &
setsid sleep {mark} &
nohup sleep {mark} >/dev/null 2>&1 &
env -i /bin/sh -c 'sleep {mark} & sleep {mark}' &
(setsid env -i /bin/sh -c "trap '' TERM INT HUP; sleep {mark} & exec sleep {mark}" &)
(sleep {mark} & kill -STOP $!)
exec 0<&- 1>&- 2>&-
exec sleep {mark}
"""


async def start(keeper, env, script, **files):
    return await keeper.spawn(["/bin/sh", "-c", script], env=env, cwd="/", **files)


def serving_pid(keeper):
    """The process that reads the channel: with a namespace, the keeper's only child."""
    if keeper.mechanism == "subreaper":
        return keeper.identity.pid
    pid = keeper.identity.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


async def test_exit_code_137_is_not_signal_9(keeper, env):
    """The raw wait status tells a code above 128 from a death by signal."""
    by_code = await start(keeper, env, "exit 137")
    by_signal = await start(keeper, env, "kill -9 $$")

    assert how_ended(await by_code.wait()) == "exit 137"
    assert how_ended(await by_signal.wait()) == "signal 9"


async def test_a_missing_program_is_named(keeper, env):
    """A program that is not there fails the spawn with ENOENT and its name."""
    with pytest.raises(SpawnFailed) as failed:
        await keeper.spawn(["no-such-program"], env=env, cwd="/")

    assert failed.value.errno == 2
    assert "no-such-program" in failed.value.text


async def test_an_argument_list_too_long_is_said_to_be_that(keeper, env):
    """E2BIG is reported as what it is."""
    with pytest.raises(SpawnFailed) as failed:
        await keeper.spawn(["echo", "x" * 200_000], env=env, cwd="/")

    assert failed.value.errno == 7
    assert "Argument list too long" in failed.value.text


@pytest.mark.parametrize(
    ("argv", "cwd"), [(["echo"], "/no/such/folder"), (["/etc/passwd"], "/"), (["a\0b"], "/")]
)
async def test_what_can_not_be_started_fails_and_leaves_nothing(keeper, env, argv, cwd):
    """A bad folder, a file that is no program and a NUL fail the spawn; the keeper goes on."""
    with pytest.raises(SpawnFailed):
        await keeper.spawn(argv, env=env, cwd=cwd)

    await keeper.wait_empty()
    assert await (await start(keeper, env, "exit 0")).wait() == 0


async def test_a_child_gets_its_files_its_environment_and_no_more(keeper, env, tmp_path):
    """Open files are 0 to 2, the environment is the one given, the session is its own."""
    out = tmp_path / "out"
    fd = os.open(out, os.O_WRONLY | os.O_CREAT)
    script = "import os,sys,json; print(json.dumps([sorted(map(int, os.listdir('/proc/self/fd')))[:4], dict(os.environ), os.getsid(0)==os.getpid(), os.getcwd()]))"

    child = await keeper.spawn(
        [sys.executable, "-I", "-c", script], env=env | {"X": "1"}, cwd=tmp_path, stdout=fd
    )
    os.close(fd)
    await child.wait()

    fds, environment, own_session, cwd = __import__("json").loads(out.read_text())
    assert fds == [0, 1, 2, 3]  # 3 is the listing's own.
    assert {k: v for k, v in environment.items() if k != "LC_CTYPE"} == env | {"X": "1"}
    assert own_session
    assert cwd == str(tmp_path)


async def test_signals_are_at_their_defaults(keeper, env, tmp_path):
    """A child ignores and blocks nothing, though its keeper does."""
    status = tmp_path / "status"

    await (await start(keeper, env, f"grep ^Sig /proc/self/status > {status}")).wait()

    lines = dict(line.split() for line in status.read_text().splitlines())
    assert int(lines["SigBlk:"], 16) == 0
    assert int(lines["SigIgn:"], 16) == 0


async def test_no_process_survives_kill_all(keeper, env, traces):
    """Sessions of their own, empty environments, ignored TERM, stopped, orphaned: all end."""
    await start(keeper, env, HOSTILE.format(mark=traces.mark))
    await traces.appear(8)

    reaped = await keeper.kill_all(deadline_ms=5_000)

    assert traces.pids() == set()
    assert reaped.left == 0
    assert reaped.seen >= 8
    await keeper.wait_empty()


async def test_term_reaches_the_whole_tree(keeper, env, traces):
    """A signal goes to every process, also to those of another session."""
    await start(keeper, env, f"setsid sleep {traces.mark} & exec sleep {traces.mark}")
    await traces.appear(2)

    await keeper.signal(signal.SIGTERM)
    with trio.fail_after(5):
        await keeper.wait_empty()

    assert traces.pids() == set()


async def test_pids_are_the_numbers_that_the_service_sees(keeper, env, traces):
    """What a spawn and a report name can be looked up in the /proc of the service."""
    child = await start(keeper, env, f"sleep {traces.mark} & exec sleep {traces.mark}")
    await traces.appear(2)
    seen, identity = traces.pids(), read_process(child.pid)

    reaped = await keeper.kill_all(deadline_ms=5_000)

    assert child.pid in seen
    assert identity.start_time == child.start_time
    assert {pid for pid, _ in reaped.pids} == seen


async def test_a_namespace_shows_only_the_job(pool, env, tmp_path, mechanism):
    """Under pidns the job's /proc has its own processes, and its pid 1 is the keeper's."""
    if mechanism != "pidns":
        pytest.skip("only a namespace hides processes")
    keeper = await pool.acquire()
    shown = tmp_path / "shown"

    await (await start(keeper, env, f"echo /proc/[0-9]* > {shown}; kill -9 1")).wait()

    assert shown.read_text().split() == ["/proc/1", "/proc/2"]
    assert not keeper.lost
    assert await (await start(keeper, env, "exit 0")).wait() == 0


async def test_a_storm_of_forks_ends(keeper, env, traces, tmp_path):
    """Three hundred processes in sessions of their own are all ended."""
    await start(keeper, env, f"for i in $(seq 300); do setsid sleep {traces.mark} & done; wait")
    await traces.appear(300)

    reaped = await keeper.kill_all(deadline_ms=20_000)

    assert (traces.pids(), reaped.left) == (set(), 0)
    assert reaped.seen >= 300
    assert len(reaped.pids) == 256


async def test_a_process_that_forks_while_it_is_killed_ends(keeper, env, traces):
    """Endless forkers, each with short-lived children, are stopped before they are killed."""
    forker = f"while :; do (exec 3< /dev/null; : {traces.mark}) & done"
    for _ in range(3):
        await keeper.spawn(["/bin/sh", "-c", forker], env=env, cwd="/")
    await traces.appear(3)

    with trio.fail_after(20):
        reaped = await keeper.kill_all(deadline_ms=15_000)

    assert (traces.pids(), reaped.left) == (set(), 0)


async def test_the_end_of_the_channel_ends_the_tree(pool, env, traces):
    """A keeper that is closed takes everything with it, and is reaped."""
    keeper = await pool.acquire()
    await start(keeper, env, HOSTILE.format(mark=traces.mark))
    await traces.appear(8)

    await keeper.close()

    assert traces.pids() == set()
    assert read_process(keeper.identity.pid) is None


async def test_a_keeper_that_was_stopped_takes_its_processes_along(pool, env, traces, monkeypatch):
    """A keeper that does not answer is never killed before what it holds: nothing is orphaned."""
    monkeypatch.setattr("actors.process.runner._EXIT_LIMIT_S", 0.2)
    keeper = await pool.acquire()
    await start(keeper, env, f"for i in 1 2 3; do setsid sleep {traces.mark} & done; sleep 600")
    await traces.appear(3)
    os.kill(keeper.identity.pid, signal.SIGSTOP)

    await keeper.close()

    assert traces.pids() == set()
    assert read_process(keeper.identity.pid) is None


async def test_the_death_of_the_service_ends_the_tree(mechanism, traces, tmp_path):
    """After kill -9 of the service nothing of its jobs lives on (SV046)."""
    ready = tmp_path / "ready"
    script = textwrap.dedent(f"""
        import os, trio
        from actors.process.pool import open_keeper_pool
        async def main():
            async with open_keeper_pool(size=1, mechanism={mechanism!r}) as pool:
                keeper = await pool.acquire()
                await keeper.spawn(["/bin/sh", "-c", {HOSTILE.format(mark=traces.mark)!r}],
                                   env=dict(os.environ), cwd="/")
                await trio.sleep_forever()
        trio.run(main)
    """)
    service = subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(Path.cwd())}
    )
    await traces.appear(8)

    service.kill()
    service.wait()

    await traces.vanish()
    assert not ready.exists()


async def test_a_lost_keeper_is_told_to_all_who_wait(keeper, env):
    """Whoever waits for a child of a killed keeper hears that it is lost, and its leader died."""
    child = await start(keeper, env, "sleep 600")

    os.kill(keeper.identity.pid, signal.SIGKILL)
    with trio.fail_after(5), pytest.raises(KeeperLost):
        await child.wait()

    assert keeper.lost
    with pytest.raises(KeeperLost):
        await keeper.spawn(["true"], env=env, cwd="/")
    with pytest.raises(KeeperLost):
        await keeper.kill_all(deadline_ms=100)
    await keeper.close()
    assert read_process(keeper.identity.pid) is None


async def test_a_stopped_keeper_counts_as_lost(keeper, env, monkeypatch):
    """A keeper that an agent stopped does not stop the service: it is killed and lost."""
    monkeypatch.setattr("actors.process.runner._REPLY_SLACK_S", 0.1)
    os.kill(serving_pid(keeper), signal.SIGSTOP)

    with trio.fail_after(5), pytest.raises(KeeperLost):
        await keeper.kill_all(deadline_ms=100)

    await keeper.close()
    assert read_process(keeper.identity.pid) is None


async def test_a_keeper_that_can_not_be_woken_is_ended_with_its_tree(
    pool, env, traces, monkeypatch
):
    """A keeper that stays stopped is ended together with all that it holds, however hostile."""
    monkeypatch.setattr("actors.process.runner._EXIT_LIMIT_S", 0.05)
    monkeypatch.setattr("actors.process.runner.SIGCONT", 0)
    keeper = await pool.acquire()
    await start(keeper, env, HOSTILE.format(mark=traces.mark))
    await traces.appear(8)
    os.kill(keeper.identity.pid, signal.SIGSTOP)

    with trio.fail_after(10):
        await keeper.close()

    assert traces.pids() == set()
    assert read_process(keeper.identity.pid) is None


async def test_nothing_leaks_over_many_keepers(mechanism, count_fds, children):
    """Open files return to where they were, and no child is left as a zombie."""
    before, others = count_fds(), children()

    async with open_keeper_pool(size=0, mechanism=mechanism) as pool:
        for _ in range(20):
            keeper = await pool.acquire()
            await keeper.close()
        assert pool.registry.pids == set()

    assert count_fds() == before
    assert children() <= others


async def test_the_pool_refills_and_is_never_a_reason_to_fail(mechanism):
    """More keepers than are warm can be had at once; the pool is full again soon."""
    async with open_keeper_pool(size=2, mechanism=mechanism) as pool:
        keepers = [await pool.acquire() for _ in range(5)]

        assert len({keeper.identity.pid for keeper in keepers}) == 5
        with trio.fail_after(10):
            while pool.idle < 2:
                await trio.sleep(0.01)


async def test_a_dead_warm_keeper_is_not_handed_out(mechanism):
    """A keeper that died while it was waiting is passed over."""
    async with open_keeper_pool(size=1, mechanism=mechanism) as pool:
        with trio.fail_after(10):
            while pool.idle < 1:
                await trio.sleep(0.01)
        (pid,) = pool.registry.pids
        os.kill(pid, signal.SIGKILL)
        with trio.fail_after(10):
            while pid in pool.registry.pids:
                await trio.sleep(0.01)

        keeper = await pool.acquire()

        assert keeper.identity.pid != pid
        assert not keeper.lost


async def test_a_cancelled_acquire_leaves_no_process(mechanism, children):
    """Cancelled while a keeper starts, it is ended and reaped."""
    others = children()
    async with open_keeper_pool(size=0, mechanism=mechanism) as pool:
        for delay_s in (0.0, 0.001, 0.005, 0.01, 0.02):
            with trio.move_on_after(delay_s):
                await pool.acquire()
    assert pool.registry.pids == set()
    assert children() <= others


def test_the_keeper_imports_little():
    """It works without the product's libraries, with few modules: its start delays a job."""
    code = (
        f"import sys; sys.path.append({str(KEEPER_FILE.parents[2])!r}); import "
        "actors.process.keeper; print(*sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )

    loaded = set(done.stdout.split())
    own = {"keeper", "pidns", "process_table", "subreaper"}
    product = {name for name in loaded if name.startswith(("actors", "storage"))}
    assert product == {"actors", "actors.process"} | {f"actors.process.{name}" for name in own}
    assert loaded & {"trio", "attr", "signal", "socket", "enum", "re", "json", "typing"} == set()
