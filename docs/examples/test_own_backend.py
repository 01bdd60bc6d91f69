"""Somebody's own backend, tested for success, timeout, cancel and crash without a process.

The agent is a made-up command line program, ``tinker``, that writes one JSON object a line.
"""

import json
import math

from actors.backends import BackendFact, Launch, Verdict
from actors.backends.backend import judge_exit
from actors.testing import Program, event, lines, virtual_clock
from storage import events as e


class TinkerBackend:
    """Starts ``tinker`` with the prompt on its stdin, and reads its steps and its answer."""

    reads_lines = True

    def __init__(self, spec):
        self._spec = spec
        self._steps = 0
        self._answer = None

    def launch(self, *, home, tree):
        return Launch(argv=("tinker", "--json"), stdin=self._spec.prompt.encode())

    def line(self, line):
        try:
            told = json.loads(line)
        except ValueError:
            return []
        if told.get("event") == "step":
            self._steps += 1
            return [BackendFact(event=e.AgentTurnFinished(turn=self._steps))]
        if told.get("event") == "done":
            self._answer = told["answer"].encode()
            cost = round(told["dollars"] * 1_000_000)
            return [BackendFact(event=e.UsageRecorded(cost_microusd=cost))]
        return []

    def verdict(self, exit_status, stdout, stderr):
        if exit_status.code == 0 and self._answer is None:
            return Verdict(cause="no_result", error=b"tinker ended without an answer")
        return judge_exit(exit_status, result=self._answer, stderr=stderr)


STEP = {"event": "step"}
DONE = {"event": "done", "answer": "fixed it", "dollars": 0.02}


def tinker(*said, **script):
    return Program(backend=TinkerBackend, name="tinker", output=lines(*said), **script)


@virtual_clock
async def test_the_answer_of_tinker_is_the_result_of_the_job(watchkeeper_world):
    async with watchkeeper_world({"tinker": tinker(STEP, STEP, DONE)}) as world:
        job = await world.run("fix the bug")

        assert world.stdin(job) == b"fix the bug"
        assert world.state(job).usage.cost_microusd == 20_000
        world.assert_history(
            job,
            [
                "job.submitted",
                "job.started",
                "workspace.prepared",
                "process.spawned",
                event("agent.started", backend="tinker"),
                event("agent.turn_finished", turn=1),
                event("agent.turn_finished", turn=2),
                "usage.recorded",
                event("agent.ended", cause=None, result="fixed it"),
                ...,
                "job.completed",
                "workspace.removed",
            ],
            ignoring=["output.recorded"],
        )


@virtual_clock
async def test_a_tinker_that_hangs_is_killed_at_its_limit(watchkeeper_world):
    hangs = tinker(STEP, run_s=math.inf, ignores_term=True, children=3)

    async with watchkeeper_world(hangs) as world:
        job = await world.run(timeout_ms=60_000)

        world.assert_history(
            job, [..., event("agent.ended", cause="timed_out"), ..., "job.timed_out", ...]
        )
        world.assert_nothing_left()


@virtual_clock
async def test_a_tinker_can_be_cancelled_between_two_steps(watchkeeper_world):
    async with watchkeeper_world(tinker(STEP, STEP, STEP, DONE, run_s=9)) as world:
        job = (await world.submit()).job_id
        await world.until_type(job, "agent.turn_finished", 2)
        await world.cancel(job)
        await world.until_clean(job)

        assert world.state(job).usage.turns == 2
        world.assert_history(
            job, [..., "job.cancel_requested", ..., "job.cancelled", "workspace.removed"]
        )


@virtual_clock
async def test_the_crash_of_tinker_is_its_failure(watchkeeper_world):
    async with watchkeeper_world(tinker(STEP, signal=11)) as world:
        job = await world.run()

        assert world.error(job) == b"signal 11"
        world.assert_history(job, [..., event("job.failed", cause="agent_exit"), ...])


@virtual_clock(schedules=5)
async def test_a_run_that_the_service_lost_is_repeated_once(watchkeeper_world):
    def first_hangs(spec):
        return tinker(STEP, run_s=math.inf) if spec.epoch == 1 else tinker(STEP, DONE)

    async with watchkeeper_world({"tinker": first_hangs}) as world:
        job = (await world.submit(max_attempts=2)).job_id
        await world.until_type(job, "agent.turn_finished")
        await world.crash_and_recover()
        await world.until_clean(job)

        world.assert_history(
            job,
            [
                ...,
                event("run.interrupted", epoch=1),
                ...,
                "job.requeued",
                event("job.started", epoch=2),
                ...,
                "job.completed",
                "workspace.removed",
            ],
        )
        assert world.result(job) == b"fixed it"
