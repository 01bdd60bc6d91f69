"""Promises of the test kit: programs, crashes in one line, histories, and the pytest plugin."""

import inspect
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs
import pytest
import trio

from actors.backends import BACKENDS, Backend, BackendFact, Launch, Verdict
from actors.errors import NotRunning
from actors.host import HostError
from actors.limits import Limits
from actors.testing import (
    Output,
    Program,
    Script,
    Workbench,
    assert_history,
    event,
    lines,
    memory_log,
    open_workbench,
    virtual_clock,
)
from storage import events as e
from storage.event_log import Append, Fact
from storage.ids import SERVICE_STREAM

ROOT = Path(__file__).parents[2]
RESULT = {"type": "result", "result": "forty-two"}
BEGUN = ["job.submitted", "job.started", "workspace.prepared", "process.spawned", "agent.started"]
CAPTURED = ["process.reaped", "artifact.stored", "process.reaped"]


def program(*said, **script):
    """A program that speaks the JSON lines of backend ``command``."""
    return Program(
        backend=BACKENDS["command"],
        name="command",
        argv=("prog", "{model}"),
        line_format="jsonl",
        output=lines(*said),
        **script,
    )


async def outcome(script, limits=None, **fields):
    """Answer cause, detail and result of one job; nothing of it may be left."""
    async with open_workbench(script, limits=limits) as world:
        job = await world.run(**fields)
        world.assert_nothing_left()
        state = world.state(job)
        return state.cause, state.detail, world.result(job)


# --- a backend over a scripted program -----------------------------------------------------------


async def test_a_program_runs_under_its_real_backend(autojump_clock):
    """Launch, stdin, lines, facts and verdict are the backend's; the events are the usual ones."""
    usage = {"type": "usage", "input_tokens": 3, "cost_usd": 0.5}
    async with open_workbench({"a": program(usage, RESULT)}) as world:
        job = await world.run("the prompt", model="m1")

        assert world.world.launched[(job, 1)].launch.argv == ("prog", "m1")
        assert (world.stdin(job), world.result(job)) == (b"the prompt", b"forty-two")
        assert world.state(job).usage.cost_microusd == 500_000
        world.assert_history(
            job,
            [*BEGUN, "usage.recorded", "agent.ended", *CAPTURED, "job.completed", ...],
            ignoring=["output.recorded"],
        )


@pytest.mark.parametrize(
    ("script", "fields", "expected"),
    [
        ({"exit_code": 3}, {}, ("agent_exit", "exit code 3", None)),
        ({"signal": 11}, {}, ("agent_exit", "signal 11", None)),
        ({"run_s": math.inf}, {"timeout_ms": 700}, ("timed_out", "after 700 ms", None)),
        ({"keeper_lost_s": 0.5}, {}, ("interrupted", "keeper_lost", None)),
        ({"release_error": HostError("spawn_failed", "no", detail="d")}, {}, ("spawn_failed", "d")),
    ],
)
async def test_what_happens_to_the_process_is_the_cause(autojump_clock, script, fields, expected):
    """Exit, signal, limit, a lost keeper and a failed start, through the real actors."""
    found = await outcome(program(**script), **fields)

    assert found[: len(expected)] == expected


@pytest.mark.parametrize(("at_s", "cause"), [(4.9, None), (5.0, None), (5.1, "timed_out")])
async def test_the_limit_of_a_program_is_exact(autojump_clock, at_s, cause):
    """Below, at and above: an end at the very limit counts as an end."""
    assert (await outcome(program(RESULT, run_s=at_s), timeout_ms=5_000))[0] == cause


async def test_the_limits_of_output_and_budget_end_a_program(autojump_clock):
    """The two limits that are checked while it runs."""
    chatty = await outcome(program("x" * 100, run_s=9), limits=Limits(output_bytes_max=100))
    dear = await outcome(
        program({"type": "usage", "cost_usd": 2.0}, run_s=9), max_budget_microusd=1_999_999
    )

    assert chatty[:2] == ("output_limit", "more than 100 bytes")
    assert dear[:2] == ("budget_exceeded", "2000000 of 1999999 micro-dollars")


async def test_lines_may_come_in_pieces_and_larger_than_a_pipe(autojump_clock):
    """Bytes go through real pipes: a line is a line however it was written."""
    text = b'{"type": "result", "result": "' + b"y" * 200_000 + b'"}\n'
    pieces = (Output(0.1, text[:7]), Output(0.1, b"", "stderr"), Output(0.2, text[7:]))
    script = attrs.evolve(program(), output=pieces)

    assert await outcome(script) == (None, None, b"y" * 200_000)


