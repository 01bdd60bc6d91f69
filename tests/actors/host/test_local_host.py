"""A job on this machine, from the offer to the removal, whatever its agent does."""

import os
import signal
import uuid
from pathlib import Path

import pytest
import trio

from actors.host import HostError
from actors.local_host import open_local_host
from actors.process.containment import try_out
from actors.process.process_table import process_table, read_process
from storage import events as e

pytestmark = pytest.mark.acceptance


@pytest.fixture(params=["pidns", "subreaper"])
def mechanism(request, tmp_path):
    """Each mechanism that works here."""
    reason = try_out(request.param, tmp_path)
    if reason is not None:
        pytest.skip(f"{request.param} does not work here: {reason}")
    return request.param


@pytest.fixture
def mark():
    """A number for ``sleep`` that no other test uses."""
    return f"54321.{uuid.uuid4().int % 10**9:09d}"


def living(mark):
    found = []
    for process in process_table().values():
        try:
            line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in line and not process.dead:
            found.append(process.pid)
    return found


async def until_living(mark, count):
    with trio.fail_after(10):
        while len(living(mark)) < count:
            await trio.sleep(0.01)


async def start(host, spec):
    run = host.open_run(spec)
    await run.offer()
    await run.release()
    return run


def outputs(done):
    return [
        (fact.event.stream, fact.event.offset, fact.texts[0][1])
        for fact in done.facts
        if isinstance(fact.event, e.OutputRecorded)
    ]


async def test_a_job_that_ends_well_completes(run_job):
    """Exit 0: the tail of stdout is the result, the raw streams are artifacts."""
    done = await run_job("echo hello; echo trouble >&2")

    assert done.outcome.cause is None
    assert done.outcome.exit == e.ExitStatus(code=0)
    assert done.outcome.result == b"hello\n"
    assert (done.files["stdout"], done.files["stderr"]) == (b"hello\n", b"trouble\n")
    assert (done.files["diff"], done.listed) == (b"", [])
    assert done.captured.complete
    assert (done.reaped.phase, done.reaped.left) == ("agent", 0)


async def test_each_stream_that_was_written_is_recorded_before_the_end(run_job):
    """The last output fact of a stream holds its tail; facts are numbered without a gap."""
    done = await run_job("echo a; echo b >&2")

    assert sorted(outputs(done))[-2:] == [("stderr", 0, b"b\n"), ("stdout", 0, b"a\n")]
    assert [fact.n for fact in done.facts] == list(range(len(done.facts)))


@pytest.mark.parametrize(
    ("script", "status", "detail"),
    [
        ("exit 137", e.ExitStatus(code=137), "exit code 137"),
        ("kill -9 $$", e.ExitStatus(signal=9), "signal 9"),
    ],
)
async def test_an_agent_that_fails_says_how(run_job, script, status, detail):
    """An exit code and a signal are told apart."""
    done = await run_job(f"echo why >&2; {script}")

    assert done.outcome.cause == "agent_exit"
    assert (done.outcome.exit, done.outcome.detail) == (status, detail)
    assert done.outcome.error == b"why\n"


async def test_a_held_pipe_does_not_hold_the_job(run_job, mark):
    """A grandchild keeps stdout open: the job ends at once, and the grandchild with it (SV040)."""
    with trio.fail_after(5):
        done = await run_job(f"sleep {mark} & echo done; exit 0")

    assert (done.outcome.cause, done.outcome.result) == (None, b"done\n")
    assert living(mark) == []
    assert done.reaped.seen == 2


async def test_a_normal_end_leaves_no_daemon(run_job, mark):
    """Daemons with sessions and environments of their own end with the job (SV041)."""
    done = await run_job(
        f"nohup sleep {mark} >/dev/null 2>&1 & (setsid env -i sleep {mark} &) ; "
        f"while [ $(ps ax | grep -c '[s]leep {mark}') -lt 2 ]; do :; done; echo done"
    )

    assert living(mark) == []
    assert done.reaped.left == 0
    assert done.reaped.seen >= 3


