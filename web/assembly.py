"""From settings to a running service: the one place that knows how a runtime is made."""

import traceback
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, cast

from web.service import RuntimeApi
from web.settings import Settings
from web.submission import WorkspaceDefaults
from web.version import VERSION

Report = Callable[[str, BaseException], None]
Opener = Callable[[Settings, Report], AbstractAsyncContextManager[RuntimeApi]]

FRAMES_SHOWN: Final = 12


@asynccontextmanager
async def open_embedded(settings: Settings, report: Report) -> AsyncGenerator[RuntimeApi, None]:
    """Hold the data folder for jobs of our own; those that wait in the log go on waiting."""
    async with _open(settings, report, embedded=True) as runtime:
        yield runtime


@asynccontextmanager
async def open_service(settings: Settings, report: Report) -> AsyncGenerator[RuntimeApi, None]:
    """Hold the data folder and run; raises FolderLocked, LogTooNew."""
    async with _open(settings, report, embedded=False) as runtime:
        yield runtime


@asynccontextmanager
async def _open(
    settings: Settings, report: Report, *, embedded: bool
) -> AsyncGenerator[RuntimeApi, None]:
    from actors.runtime import RuntimeConfig, Seams, open_runtime

    config = RuntimeConfig(
        data=settings.server.data,
        version=VERSION,
        limits=settings.runtime_limits(),
        agent_folders=settings.agents.folder,
        allow_shell=settings.agents.allow_shell,
        models_default=settings.models.default,
        models_allowed=settings.models.allowed,
        embedded=embedded,
    )
    async with open_runtime(config, Seams(on_crash=report)) as runtime:
        # cast: Runtime.log is declared as EventLog; every log it opens has the service's fold.
        yield cast("RuntimeApi", runtime)


def workspace_defaults(settings: Settings) -> WorkspaceDefaults:
    """Answer what requests leave open."""
    return WorkspaceDefaults(
        repo=settings.workspace.repo,
        ref=settings.workspace.ref,
        kind=settings.workspace.kind,
        local_repositories=settings.agents.allow_shell,
    )


def crash_lines(error: BaseException) -> list[str]:
    """Answer where an error came from, without its text: that could hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES_SHOWN:]
    found = [type(error).__name__]
    found += [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            found.extend(crash_lines(inner))
    return found
