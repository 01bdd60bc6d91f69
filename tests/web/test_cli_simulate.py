"""The command ``simulate``."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_seed_gives_the_same_json_twice_and_no_wall_clock_figure():
    """Two processes with one seed print the same bytes: digest, counts, virtual seconds."""
    command = [sys.executable, "-m", "web", "simulate", "--seed", "7", "--json"]

    first, second = (subprocess.run(command, capture_output=True, check=True) for _ in range(2))

    assert first.stdout == second.stdout
    assert {"digest", "events", "virtual_s"} <= json.loads(first.stdout).keys()


def test_a_seed_is_needed():
    """Without a seed the command says so."""
    command = [sys.executable, "-m", "web", "simulate"]

    refused = subprocess.run(command, capture_output=True, check=False)

    assert refused.returncode == 2
    assert b"--seed" in refused.stderr