async def test_a_cancel_asks_before_it_kills(autojump_clock):
    """A program that ignores TERM has the grace time, one that does not ends at once."""
    spent = []
    for ignores_term in (False, True):
        async with open_workbench(program(run_s=99, ignores_term=ignores_term)) as world:
            job = (await world.submit()).job_id
            await world.until_type(job, "agent.started")
            began_s = trio.current_time()
            await world.cancel(job)
            await world.until_type(job, "process.reaped")
            spent.append(round(trio.current_time() - began_s, 2))
            await world.until_clean(job)
            world.assert_history(job, [..., "job.cancelled", "workspace.removed"])

    assert spent == [0.02, 5.01]


async def test_a_program_takes_no_messages(autojump_clock):
    """As every program of this machine."""
    async with open_workbench(program(run_s=9)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.started")

        with pytest.raises(NotRunning, match="takes no messages"):
            await world.message(job, "hello")


class RaisingBackend(Backend):
    """Has a bug in one of its parts."""

    reads_lines = True

    def __init__(self, part):
        self._part = part

    def _fail_in(self, part):
        if part == self._part:
            raise KeyError(f"bug in {part}")

    def launch(self, *, home, tree):
        self._fail_in("launch")
        return Launch(argv=("x",))

    def line(self, line):
        self._fail_in("line")
        return [BackendFact(event=e.AgentTurnFinished(turn=1))]

    def verdict(self, exit_status, stdout, stderr):
        self._fail_in("verdict")
        return Verdict()


@pytest.mark.parametrize("part", ["launch", "line", "verdict"])
async def test_a_bug_of_a_backend_ends_its_job_and_is_shown(autojump_clock, part):
    """The log says ``internal``; the failure of the assertion says where it was raised."""
    script = Program(backend=lambda _spec: RaisingBackend(part), output=lines("x"))
    async with open_workbench(script) as world:
        job = await world.run()

        assert world.state(job).cause == "internal"
        world.assert_nothing_left()
        with pytest.raises(AssertionError) as failure:
            world.assert_history(job, [..., "job.completed"])
        text = str(failure.value)
        assert text.count(f"KeyError: 'bug in {part}'") == 1
        assert "self._fail_in" in text


def test_a_program_says_what_can_not_be_scripted():
    """What the backend decides is not for the script, and time goes one way."""
    with pytest.raises(ValueError, match="cause of a Program is for its backend to decide"):
        program(cause="agent_exit")
    with pytest.raises(ValueError, match="in the order of time"):
        Program(backend=BACKENDS["echo"], output=(Output(2, b"x"), Output(1, b"y")))


# --- crashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("survives_crash", [False, True])
async def test_crash_and_recover_is_one_line(autojump_clock, survives_crash):
    """The run of before is reaped, the job runs once more; the program of before is gone."""
    script = program(RESULT, run_s=50, survives_crash=survives_crash)
    async with open_workbench(script) as world:
        job = (await world.submit(max_attempts=2)).job_id
        await world.until_type(job, "agent.started")

        await world.crash_and_recover()

        await world.until_clean(job)
        world.assert_nothing_left()
        assert (world.state(job).status, world.state(job).epoch) == ("completed", 2)
        assert trio.current_time() < 60


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize(
    "type_", ["job.started", "agent.started", "usage.recorded", "agent.ended", "job.completed"]
)
async def test_a_service_can_die_around_any_commit(autojump_clock, type_, committed):
    """The job has one end, whatever was committed; nothing is left."""
    script = program({"type": "usage"}, RESULT)
    async with open_workbench(script) as world:
        world.crash_at(type_, committed=committed)
        job = (await world.submit(max_attempts=2)).job_id
        await world.alive.gone.wait()
        assert (type_ in world.types(job)) == committed

        await world.recover()

        await world.until_clean(job)
        world.assert_nothing_left()
        world.assert_history(job, [..., "job.completed", ...])


async def test_a_wait_for_what_never_comes_ends_with_the_history(autojump_clock):
    """A test does not hang: a week of virtual time is over at once."""
    async with open_workbench(Script(run_s=math.inf)) as world:
        job = (await world.submit(timeout_ms=30 * 86_400_000)).job_id

        for waiting in (world.until_over(job), world.until_type(job, "job.completed")):
            with pytest.raises(AssertionError, match="agent\\.started"):
                await waiting
        with pytest.raises(AssertionError, match="did not die"):
            await world.recover()
        with pytest.raises(AssertionError, match=f"2 processes are left.*{job} run 1"):
            world.assert_nothing_left()


async def test_an_agent_that_is_not_there_is_refused(autojump_clock):
    """A spelling mistake is no job."""
    async with open_workbench({"a": Script(), "b": Script()}) as world:
        with pytest.raises(ValueError, match="no agent 'c' here, only a, b"):
            await world.submit(agent="c")


# --- histories -------------------------------------------------------------------------------------


async def history_of(script):
    """Answer the history of one job."""
    async with open_workbench(script) as world:
        return world.history(await world.run())


async def test_a_history_matches_by_name_class_field_and_gap(autojump_clock):
    """Each kind of expectation, alone and mixed; ``...`` may be empty."""
    history = await history_of(Script(exit_code=3))

    for expected in (
        [...],
        [..., ...],
        [*BEGUN, "agent.ended", *CAPTURED, "job.failed", "workspace.removed"],
        [..., *BEGUN, ..., "agent.ended", ..., "workspace.removed", ...],
        [e.JobSubmitted, ..., e.JobFailed, e.WorkspaceRemoved],
        [..., event("agent.ended", exit=e.ExitStatus(code=3), epoch=1), ...],
        [..., event(e.ProcessReaped, phase="capture"), ...],
        [..., event("job.failed", cause=lambda cause: cause.startswith("agent")), ...],
    ):
        assert_history(history, expected)
    assert_history(history, ["job.submitted", ..., "job.failed"], ignoring=["workspace.removed"])


@pytest.mark.parametrize(
    ("expected", "head", "mark"),
    [
        (["job.submitted", "job.requeued"], "event 2 is job.started, expected: job.requeued", 2),
        (BEGUN, "event 6 is agent.ended, expected: nothing more", 6),
        ([], "event 1 is job.submitted, expected: nothing more", 1),
        ([..., "job.completed"], "the history ends after 11 events, expected: job.completed", 11),
        (
            ["job.submitted", ..., "job.started", "job.failed"],
            "event 3 is workspace.prepared, expected: job.started or job.failed",
            3,
        ),
    ],
)
async def test_a_failure_says_where_and_shows_all_of_it(autojump_clock, expected, head, mark):
    """The first line says what is wrong, a mark stands under the row, and every row is there."""
    history = await history_of(Script(exit_code=3))

    with pytest.raises(AssertionError) as failure:
        assert_history(history, expected)

    rows = str(failure.value).splitlines()
    assert rows[0] == head
    assert rows[mark + 1] == f"  ^ expected: {head.split('expected: ')[1]}"
    assert all(f"{n:4} " in str(failure.value) for n in range(1, len(history) + 1))
    assert "exit.code=3 cause='agent_exit'" in str(failure.value)


async def test_a_failure_says_which_field_differs(autojump_clock):
    """The type was right, the value was not; texts are compared and shown as texts."""
    async with open_workbench(program(RESULT)) as world:
        job = await world.run()
        wanted = event("agent.ended", result="forty-three", cause="agent_exit")

        with pytest.raises(AssertionError) as failure:
            world.assert_history(job, [..., wanted, ...])

        text = str(failure.value)
        assert "agent.ended: result is 'forty-two', cause is None" in text
        assert "exit.code=0 result='forty-two'" in text
        assert f"all that was asked: [..., {wanted}, ...]" in text


async def test_a_name_that_there_is_not_is_no_failed_history(autojump_clock):
    """A spelling mistake in the test is said as such, with the nearest name."""
    with pytest.raises(ValueError, match=r"no event 'job.timeout'; did you mean 'job.timed_out'"):
        assert_history([], ["job.timeout"])
    with pytest.raises(ValueError, match=r"agent.ended has no field 'causes'.*'cause'"):
        event("agent.ended", causes=1)


# --- clock, log, plugin ----------------------------------------------------------------------------


def test_a_decorated_test_is_a_plain_one_on_the_virtual_clock():
    """It takes the same fixtures, waits no real time and fails with its own error."""

    @virtual_clock
    async def sleeper(tmp_path, *, fails):
        """Doc."""
        async with open_workbench(Script(run_s=3_600)) as world:
            await world.run(timeout_ms=4_000_000)
            assert not fails, "as asked"
            return tmp_path

    assert not inspect.iscoroutinefunction(sleeper)
    assert list(inspect.signature(sleeper).parameters) == ["tmp_path", "fails"]
    assert sleeper("x", fails=False) == "x"
    with pytest.raises(AssertionError, match="as asked"):
        sleeper("x", fails=True)


def test_a_test_may_run_under_many_schedules():
    """Tasks of one moment come in another order each time; the error says in which it failed."""
    orders = []

    @virtual_clock(schedules=20)
    async def race():
        order = []
        async with trio.open_nursery() as nursery:
            for one in "abc":
                nursery.start_soon(trio.lowlevel.checkpoint)
                nursery.start_soon(lambda one=one: append(order, one))
        orders.append("".join(order))
        assert len(set(orders)) < 4

    async def append(order, one):
        await trio.lowlevel.checkpoint()
        order.append(one)

    with pytest.raises(AssertionError) as failure:
        race()
    assert failure.value.__notes__ == [f"in schedule {len(orders) - 1} of trio's tasks"]
    with pytest.raises(TypeError, match="is for async functions"):
        virtual_clock(lambda: None)


async def test_a_workbench_refuses_the_real_clock():
    """Else each virtual second would be a real one."""
    with pytest.raises(RuntimeError, match="needs the virtual clock"):
        async with open_workbench():
            pass


def test_the_same_test_writes_the_same_events():
    """Ids, salts, times and pids are those of the run before: a failure can be looked at again."""

    @virtual_clock
    async def events():
        async with open_workbench(program(RESULT, children=1, run_s=5)) as world:
            job = (await world.submit(max_attempts=2)).job_id
            await world.until_type(job, "agent.started")
            await world.crash_and_recover()
            await world.until_clean(job)
            return [
                (record.stream, record.recorded_at_ns, record.event)
                for record in world.history(job)
            ]

    assert events() == events()


async def test_the_log_in_memory_is_empty_and_takes_events():
    """It needs no service and no file."""
    log = memory_log()
    fact = Fact(event=e.ServiceStopped())

    (record,) = await log.append(Append(stream=SERVICE_STREAM, expected_version=0, facts=(fact,)))

    assert (record.seq, record.type, log.head) == (1, "service.stopped", 1)
    await log.aclose()


def run_pytest(folder, *arguments, entry_point=True):
    """Run pytest in a project of somebody else, who has Watchkeeper installed."""
    site = folder / "site"
    if entry_point:
        declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        info = site / "watchkeeper_of_this_checkout-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: x\nVersion: 1\n")
        plugins = "".join(f"{k} = {v}\n" for k, v in declared["pytest11"].items())
        (info / "entry_points.txt").write_text(f"[pytest11]\n{plugins}")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(site)))},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("others", [(), ("-p", "no:trio"), ("-o", "trio_mode=true")])
