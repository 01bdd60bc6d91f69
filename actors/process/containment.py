"""Which mechanism holds the jobs of this service, and why no stronger one does."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import attrs

from actors.errors import ContainmentUnavailable
from actors.process.keeper import MECHANISMS
from actors.process.runner import KEEPER_FILE, keeper_environment

MODES: Final = ("auto", "pidns", "cgroup", "uid", "subreaper")
_NOT_BUILT: Final = "this version does not have it"
_PROBE_S: Final = 20.0

Probe = Callable[[str], str | None]


@attrs.frozen(kw_only=True)
class Containment:
    """The mechanism in force; ``why_not`` says of each stronger one why it is not used."""

    mechanism: str
    why_not: Mapping[str, str] = attrs.field(factory=dict)


def choose(mode: str, probe: Probe) -> Containment:
    """Answer the mechanism for a mode; raises ContainmentUnavailable when it does not work.

    ``probe`` answers None for a mechanism that works, else why not; ``auto`` takes the first that
    does. ``subreaper`` is not probed: it works everywhere.
    """
    assert mode in MODES, mode
    if mode != "auto":
        why = _NOT_BUILT if mode not in MECHANISMS else _probed(mode, probe)
        if why is not None:
            raise ContainmentUnavailable(mode, why)
        return Containment(mechanism=mode, why_not=_asked_for(mode))
    why_not: dict[str, str] = {}
    for mechanism in MECHANISMS:
        why = _probed(mechanism, probe)
        if why is None:
            return Containment(mechanism=mechanism, why_not=why_not)
        why_not[mechanism] = why
    raise AssertionError("the last mechanism works everywhere")


def find_containment(mode: str, folder: Path) -> Containment:
    """Answer the mechanism for a mode, tried out in a folder; blocks for some milliseconds."""
    return choose(mode, lambda mechanism: try_out(mechanism, folder))


def try_out(mechanism: str, folder: Path) -> str | None:
    """Answer None when a mechanism works in a folder of ours, else why it does not.

    Starts the keeper's own program, so that what is tried is what will be used.
    """
    try:
        done = subprocess.run(  # noqa: S603  our own program
            [sys.executable, "-I", "-S", str(KEEPER_FILE), "probe", mechanism],
            cwd=folder,
            env=keeper_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the probe did not end within {_PROBE_S:.0f} s"
    except OSError as error:
        return f"the probe could not be started: {error}"
    answer = done.stdout.decode("utf-8", "replace")
    if answer == "ok":
        return None
    return answer or f"the probe ended with code {done.returncode} and said nothing"


def _probed(mechanism: str, probe: Probe) -> str | None:
    return None if mechanism == "subreaper" else probe(mechanism)


def _asked_for(mode: str) -> dict[str, str]:
    stronger = list(MECHANISMS)[: list(MECHANISMS).index(mode)]
    return dict.fromkeys(stronger, f"the configuration asks for {mode}")