async def test_ignored_term_is_followed_by_kill(run_job, mark, tmp_path):
    """After the grace time what ignored TERM is killed (SV043)."""
    done = await run_job(f"trap '' TERM; sleep {mark}", timeout_ms=200, grace_ms=100)

    assert (done.outcome.cause, done.outcome.exit) == ("timed_out", e.ExitStatus())
    assert living(mark) == []
    assert {process.how for process in done.reaped.pids} == {"signal 9"}


async def test_grace_ends_early_when_all_have_gone(host, spec, mark):
    """A tree that ends on TERM is not waited for longer."""
    run = await start(host, spec(f"exec sleep {mark}"))
    await until_living(mark, 1)

    with trio.fail_after(5):
        reaped = await run.end(grace_ms=60_000)

    assert [process.how for process in reaped.pids] == ["signal 15"]
    assert (await run.outcome()).detail == "signal 15"
    await run.close()


async def test_end_may_be_called_twice(host, spec):
    """The second ladder finds nothing and harms nothing."""
    run = await start(host, spec("true"))
    await run.outcome()

    first, second = await run.end(grace_ms=0), await run.end(grace_ms=0)

    assert (first.seen, second.seen, second.left) == (1, 0, 0)
    await run.close()
    await run.close()


async def test_output_after_term_is_kept(host, spec):
    """What an agent writes while it is being asked to end is in its file."""
    run = await start(
        host, spec("trap 'echo bye; exit' TERM; echo up; while :; do sleep .02; done")
    )
    async with run.facts() as batches:
        async for _ in batches:
            break

    await run.end(grace_ms=5_000)
    captured = await run.capture()

    (stdout,) = [Path(file.path) for file in captured.files if file.name == "stdout"]
    assert stdout.read_text() == "up\nbye\n"
    await run.close()


@pytest.mark.parametrize("size", [999, 1_000])
async def test_output_up_to_the_limit_is_fine(run_job, size):
    """One below the limit, and the limit itself."""
    done = await run_job(f"head -c {size} /dev/zero", output_bytes_max=1_000)

    assert done.outcome.cause is None
    assert len(done.files["stdout"]) == size


async def test_more_output_than_allowed_ends_the_job(run_job):
    """One above: the cause is output_limit, what fits is stored, both streams count."""
    done = await run_job(
        "head -c 600 /dev/zero; head -c 401 /dev/zero >&2; sleep 60", output_bytes_max=1_000
    )

    assert (done.outcome.cause, done.outcome.detail) == ("output_limit", "more than 1000 bytes")
    assert len(done.files["stdout"]) + len(done.files["stderr"]) == 1_000


async def test_an_endless_writer_ends_at_the_limit(run_job):
    """``yes`` does not fill the disk."""
    with trio.fail_after(10):
        done = await run_job("yes", output_bytes_max=1_000_000)

    assert done.outcome.cause == "output_limit"
    assert len(done.files["stdout"]) == 1_000_000


async def test_stderr_is_drained_beside_stdout(run_job):
    """A child that fills stderr is not blocked; the tail of it is told (SV052)."""
    done = await run_job("head -c 200000 /dev/zero | tr '\\0' e >&2; echo result")

    assert done.outcome.result == b"result\n"
    assert done.files["stderr"] == b"e" * 200_000
    assert max(len(tail) for stream, _, tail in outputs(done) if stream == "stderr") == 65_536


async def test_bytes_that_are_no_text_are_kept(run_job):
    """Raw bytes come through untouched (SV053)."""
    done = await run_job("printf '\\377\\376\\000binary\\n'")

    assert done.outcome.cause is None
    assert done.files["stdout"] == b"\xff\xfe\x00binary\n"


async def test_a_prompt_of_any_size_runs(run_job):
    """200 kB of script do not meet the limit of an argument (SV055)."""
    done = await run_job(f"cat <<'END' | wc -c\n{'x' * 200_000}\nEND\n")

    assert done.text.strip() == "200001"