def test_the_example_of_the_how_to_passes_in_a_project_of_its_own(tmp_path, others):
    """With no plugin for async tests, with pytest-trio, and with its trio mode."""
    example = ROOT / "docs" / "examples" / "test_own_backend.py"
    (tmp_path / example.name).write_bytes(example.read_bytes())

    ran = run_pytest(tmp_path, *others)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "5 passed" in ran.stdout


def test_the_how_to_names_what_there_is():
    """Each field of a Program and each verb of a world in its tables is one of the code."""
    page = (ROOT / "docs" / "how-to" / "test-an-agent.md").read_text()
    _, _, tables = page.partition("| field | meaning |")
    program_table, _, world_table = tables.partition("| on `world` | |")
    names = words_of(program_table, r"`(\w+)")
    verbs = words_of(world_table, r"(\w+)\(")

    assert len(names) > 10
    assert set(names) <= {field.name for field in attrs.fields(Program)}
    assert len(verbs) > 10
    assert all(hasattr(Workbench, verb) for verb in verbs)


def words_of(table, pattern):
    """Answer what matches in the first column of a table."""
    rows = (line for line in table.splitlines() if line.startswith("| `"))
    return [word for row in rows for word in re.findall(pattern, row.split("|")[1])]


@pytest.mark.slow
def test_a_project_that_does_not_use_the_kit_does_not_notice_it(tmp_path):
    """The plugin has no hooks, and none of our modules but itself is imported for it."""
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_nothing_is_imported(pytestconfig):\n"
        "    plugin = pytestconfig.pluginmanager.get_plugin('watchkeeper')\n"
        "    assert plugin.__name__ == 'actors.testing.plugin'\n"
        "    assert not [name for name in vars(plugin) if name.startswith('pytest_')]\n"
        "    ours = {n for n in sys.modules if n.split('.')[0] in {'actors', 'storage', 'web'}}\n"
        "    assert ours == {'actors', 'actors.testing', 'actors.testing.plugin'}\n"
        "def test_fixtures(watchkeeper_log, watchkeeper_world):\n"
        "    assert watchkeeper_log.head == 0\n"
    )

    ran = run_pytest(tmp_path, "-p", "no:trio")

    assert ran.returncode == 0, ran.stdout + ran.stderr
