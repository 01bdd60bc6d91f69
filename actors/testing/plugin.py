"""The pytest plugin ``watchkeeper``: fixtures for tests of agents, and nothing else.

It has no hooks and imports the runtime when a fixture is used, so that it costs nothing in a
project that has Watchkeeper installed and does not use it. Its fixtures are plain ones: they work
without a plugin for async tests, and beside any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from actors.testing.workbench import Workbench
    from storage.testing import MemoryEventLog


@pytest.fixture
def watchkeeper_world() -> Callable[..., AbstractAsyncContextManager[Workbench]]:
    """Answer ``open_workbench(agents, limits=...)``: a runtime on the virtual clock."""
    from actors.testing.workbench import open_workbench

    return open_workbench


@pytest.fixture
def watchkeeper_log() -> MemoryEventLog:
    """Answer an empty event log in memory."""
    from actors.testing.workbench import memory_log

    return memory_log()
