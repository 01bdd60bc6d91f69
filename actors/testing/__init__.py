"""Fakes at the seams and a harness, for tests and simulations of the runtime."""

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
from actors.testing.store import MortalLog, WatchedStore
from actors.testing.world import Harness, Service, open_world

__all__ = [
    "Crashed",
    "FakeArtifacts",
    "FakeHost",
    "FakeRun",
    "Harness",
    "MortalLog",
    "RunKey",
    "Script",
    "ScriptedFact",
    "Service",
    "WatchedStore",
    "World",
    "open_world",
]
