"""Crash at every boundary of calm histories, and print the table.

Each boundary is tried twice: with one crash, and with a second one a few boundaries later, which
is mostly in recovery.

``python tests/simulation/boundaries.py [SEEDS] [STEPS]``: rows are event types and acts on the
host, columns the stage at which the service died. Exits 1 when a promise was broken.
"""

import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from actors.simulation import SimulationFailed, simulate

PROCESSES = 2
STAGES = ("before append", "before commit", "after commit", "before act", "after act")


def one(case: tuple[int, int, int, int]) -> dict[str, int] | str:
    """Answer where a history crashed, or why it broke a promise."""
    seed, steps, crash_at, again = case
    try:
        return simulate(seed, steps, crash_at=crash_at, again_after=again).crashed_at
    except SimulationFailed as failed:
        return str(failed)[-1200:]


def main(seeds: int, steps: int) -> int:
    """Crash everywhere and print the table."""
    cases = [
        (seed, steps, crash_at, again)
        for seed in range(seeds)
        for crash_at in range(1, simulate(seed, steps, crash_at=0).boundaries + 1)
        for again in (0, 1 + crash_at % 12)
    ]
    hits: Counter[str] = Counter()
    failures = []
    with ProcessPoolExecutor(PROCESSES) as pool:
        for found in pool.map(one, cases, chunksize=16):
            if isinstance(found, str):
                failures.append(found)
            else:
                hits.update(found)
    print(f"{'':24}" + "".join(f"{stage:>15}" for stage in STAGES))
    for name in sorted({key.split(": ")[0] for key in hits}):
        counts = [hits[f"{name}: {stage}"] for stage in STAGES]
        print(f"{name:24}" + "".join(f"{count or '-':>15}" for count in counts))
    print(f"{len(cases)} histories, {hits.total()} hits, {len(failures)} broken")
    print("\n".join(failures))
    return int(bool(failures))


if __name__ == "__main__":
    argv = [int(value) for value in sys.argv[1:]]
    sys.exit(main(*(argv + [8, 30][len(argv) :])))
