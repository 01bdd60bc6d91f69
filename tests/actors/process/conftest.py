"""Keepers for tests, and a way to see whether any process of a test is left."""

import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from actors.process.keeper import process_table
from actors.process.pool import KeeperPool, open_keeper_pool
from actors.process.runner import KeeperProcess


class Traces:
    """A mark that a test puts into the arguments of all it starts."""

    def __init__(self) -> None:
        self.mark = f"98765.{uuid.uuid4().int % 10**9:09d}"

    def pids(self) -> set[int]:
        """The processes that carry the mark and live."""
        found = set()
        for process in process_table().values():
            try:
                line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            except OSError:
                continue
            if self.mark.encode() in line and not process.dead:
                found.add(process.pid)
        return found

    async def appear(self, count: int) -> None:
        """Wait until so many are there."""
        with trio.fail_after(60):
            while len(self.pids()) < count:
                await trio.sleep(0.01)

    async def vanish(self) -> None:
        """Wait until none is there."""
        with trio.fail_after(60):
            while self.pids():
                await trio.sleep(0.01)


@pytest.fixture
def traces() -> Traces:
    """A mark for this test's processes."""
    return Traces()


@pytest.fixture
async def pool() -> AsyncIterator[KeeperPool]:
    """A pool without warm keepers."""
    async with open_keeper_pool(size=0) as pool:
        yield pool


@pytest.fixture
async def keeper(pool: KeeperPool) -> KeeperProcess:
    """One keeper."""
    return await pool.acquire()


@pytest.fixture
def env() -> dict[str, str]:
    """An environment with nothing but a path."""
    return {"PATH": os.environ["PATH"]}


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def count_fds():
    """Counts the open files of this process."""
    return open_fds


def own_children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


@pytest.fixture
def children():
    """Answers the pids of this process's children, zombies too.

    Any test before may have made this process a subreaper (a host does, for good), so that it
    adopts what the service of another test left: only a difference says something.
    """
    return own_children
