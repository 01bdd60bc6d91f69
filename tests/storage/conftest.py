"""Both implementations of the event log behind one way to open them, with counted seams."""

import random
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import trio

from storage.ids import IdSource
from storage.sqlite_log import SqliteEventLog
from storage.testing import MemoryEventLog, MemoryStore


class Died(Exception):
    """What a test's die raises in place of ending the process."""


class Clock:
    """A wall clock that goes on by a fixed step at each reading; set ``now`` to move it.

    A log reads it while it commits. ``at_next_reading`` is called once, in the trio thread, at
    just that moment, and the commit waits for it.
    """

    def __init__(self, step_ns: int = 1_000) -> None:
        self.now = 1_700_000_000_000_000_000
        self.step_ns = step_ns
        self._hook: Callable[[], object] | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    def at_next_reading(self, hook: Callable[[], object]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._hook = hook

    def __call__(self) -> int:
        hook, self._hook = self._hook, None
        if hook is not None and threading.current_thread() is threading.main_thread():
            hook()
        elif hook is not None:
            trio.from_thread.run_sync(hook, trio_token=self._token)
        self.now += self.step_ns
        return self.now


class LogMaker:
    """Opens logs of one kind; all that it opens are the same log, as after a restart."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.path = folder / "log.db"
        self.clock = Clock()
        self.reasons: list[str] = []
        self.store = MemoryStore()
        self.ids = IdSource(self.clock, random.Random(7).randbytes)

    def die(self, reason: str) -> NoReturn:
        self.reasons.append(reason)
        raise Died(reason)

    def open(self, *, session: str = "s1", **options: Any) -> AbstractAsyncContextManager[Any]:
        seams: dict[str, Any] = {
            "ids": self.ids,
            "clock_ns": self.clock,
            "session": session,
            "die": self.die,
        }
        if self.kind == "memory":
            return MemoryEventLog.open(self.store, **seams, **options)
        return SqliteEventLog.open(self.path, **seams, **options)


@pytest.fixture(params=["memory", "sqlite"])
def maker(request: pytest.FixtureRequest, tmp_path: Path) -> LogMaker:
    """Promises of both logs."""
    return LogMaker(request.param, tmp_path)


@pytest.fixture
def sqlite_maker(tmp_path: Path) -> LogMaker:
    """Promises that only a file can keep or break."""
    return LogMaker("sqlite", tmp_path)


@pytest.fixture
def new_maker(tmp_path: Path) -> Callable[[str], LogMaker]:
    """Makers of either kind, each with a folder and a log of its own."""
    made = [0]

    def make(kind: str) -> LogMaker:
        made[0] += 1
        folder = tmp_path / f"{kind}-{made[0]}"
        folder.mkdir()
        return LogMaker(kind, folder)

    return make
