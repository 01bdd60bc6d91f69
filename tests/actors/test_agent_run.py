"""An agent's run against time: which of two ends that come at once is the verdict."""

import pytest
import trio

from actors.agent_run import AgentRun
from actors.backends import BACKENDS
from actors.host import RunSpec
from actors.process.runner import Child
from actors.process.tool import Pipes
from actors.workspace import DataLayout, RunPlace
from storage import events as e
from storage.ids import JobId

LIMIT_S = 900.0


def make_run(tmp_path):
    spec = RunSpec(
        job=JobId("job_x"),
        epoch=1,
        agent="shell",
        backend="shell",
        prompt="",
        workspace=e.WorkspaceRequest(),
        timeout_ms=int(LIMIT_S * 1000),
        max_budget_microusd=1,
        grace_ms=1,
        output_bytes_max=1000,
    )
    place = RunPlace(layout=DataLayout(data=tmp_path), job=spec.job, epoch=spec.epoch)
    place.output("stdout").parent.mkdir(parents=True, exist_ok=True)
    return AgentRun(spec, place, BACKENDS["shell"](spec))


async def nothing():
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("ends_at_s", "cause"),
    [(LIMIT_S - 1, None), (LIMIT_S, None), (LIMIT_S + 1, "timed_out")],
)
async def test_an_end_at_the_very_limit_counts_as_an_end(
    tmp_path, autojump_clock, ends_at_s, cause
):
    """SV119: below, at and above the limit; at the same moment the order is fixed, every time."""
    causes = set()

    async def end_later(child):
        await trio.sleep(ends_at_s)
        child.note_ended(0)

    for _ in range(20):
        run, child = make_run(tmp_path), Child(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_later, child)
            nursery.start_soon(run.run, child, Pipes(stdin=False), None, nothing)
            causes.add((await run.outcome()).cause)
            await run.finish()
            nursery.cancel_scope.cancel()

    assert causes == {cause}