async def test_echo_goes_the_same_way(run_job):
    """The built-in echo is a process like any other."""
    done = await run_job("hi\nthere", backend="echo", agent="echo")

    assert done.outcome.result == b"hi\nthere"
    assert done.files["stdout"] == b"hi\nthere"
    assert done.reaped.seen == 1


async def test_the_environment_is_an_allow_list(tmp_path, spec, run_job):
    """Of the service's environment an agent sees what is listed, never its tokens (SV059)."""
    environment = {
        "PATH": os.environ["PATH"],
        "CLAUDECODE": "1",
        "WATCHKEEPER_TOKEN": "secret",
        "API_KEY": "secret",
        "LANG": "C.UTF-8",
    }
    async with open_local_host(
        tmp_path / "other", log_id="log_e", environment=environment, pool_size=0
    ) as host:
        run = await start(host, spec("env", environment=(("MODE", "fast"),)))
        seen = dict(
            line.split("=", 1) for line in (await run.outcome()).result.decode().splitlines()
        )
        await run.close()

    assert "secret" not in str(seen)
    assert "CLAUDECODE" not in seen
    assert (seen["LANG"], seen["MODE"]) == ("C.UTF-8", "fast")
    assert seen["WATCHKEEPER_LOG_ID"] == "log_e"
    assert Path(seen["HOME"]).name == "home"
    assert Path(seen["TMPDIR"]).name == "tmp"


async def test_stdin_is_empty(run_job):
    """An agent that reads its input does not wait for ever."""
    done = await run_job("cat; echo over")

    assert done.outcome.result == b"over\n"


@pytest.mark.parametrize(
    "script",
    [
        "kill -9 $PPID; sleep {mark}",
        "sleep {mark} & setsid sleep {mark} & setsid env -i sleep {mark} & kill -9 $PPID; wait",
    ],
)
@pytest.mark.parametrize("mechanism", ["subreaper"], indirect=True)
async def test_an_agent_that_kills_its_keeper_is_interrupted(run_job, mark, script):
    """Everything is found and ended first; then the run counts as interrupted."""
    with trio.fail_after(10):
        done = await run_job(script.format(mark=mark))

    assert living(mark) == []
    assert done.outcome.interrupted
    assert (done.outcome.detail, done.outcome.cause) == ("keeper_lost", None)
    assert done.reaped.left == 0
    assert done.captured.complete


@pytest.mark.parametrize("mechanism", ["pidns"], indirect=True)
async def test_in_a_namespace_an_agent_can_not_kill_its_keeper(run_job):
    """The parent of the agent is pid 1 of its namespace: signals from inside do nothing to it."""
    done = await run_job("kill -9 $PPID; kill -9 1; kill -STOP 1; echo still here")

    assert done.outcome.result == b"still here\n"
    assert done.reaped.left == 0


async def test_a_keeper_killed_from_outside_leaves_nothing(host, spec, mark):
    """The run counts as interrupted; what the keeper held is ended, and no zombie stays."""
    others = children()
    run = host.open_run(spec(f"setsid env -i sleep {mark} & sleep {mark}"))
    keeper = (await run.offer()).keeper
    await run.release()
    await until_living(mark, 2)

    os.kill(keeper.pid, signal.SIGKILL)
    with trio.fail_after(10):
        outcome = await run.outcome()
        reaped = await run.end(grace_ms=0)
    await run.close()

    assert (outcome.interrupted, outcome.detail) == (True, "keeper_lost")
    assert (living(mark), reaped.left) == ([], 0)
    assert not {pid for pid in children() - others if read_process(int(pid)).dead}


