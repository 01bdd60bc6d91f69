"""Submission to running, against the disk and the spawns that it can not do without.

``python tests/benchmarks/bench_submit.py``: one job after another in a scratch workspace, from
the call of ``submit`` to the commit of ``job.started`` (the status is ``running``) and on to that
of ``agent.started`` (workspace and keeper stand); in turn with a write and fdatasync, and with the
spawn of ``/bin/true``. Prints medians and the sum of the goal: 3 fdatasync + 2 spawns + 5 ms.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parents[2]))

from actors.messages import SubmitRequest
from actors.runtime import RuntimeConfig, open_runtime
from storage import events as e
from storage.ids import job_stream

ROUNDS = 40
RUNNING = "submission to running"
BEGUN = "submission to begun"


def fdatasync_ms(file):
    begin = time.perf_counter()
    os.write(file, b"x" * 4096)
    os.fdatasync(file)
    return (time.perf_counter() - begin) * 1000


def spawn_ms():
    begin = time.perf_counter()
    subprocess.run(["/bin/true"], check=True)
    return (time.perf_counter() - begin) * 1000


async def submission_ms(runtime):
    begin = time.perf_counter()
    submitted = await runtime.submit(SubmitRequest(prompt="true", agent="shell", local=True))
    running = begun = None
    async with runtime.log.follow(stream=job_stream(submitted.job_id)) as events:
        async for record in events:
            if isinstance(record.event, e.JobStarted):
                running = time.perf_counter()
            if isinstance(record.event, e.AgentStarted):
                begun = time.perf_counter()
            if isinstance(record.event, e.WorkspaceRemoved):
                break
    return (running - begin) * 1000, (begun - begin) * 1000


async def main():
    with tempfile.TemporaryDirectory() as folder:
        file = os.open(Path(folder) / "raw", os.O_CREAT | os.O_WRONLY)
        figures = {name: [] for name in (RUNNING, BEGUN, "fdatasync", "spawn", "goal")}
        async with open_runtime(RuntimeConfig(data=Path(folder) / "d", version="bench")) as runtime:
            for number in range(ROUNDS + 5):
                running, begun = await submission_ms(runtime)
                sync = [fdatasync_ms(file) for _ in range(3)]
                spawn = [spawn_ms() for _ in range(2)]
                if number < 5:
                    continue
                figures[RUNNING].append(running)
                figures[BEGUN].append(begun)
                figures["fdatasync"].append(statistics.median(sync))
                figures["spawn"].append(statistics.median(spawn))
                figures["goal"].append(sum(sync) + sum(spawn) + 5)
                await trio.sleep(0.1)
        for name, values in figures.items():
            low, mid, high = min(values), statistics.median(values), max(values)
            print(f"{name:24} min {low:7.2f}  p50 {mid:7.2f}  max {high:7.2f} ms")
        goal = statistics.median(figures["goal"])
        for name in (RUNNING, BEGUN):
            print(f"{name} / goal: {statistics.median(figures[name]) / goal:.2f} (p50)")


trio.run(main)
