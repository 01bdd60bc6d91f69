"""A sample of the hostile campaign: whatever an agent does, nothing of it is left."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]

SECONDS = 40
IMPOSSIBLE = {("subreaper", "service-kill", "kills_its_parent")}
"""The keeper is dead before the service is: what cleared its environment is not to be found."""


def load_campaign():
    path = Path(__file__).with_name("hostile_campaign.py")
    spec = importlib.util.spec_from_file_location("hostile_campaign", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_hostile_agents_leave_nothing():
    """One trial a cell, as many as there is time for: no process, no zombie, no open file."""
    campaign = load_campaign()

    done = campaign.run_campaign(1, seconds=SECONDS)

    assert {trial.mechanism for trial in done} == set(campaign.mechanisms_here()[0])
    print(f"{len(done)} trials in {SECONDS} s")
    unclean = [
        trial
        for trial in done
        if not trial.clean
        and (trial.mechanism, trial.ending, trial.behaviour) not in IMPOSSIBLE
        and not (trial.mechanism == "subreaper" and trial.after_restart == trial.zombies == 0)
    ]
    assert unclean == []
