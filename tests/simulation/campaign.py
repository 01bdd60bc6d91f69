"""Simulate many seeds on two processes and print what was hit.

``python tests/simulation/campaign.py SEEDS [FIRST]``; exits 1 when a promise was broken, after
printing each failing seed with the command that repeats it.
"""

import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from actors.simulation import SimulationFailed, SimulationReport, simulate

PROCESSES = 2


def one(seed: int) -> SimulationReport | str:
    """Answer the report of a seed, or why it failed."""
    try:
        return simulate(seed)
    except SimulationFailed as failed:
        return f"seed {seed}: {failed.reason[-1200:]}\nrepeat: watchkeeper simulate --seed {seed}"


def main(seeds: int, first: int) -> int:
    """Run the seeds and print the table."""
    began = time.monotonic()
    failures: list[str] = []
    totals: dict[str, Counter[str]] = {
        "event": Counter(),
        "ending": Counter(),
        "fault": Counter(),
        "crash": Counter(),
    }
    sums: Counter[str] = Counter()
    fewest_jobs = sys.maxsize
    with ProcessPoolExecutor(PROCESSES) as pool:
        for found in pool.map(one, range(first, first + seeds), chunksize=8):
            if isinstance(found, str):
                failures.append(found)
                continue
            totals["event"].update(found.events)
            totals["ending"].update(found.causes)
            totals["fault"].update(found.faults)
            totals["crash"].update(found.crashed_at)
            sums.update(
                jobs=found.jobs,
                crashes=sum(n for name, n in found.faults.items() if name.startswith("crash")),
                starts=found.starts,
                events=sum(found.events.values()),
                virtual_s=round(found.virtual_s),
            )
            fewest_jobs = min(fewest_jobs, found.jobs)
    for kind, counts in totals.items():
        for name, count in sorted(counts.items()):
            print(f"{kind:7} {count:9,} {name}")
    kept = max(1, seeds - len(failures))
    print(", ".join(f"{name} {count / kept:,.1f}" for name, count in sums.items()), "a history")
    print(f"fewest jobs in a history: {fewest_jobs}")
    print(f"{seeds} seeds, {len(failures)} broken, {time.monotonic() - began:.0f} s")
    print("\n".join(failures))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