@pytest.mark.parametrize("mechanism", ["subreaper"], indirect=True)
async def test_a_lost_keeper_does_not_touch_other_jobs(host, spec, run_job, mark):
    """The orphans of one job are not sought among the processes of another."""
    other = await start(host, spec(f"setsid sleep {mark} & sleep {mark}"))
    await until_living(mark, 2)

    await run_job("setsid env -i sleep 60 & kill -9 $PPID; wait")

    assert len(living(mark)) == 2
    await other.end(grace_ms=0)
    await other.close()


async def test_an_agent_that_can_not_be_started_is_spawn_failed(host, spec):
    """The reason is that of the operating system; nothing is left."""
    run = host.open_run(spec(backend="command", argv=("no-such-agent",), agent="x"))
    await run.offer()

    with pytest.raises(HostError) as failed:
        await run.release()

    assert failed.value.cause == "spawn_failed"
    assert "no-such-agent" in str(failed.value)
    assert (await run.end(grace_ms=0)).left == 0
    assert (await run.capture()).complete
    await run.close()


async def test_an_argument_list_too_long_is_said(host, spec):
    """E2BIG is not taken for anything else (SV056)."""
    run = host.open_run(spec(backend="command", argv=("echo", "x" * 200_000), agent="x"))
    await run.offer()

    with pytest.raises(HostError, match="Argument list too long"):
        await run.release()

    await run.close()


async def test_an_unknown_backend_is_named(host, spec):
    """A definition for a program that can not be run here says what can."""
    run = host.open_run(spec(backend="claude"))
    await run.offer()

    with pytest.raises(HostError, match="there are: command, echo, shell"):
        await run.release()

    await run.close()


async def test_json_lines_become_facts_and_budget(run_job):
    """Usage above the budget ends the job with its cause, and is in the log."""
    line = '{"type":"usage","cost_usd":0.6,"input_tokens":1}'
    done = await run_job(
        backend="command",
        agent="x",
        argv=("/bin/sh", "-c", f"echo '{line}'; echo '{line}'; sleep 60"),
        line_format="jsonl",
    )

    assert done.outcome.cause == "budget_exceeded"
    usage = [fact.event for fact in done.facts if isinstance(fact.event, e.UsageRecorded)]
    assert [event.cost_microusd for event in usage] == [600_000, 600_000]


async def test_a_truncated_stream_is_no_result_and_work_is_kept(run_job, repo, clone_of):
    """Exit 0 without a result fails the job; its diff is there (SV049)."""
    done = await run_job(
        backend="command",
        agent="x",
        argv=("/bin/sh", "-c", """echo '{"type":"resu'; echo work > new"""),
        line_format="jsonl",
        workspace=clone_of(repo),
    )

    assert done.outcome.cause == "no_result"
    assert b"+work" in done.files["diff"]


async def test_a_writer_of_broken_lines_is_ended(host, spec, tmp_path):
    """Malformed JSON is output; the child is ended with its job and edits nothing more (SV044)."""
    touched = tmp_path / "touched"
    script = f"echo '{{broken'; while :; do date +%N >> {touched}; sleep .01; done"
    run = await start(
        host,
        spec(backend="command", agent="x", argv=("/bin/sh", "-c", script), line_format="jsonl"),
    )
    with trio.fail_after(10):
        while not touched.exists():
            await trio.sleep(0.01)

    await run.end(grace_ms=0)
    size = touched.stat().st_size
    await trio.sleep(0.05)

    assert touched.stat().st_size == size
    await run.close()


async def test_a_cancelled_offer_leaves_nothing(host, spec, repo, clone_of):
    """At each moment of the preparation a cancel undoes it."""
    for delay_s in (0.0, 0.002, 0.01, 0.03, 0.05):
        run = host.open_run(spec(workspace=clone_of(repo)))
        with trio.move_on_after(delay_s) as scope:
            await run.offer()
        if not scope.cancelled_caught:
            await run.remove()
            await run.close()

    assert list(host.layout.workspaces.iterdir()) == []
    assert list(host.layout.runs.iterdir()) == []


