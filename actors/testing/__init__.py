"""The test kit: fakes at the seams, a harness, and a workbench for tests of one's own agents.

Its names are imported when they are first used: pytest imports this package in every project
that has Watchkeeper installed, because the plugin is in it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from actors.testing.history import EventMatcher, Expected, assert_history, event
    from actors.testing.host import (
        Crashed,
        FakeArtifacts,
        FakeHost,
        FakeRun,
        RunKey,
        Script,
        ScriptedFact,
        World,
    )
    from actors.testing.program import Output, Program, lines
    from actors.testing.schedule import virtual_clock
    from actors.testing.store import MortalLog, WatchedStore
    from actors.testing.workbench import (
        Agent,
        Workbench,
        memory_log,
        open_workbench,
    )
    from actors.testing.world import Harness, Service, open_world

__all__ = [
    "Agent",
    "Crashed",
    "EventMatcher",
    "Expected",
    "FakeArtifacts",
    "FakeHost",
    "FakeRun",
    "Harness",
    "MortalLog",
    "Output",
    "Program",
    "RunKey",
    "Script",
    "ScriptedFact",
    "Service",
    "WatchedStore",
    "Workbench",
    "World",
    "assert_history",
    "event",
    "lines",
    "memory_log",
    "open_workbench",
    "open_world",
    "virtual_clock",
]

_MODULES: Final = ("history", "host", "program", "schedule", "store", "workbench", "world")


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _MODULES:
            found = vars(import_module(f"{__name__}.{module}")).get(name)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
