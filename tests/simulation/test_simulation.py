"""Promises of the simulation: it is kept by the product, it repeats, and it notices."""

import json
import os
import subprocess
import sys

import pytest

from actors.simulation import SimulationFailed, main_simulate, shrink, simulate
from actors.simulation.judge import Judge
from actors.supervisor import Supervisor

SEEDS = range(40)
DIGESTS = """
from actors.simulation import simulate
for seed in (3, 11, 20):
    print(simulate(seed).digest)
"""


@pytest.mark.slow
def test_a_sample_of_histories_keeps_every_promise():
    """Jobs, crashes and every invariant; the whole campaign is a script beside this file."""
    reports = [simulate(seed) for seed in SEEDS]

    assert sum(r.jobs for r in reports) / len(reports) >= 10
    crashes = sum(n for r in reports for name, n in r.faults.items() if name.startswith("crash"))
    assert crashes / len(reports) >= 2


@pytest.mark.slow
def test_a_seed_is_one_history():
    """Twice the same seed is the same log, byte for byte, and the same report."""
    assert simulate(5) == simulate(5)
    assert simulate(5).digest != simulate(6).digest


@pytest.mark.slow
def test_a_history_does_not_depend_on_the_hash_seed():
    """The log is byte-identical for four values of PYTHONHASHSEED, each in a fresh process."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGESTS],
            env={
                **os.environ,
                "PYTHONHASHSEED": str(hash_seed),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in (0, 1, 42, 4_294_967_295)
    }

    assert len(digests) == 1
    assert digests == {"".join(f"{simulate(seed).digest}\n" for seed in (3, 11, 20))}


@pytest.mark.slow
def test_fewer_steps_are_the_beginning_of_the_same_history():
    """So a failure can be shrunk: the events before the finale are those of the long one."""
    few, more = simulate(7, 10), simulate(7, 30)

    assert (few.steps, more.steps) == (10, 30)
    assert few.jobs <= more.jobs


@pytest.mark.slow
def test_a_broken_promise_names_the_seed_and_the_command_that_repeats_it(monkeypatch):
    """With one slot too many, some history fails, and shrinks to a shorter one."""
    slots_taken = Supervisor._slots_taken
    monkeypatch.setattr(Supervisor, "_slots_taken", lambda self: slots_taken(self) - 1)

    failed = next(filter(None, map(failure, SEEDS)))
    shortest = shrink(failed)

    assert "slots are taken" in failed.reason
    assert shortest.steps < failed.steps
    assert f"watchkeeper simulate --seed {failed.seed} --steps {shortest.steps}" in str(shortest)
    assert failure(failed.seed, shortest.steps) is not None
    assert failure(failed.seed, shortest.steps - 1) is None


def failure(seed, steps=None):
    """Answer how a history fails, None when it does not."""
    try:
        simulate(seed, steps)
    except SimulationFailed as failed:
        return failed
    return None


@pytest.mark.slow
def test_a_crash_at_any_boundary_of_a_calm_history_keeps_every_promise():
    """Before an append, before and after its commit, before and after each act on the host."""
    calm = simulate(1, 8, crash_at=0)
    hit = set()

    for crash_at in range(1, calm.boundaries + 1):
        hit.update(simulate(1, 8, crash_at=crash_at).crashed_at)

    assert calm.crashed_at == {}
    assert {name.split(": ")[1] for name in hit} == {
        "before append",
        "before commit",
        "after commit",
        "before act",
        "after act",
    }


@pytest.mark.slow
def test_the_command_answers_in_json_or_in_words(capsys):
    """Exit code 0, and the same figures in both."""
    assert main_simulate(4, 20, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert main_simulate(4, 20, as_json=False) == 0
    words = capsys.readouterr().out

    assert (report["seed"], report["steps"]) == (4, 20)
    assert report["digest"] in words
    assert f"seed 4: {report['jobs']} jobs" in words


@pytest.mark.slow
def test_the_command_answers_1_for_a_broken_promise(capsys, monkeypatch):
    """It says which, and how to see it again, on standard error."""
    monkeypatch.setattr(Judge, "ledger", lambda self: self.demand(False, "the books are open"))

    assert main_simulate(4, 20, as_json=True) == 1

    said = capsys.readouterr()
    assert said.out == ""
    assert "the books are open" in said.err
    assert "repeat: watchkeeper simulate --seed 4" in said.err
