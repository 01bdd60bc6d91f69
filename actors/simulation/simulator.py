"""Run a history from its seed, and say how it can be repeated."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import attrs
import msgspec
import trio
import trio.testing

from actors.simulation.history import History

SEEDS: Final = 2**63


@attrs.frozen(kw_only=True)
class SimulationReport:
    """What happened in a history that kept its promises; counts by name, virtual seconds.

    ``boundaries`` is how many points before the finale a crash could have been at, and
    ``crashed_at`` names those at which there was one.
    """

    seed: int
    steps: int
    digest: str
    jobs: int
    starts: int
    virtual_s: float
    events: dict[str, int]
    causes: dict[str, int]
    faults: dict[str, int]
    boundaries: int
    crashed_at: dict[str, int]

    def to_json(self) -> bytes:
        """Answer the report as one line of JSON, keys sorted."""
        return msgspec.json.encode(attrs.asdict(self), order="sorted")


class SimulationFailed(Exception):
    """A promise was broken; the same seed breaks it again."""

    def __init__(self, seed: int, steps: int, reason: str, again: str) -> None:
        super().__init__(f"seed {seed}, {steps} steps: {reason}\nrepeat: {again}")
        self.seed = seed
        self.steps = steps
        self.reason = reason


def command(seed: int, steps: int, crash_at: int | None = None, again_after: int = 0) -> str:
    """Answer the command that repeats a history; one with ``crash_at`` is for Python only."""
    if crash_at is None:
        return f"watchkeeper simulate --seed {seed} --steps {steps}"
    call = f"simulate({seed}, {steps}, crash_at={crash_at}, again_after={again_after})"
    return f'python -c "from actors.simulation import simulate; {call}"'


def simulate(
    seed: int, steps: int | None = None, *, crash_at: int | None = None, again_after: int = 0
) -> SimulationReport:
    """Play one history and judge it; the same arguments give the same bytes in the log.

    ``steps`` None plays as many as the seed says; fewer play the beginning. ``crash_at`` plays a
    calm history with one crash, at the boundary of that number; 0: with none. ``again_after``
    adds a second one, so many boundaries later. Raises SimulationFailed. Not to be called inside a running trio.
    """
    assert 0 <= seed < SEEDS, "a seed is a number of 63 bits"
    history = History(seed, steps, crash_at, again_after)
    clock = trio.testing.MockClock(autojump_threshold=0)
    again = command(seed, history.steps, crash_at, again_after)
    with _deterministic(seed):
        try:
            trio.run(history.play, clock=clock)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            reason = "".join(traceback.format_exception(error))
            raise SimulationFailed(seed, history.steps, reason, again) from error
    if history.judge.verdict is not None:
        raise SimulationFailed(seed, history.steps, history.judge.verdict, again)
    return SimulationReport(
        seed=seed,
        steps=history.steps,
        digest=history.digest(),
        jobs=len(history.judge.states),
        starts=history.harness.starts,
        virtual_s=round(clock.current_time(), 3),
        events=dict(sorted(history.judge.events.items())),
        causes=dict(sorted(history.judge.causes.items())),
        faults=dict(sorted(history.faults.items())),
        boundaries=history.boundaries,
        crashed_at=dict(sorted(history.crashed_at.items())),
    )


def shrink(failed: SimulationFailed) -> SimulationFailed:
    """Answer the failure of the shortest beginning of the history that still breaks a promise.

    Halves the steps: at most eight runs. A shorter beginning may pass where a longer one fails
    and a yet shorter one does not; then the answer is one of them.
    """
    low, best = 0, failed
    while best.steps - low > 1:
        middle = (low + best.steps) // 2
        found = _failure(failed.seed, middle)
        if found is None:
            low = middle
        else:
            best = found
    return best


def main_simulate(seed: int, steps: int | None, as_json: bool) -> int:
    """Run one history for the command line; answer the exit code: 0 kept, 1 broken."""
    try:
        report = simulate(seed, steps)
    except SimulationFailed as failed:
        shortest = shrink(failed)
        sys.stderr.write(f"{shortest}\n")
        return 1
    if as_json:
        sys.stdout.write(report.to_json().decode() + "\n")
        return 0
    events = sum(report.events.values())
    sys.stdout.write(
        f"seed {report.seed}: {report.jobs} jobs, {events} events, {report.starts} starts of the "
        f"service, {report.virtual_s:g} virtual seconds, every promise kept\n"
        f"digest {report.digest}\n"
    )
    for title, counts in (("ending", report.causes), ("fault", report.faults)):
        for name, count in counts.items():
            sys.stdout.write(f"{title:7} {count:5} {name}\n")
    return 0


def _failure(seed: int, steps: int) -> SimulationFailed | None:
    try:
        simulate(seed, steps)
    except SimulationFailed as failed:
        return failed
    return None


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """Let trio's scheduler draw from the seed; these are private names, so look that they exist."""
    # Any: a private module, and a name of it that is final to type checkers.
    run: Any = trio._core._run  # noqa: SLF001
    assert hasattr(run, "_ALLOW_DETERMINISTIC_SCHEDULING"), "trio has no such switch any more"
    assert hasattr(run, "_r"), "trio's scheduler draws from somewhere else"
    before, state = run._ALLOW_DETERMINISTIC_SCHEDULING, run._r.getstate()  # noqa: SLF001
    run._ALLOW_DETERMINISTIC_SCHEDULING = True  # noqa: SLF001
    run._r.seed(seed)  # noqa: SLF001
    try:
        yield
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = before  # noqa: SLF001
        run._r.setstate(state)  # noqa: SLF001
