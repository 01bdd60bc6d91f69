"""Measure what a waiting job and a running job cost: ``python tests/benchmarks/bench_memory.py``.

Prints KiB a job beside the budget; exits 1 when a budget is exceeded. The memory of the log
(the events of the in-memory store, a file in production) is not counted.
"""

import gc
import math
import sys
import tracemalloc

import trio
import trio.testing

from actors.limits import Limits
from actors.testing import Script, open_world

QUEUED = 1_000
RUNNING = 100
BUDGET_KIB = {"queued": 1.0, "running": 16.0}
OURS = tracemalloc.Filter(inclusive=False, filename_pattern="*/storage/*")
FAKES = tracemalloc.Filter(inclusive=False, filename_pattern="*/actors/testing/*")


def held_kib() -> float:
    """Answer the memory in use, without what the store and the fakes hold."""
    gc.collect()
    snapshot = tracemalloc.take_snapshot().filter_traces((OURS, FAKES))
    return sum(stat.size for stat in snapshot.statistics("filename")) / 1024


async def measure() -> dict[str, float]:
    """Answer KiB a job, by kind."""
    limits = Limits(capacity=RUNNING, queue_depth=QUEUED + RUNNING)
    found: dict[str, float] = {}
    async with open_world(Script(run_s=math.inf), limits=limits) as world:
        before = held_kib()
        for _ in range(RUNNING):
            await world.submit(timeout_ms=10**9)
        await trio.sleep(5)
        running = held_kib()
        found["running"] = (running - before) / RUNNING
        for _ in range(QUEUED):
            await world.submit(timeout_ms=10**9)
        await trio.sleep(5)
        found["queued"] = (held_kib() - running) / QUEUED
    return found


def main() -> int:
    """Measure, print, and compare with the budgets."""
    tracemalloc.start()
    found = trio.run(measure, clock=trio.testing.MockClock(autojump_threshold=0))
    for kind, kib in found.items():
        print(f"{kind:8} {kib:6.2f} KiB a job (budget {BUDGET_KIB[kind]:g})")
    return int(any(kib > BUDGET_KIB[kind] for kind, kib in found.items()))


if __name__ == "__main__":
    sys.exit(main())