async def test_a_run_leaves_no_file_behind(host, run_job):
    """Workspace, output and capture are out of their places when the run is removed (SV031)."""
    await run_job("echo x; mkdir -p a/b; touch a/b/c; chmod 000 a/b a")

    for folder in (
        host.layout.workspaces,
        host.layout.runs,
        host.layout.captures,
        host.layout.output,
    ):
        assert list(folder.iterdir()) == []
    with trio.fail_after(10):
        while list(host.layout.trash.iterdir()):
            await trio.sleep(0.01)


async def test_nothing_leaks_over_many_jobs(tmp_path, spec):
    """Open files and children are as many after hostile jobs as before (SV043)."""
    before, others = len(list(Path("/proc/self/fd").iterdir())), children()
    async with open_local_host(tmp_path / "d", log_id="log_n") as host:
        for _ in range(10):
            run = await start(
                host, spec("trap '' TERM; setsid sleep 600 & sleep 600", timeout_ms=30)
            )
            await run.outcome()
            await run.end(grace_ms=0)
            await run.capture()
            await run.remove()
            await run.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert children() <= others


def children():
    """The pids of this process's children, zombies and what it adopted from other tests too."""
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}


async def test_closing_the_host_ends_its_jobs(tmp_path, spec, mark):
    """Leaving the host's block ends what runs; the run counts as interrupted."""
    async with open_local_host(tmp_path / "d", log_id="log_c") as host:
        run = await start(host, spec(f"setsid sleep {mark} & sleep {mark}"))
        await until_living(mark, 2)

    assert living(mark) == []
    assert (await run.outcome()).interrupted


async def test_after_a_crash_the_run_is_gone_and_can_be_adopted(tmp_path, spec, repo, clone_of):
    """Another host on the folder reaps, captures and removes what the first one left (SV046)."""
    job = spec("echo work > new; echo out", workspace=clone_of(repo))
    async with open_local_host(tmp_path / "d", log_id="log_a") as host:
        run = host.open_run(job)
        prepared = await run.offer()
        await run.release()
        await run.outcome()

    async with open_local_host(tmp_path / "d", log_id="log_a") as host:
        assert await host.reconcile(job.job, 1, prepared.keeper) == "gone"
        assert (await host.reap(job.job, 1, prepared.keeper)).left == 0
        assert await host.sweep(frozenset({(job.job, 1)})) == 0
        adopted = host.adopt_run(job, prepared.workspace)
        captured = await adopted.capture()
        files = {file.name: Path(file.path).read_bytes() for file in captured.files}
        await adopted.remove()
        await adopted.close()

        assert captured.complete
        assert files["stdout"] == b"out\n"
        assert b"+work" in files["diff"]
        assert list(host.layout.workspaces.iterdir()) == []


async def test_a_sweep_removes_what_belongs_to_no_run(tmp_path, spec):
    """Workspaces of runs that are over go; those that are kept stay."""
    jobs = [spec("echo x") for _ in range(3)]
    async with open_local_host(tmp_path / "d", log_id="log_s") as host:
        for job in jobs:
            run = host.open_run(job)
            await run.offer()
            await run.close()

        found = await host.sweep(frozenset({(jobs[1].job, 1)}))

        assert found == 2
        assert [path.name for path in host.layout.workspaces.iterdir()] == [f"{jobs[1].job}.1"]


async def test_a_living_keeper_is_reported_alive(host, spec, monkeypatch):
    """A keeper that does not end is alive, and can be reaped with all it holds."""
    monkeypatch.setattr("actors.local_host._DYING_S", 0.05)
    job = spec("sleep 600")
    run = host.open_run(job)
    keeper = (await run.offer()).keeper
    await run.release()

    assert await host.reconcile(job.job, 1, keeper) == "alive"
    os.kill(keeper.pid, signal.SIGSTOP)
    reaped = await host.reap(job.job, 1, keeper)

    assert reaped.left == 0
    with trio.fail_after(10):
        assert (await run.outcome()).interrupted
    await run.close()
    assert read_process(keeper.pid) is None
