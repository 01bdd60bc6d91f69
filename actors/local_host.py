"""Runs jobs on this machine: implements :class:`actors.host.Host`."""

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from actors.git import GitSetup
from actors.host import Reconciled, RunSpec
from actors.limits import Limits
from actors.local_run import LocalRun, RunServices, reaped_event
from actors.process.identity import Mark, ProcessIdentity, current_boot_id
from actors.process.pool import open_keeper_pool
from actors.process.reaped import Reaped
from actors.process.sweep import become_subreaper, marks_of_log, sweep_marked, sweep_run
from actors.repository import Repositories
from actors.workspace import DataLayout, RunPlace, delete, discard
from storage import events as e
from storage.ids import JobId

PASSED_VARIABLES: Final = (
    "PATH",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "LOGNAME",
    "SHELL",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "TERM",
    "TZ",
    "USER",
)
_DYING_S: Final = 5.0


class LocalHost:
    """A place where jobs run under keepers, in workspaces below a data folder."""

    def __init__(self, services: RunServices, layout: DataLayout) -> None:
        self._services = services
        self._layout = layout
        # What carried a mark when the service started; None once it runs jobs of its own.
        self._marks_at_start: frozenset[Mark] | None = None

    @property
    def containment(self) -> str:
        """The mechanism in force."""
        return "subreaper"

    @property
    def confined(self) -> bool:
        """Whether jobs see only what is theirs: not yet."""
        return False

    @property
    def layout(self) -> DataLayout:
        """Where the host keeps what; raw output of running jobs lies in ``layout.output``."""
        return self._layout

    def open_run(self, spec: RunSpec) -> LocalRun:
        """Answer the run of this epoch; starts nothing yet."""
        self._marks_at_start = None
        return LocalRun(spec, self._place(spec.job, spec.epoch), self._services)

    def adopt_run(self, spec: RunSpec, workspace: e.WorkspacePrepared | None) -> LocalRun:
        """Answer a run whose workspace exists already, to capture and remove it."""
        place = self._place(spec.job, spec.epoch)
        self._marks_at_start = None
        return LocalRun(spec, place, self._services, adopted=workspace)

    async def reconcile(self, job: JobId, epoch: int, keeper: e.ProcessSpawned) -> Reconciled:
        """Answer ``gone`` once the run's keeper is dead; it dies with its service.

        Waits a few seconds for one that is just ending; ``alive`` is one that does not.
        """
        identity = _identity(keeper)
        boot_id = current_boot_id()
        with trio.move_on_after(_DYING_S):
            while identity.alive(boot_id):
                await _wait_for_end(identity.pid)
        return "alive" if identity.alive(boot_id) else "gone"

    async def reap(
        self, job: JobId, epoch: int, keeper: e.ProcessSpawned | None
    ) -> e.ProcessReaped:
        """End every process that carries the run's mark, or descends from its keeper."""
        mark = Mark(job=job, epoch=epoch, log_id=self._services.log_id)
        identity = _identity(keeper) if keeper is not None else None
        if self._left_nothing(mark, identity):
            await trio.lowlevel.checkpoint()
            return reaped_event("recovery", Reaped())
        reaped = await sweep_run(
            mark,
            keeper=identity,
            deadline_ms=self._services.limits.reap_deadline_ms,
        )
        return reaped_event("recovery", reaped)

    async def sweep(self, keep: frozenset[tuple[JobId, int]]) -> int:
        """Remove workspaces and processes of no run in ``keep``; answer how many were found."""
        self._marks_at_start = await marks_of_log(self._services.log_id)
        ended = await sweep_marked(
            self._marks_at_start,
            keep=frozenset((str(job), epoch) for job, epoch in keep),
            deadline_ms=self._services.limits.reap_deadline_ms,
        )
        names = frozenset(f"{job}.{epoch}" for job, epoch in keep)
        removed = await trio.to_thread.run_sync(_discard_others, self._layout, names)
        await self._services.wake_trash.send(None)
        return removed + sum(report.seen for report in ended)

    def _left_nothing(self, mark: Mark, keeper: ProcessIdentity | None) -> bool:
        """Answer whether the look at the start showed that a run of an earlier service is gone.

        Only a marked process makes marked ones, so what was not there then does not come later.
        """
        if self._marks_at_start is None or mark in self._marks_at_start:
            return False
        return keeper is None or not keeper.alive(current_boot_id())

    def _place(self, job: JobId, epoch: int) -> RunPlace:
        return RunPlace(self._layout, job, epoch)


@asynccontextmanager
async def open_local_host(
    data: Path,
    *,
    log_id: str,
    limits: Limits | None = None,
    environment: Mapping[str, str] | None = None,
    pool_size: int = 2,
) -> AsyncGenerator[LocalHost, None]:
    """Run a host on a data folder that is locked for us.

    ``log_id`` is in the mark of every process, so that two logs never take each other's.
    ``environment`` (None: that of this process) is what the allow-list for agents chooses from.
    On the way out every keeper and all that it holds is ended and reaped.
    """
    layout = await trio.to_thread.run_sync(DataLayout.make, data)
    setup = await trio.to_thread.run_sync(GitSetup.write, layout.git)
    become_subreaper()
    wake, woken = trio.open_memory_channel[None](1)
    async with (
        wake,
        woken,
        open_keeper_pool(size=pool_size) as pool,
        trio.open_nursery() as nursery,
    ):
        services = RunServices(
            nursery=nursery,
            pool=pool,
            setup=setup,
            limits=limits or Limits(),
            log_id=log_id,
            environment=allowed_environment(os.environ if environment is None else environment),
            repositories=Repositories(layout.bases, nursery, pool, setup),
            wake_trash=wake,
        )
        nursery.start_soon(_empty_trash, layout.trash, woken)
        yield LocalHost(services, layout)
        nursery.cancel_scope.cancel()


def allowed_environment(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Answer the part of an environment that every agent may see; no token is among it."""
    return tuple((name, environment[name]) for name in PASSED_VARIABLES if name in environment)


async def _empty_trash(trash: Path, woken: trio.MemoryReceiveChannel[None]) -> None:
    while True:
        for path in await trio.to_thread.run_sync(_entries, trash):
            # Abandoned at a stop of the service: the rest is found in the trash at the next start.
            await trio.to_thread.run_sync(delete, path, abandon_on_cancel=True)
        await woken.receive()


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _discard_others(layout: DataLayout, keep: frozenset[str]) -> int:
    found = [path for path in layout.workspaces.iterdir() if path.name not in keep]
    others = [
        path
        for folder in (layout.runs, layout.captures, layout.output)
        for path in folder.iterdir()
        if path.name not in keep and path.stem not in keep
    ]
    discard((*found, *others), layout.trash)
    return len(found)


def _identity(keeper: e.ProcessSpawned) -> ProcessIdentity:
    return ProcessIdentity(pid=keeper.pid, start_time=keeper.start_time, boot_id=keeper.boot_id)


async def _wait_for_end(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        await trio.lowlevel.checkpoint()
        return
    try:
        await trio.lowlevel.wait_readable(fd)
    finally:
        os.close(fd)
