"""Tools inside a keeper: drained, bounded, ended when cancelled."""

import os

import pytest
import trio

from actors.process.tool import OutputTooLong, run_tool

pytestmark = pytest.mark.acceptance


async def sh(keeper, env, script, **options):
    return await run_tool(keeper, ["/bin/sh", "-c", script], env=env, cwd="/", **options)


async def test_both_pipes_are_drained_at_once(keeper, env):
    """Megabytes on both streams and on stdin pass; nobody waits for the other."""
    script = "head -c 2000000 /dev/zero >&2; cat; exit 3"

    result = await sh(keeper, env, script, stdin=b"x" * 3_000_000)

    assert (result.code, len(result.stdout), len(result.stderr)) == (3, 3_000_000, 65_536)


async def test_a_tool_that_does_not_read_its_input_is_no_error(keeper, env):
    """A closed stdin ends the feeding, not the tool."""
    result = await sh(keeper, env, "exec 0<&-; echo done", stdin=b"x" * 1_000_000)

    assert result.stdout == b"done\n"


async def test_output_can_go_to_a_file(keeper, env, tmp_path):
    """With a file for stdout nothing passes through the service."""
    fd = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)

    result = await sh(keeper, env, "echo hello", stdout_to=fd)
    os.close(fd)

    assert result.stdout == b""
    assert (tmp_path / "out").read_text() == "hello\n"


async def test_too_much_output_ends_the_tool(keeper, env):
    """At the limit the tool is killed, and its caller is told."""
    with trio.fail_after(10), pytest.raises(OutputTooLong):
        await sh(keeper, env, "yes", output_bytes_max=100_000)

    await keeper.wait_empty()


async def test_the_limit_itself_is_allowed(keeper, env):
    """Exactly as much output as the limit is kept."""
    result = await sh(keeper, env, "head -c 1000 /dev/zero", output_bytes_max=1_000)

    assert len(result.stdout) == 1_000


async def test_a_cancelled_tool_leaves_nothing(keeper, env, traces):
    """Cancelled, it and all it started are gone before the cancellation goes on."""
    with trio.move_on_after(0.3) as scope:
        await sh(keeper, env, f"sleep {traces.mark} & setsid sleep {traces.mark} & wait")

    assert scope.cancelled_caught
    assert traces.pids() == set()


async def test_a_daemon_that_holds_the_pipe_delays_only_a_moment(keeper, env, traces, monkeypatch):
    """What the tool wrote is answered though a grandchild keeps its stdout open."""
    monkeypatch.setattr("actors.process.tool._HELD_PIPE_S", 0.05)

    with trio.fail_after(5):
        result = await sh(keeper, env, f"sleep {traces.mark} & echo done")

    assert result.stdout == b"done\n"
