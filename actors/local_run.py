"""One epoch of one job on this machine: its keeper, its workspace, its agent, its ending."""

import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from signal import SIGTERM
from typing import Final

import attrs
import trio

from actors.agent_run import AgentRun
from actors.backends import BACKENDS, Backend, Launch
from actors.backends.backend import PROMPT_FILE
from actors.capture import capture_run
from actors.git import Git, GitSetup
from actors.host import AgentOutcome, Captured, HostError, HostFact, Prepared, RunSpec
from actors.limits import Limits
from actors.process.identity import Mark, ProcessIdentity
from actors.process.pool import KeeperPool
from actors.process.reaped import Reaped
from actors.process.runner import Child, KeeperLost, KeeperProcess, SpawnFailed
from actors.process.sweep import sweep_run
from actors.process.tool import Pipes
from actors.repository import Repositories
from actors.workspace import (
    RunPlace,
    discard,
    host_error_of,
    prepare_clone,
    prepare_scratch,
)
from storage import events as e

_PRIVATE_FILE: Final = 0o600


@attrs.frozen(kw_only=True)
class RunServices:
    """What a run uses of its host."""

    nursery: trio.Nursery
    pool: KeeperPool
    setup: GitSetup
    limits: Limits
    log_id: str
    environment: tuple[tuple[str, str], ...]
    repositories: Repositories
    wake_trash: trio.MemorySendChannel[None]


class LocalRun:
    """Implements :class:`actors.host.Run`; made by ``LocalHost.open_run`` and ``adopt_run``."""

    def __init__(
        self,
        spec: RunSpec,
        place: RunPlace,
        services: RunServices,
        *,
        adopted: e.WorkspacePrepared | None = None,
    ) -> None:
        self._spec = spec
        self._place = place
        self._services = services
        self._workspace = adopted
        self._mark = Mark(job=spec.job, epoch=spec.epoch, log_id=services.log_id)
        self._keeper: KeeperProcess | None = None
        self._identity: ProcessIdentity | None = None
        self._swept = Reaped()
        self._agent: AgentRun | None = None
        self._output_stored = False

    # --- start ---------------------------------------------------------------------------------

    async def offer(self) -> Prepared:
        """Make the keeper, then the workspace inside it; cancelled or failed, nothing stays."""
        try:
            keeper = await self._take_keeper()
            self._workspace = await self._prepare(keeper)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._undo()
            raise
        return Prepared(
            workspace=self._workspace,
            keeper=e.ProcessSpawned(
                keeper=keeper.mechanism,
                pid=keeper.identity.pid,
                start_time=keeper.identity.start_time,
                boot_id=keeper.identity.boot_id,
            ),
        )

    async def release(self) -> None:
        """Start the agent; its time limit counts from here."""
        assert self._keeper is not None, "release comes after offer"
        assert self._agent is None, "an agent is started once"
        backend = _backend_of(self._spec)
        launch = backend.launch(home=self._place.home, tree=self._place.tree)
        try:
            await trio.to_thread.run_sync(self._write_prompt, launch)
            agent = AgentRun(self._spec, self._place, backend)
        except OSError as error:
            raise host_error_of(error) from error
        try:
            pipes = Pipes(stdin=launch.stdin is not None)
            child = await self._spawn(self._keeper, launch, pipes)
        except OSError as error:
            agent.abandon()
            raise HostError("spawn_failed", f"no pipe for the agent: {error}") from error
        except BaseException:
            agent.abandon()
            raise
        self._agent = agent
        self._services.nursery.start_soon(agent.run, child, pipes, launch.stdin, self._sweep_lost)

    # --- while it runs -------------------------------------------------------------------------

    @asynccontextmanager
    async def facts(self) -> AsyncGenerator[AsyncGenerator[Sequence[HostFact], None], None]:
        """Batches of facts until the agent has ended."""
        assert self._agent is not None, "facts come after release"
        async with contextlib.aclosing(self._agent.feed.batches()) as batches:
            yield batches

    async def outcome(self) -> AgentOutcome:
        """Wait for the agent's own end; does not reap."""
        assert self._agent is not None, "an outcome comes after release"
        return await self._agent.outcome()

    async def message(self, text: str) -> None:
        """Always raises HostError: the programs that run here take no messages."""
        await trio.lowlevel.checkpoint()
        raise HostError(
            "internal", f"agent {self._spec.agent} takes no messages", detail="no_messages"
        )

    # --- end -----------------------------------------------------------------------------------

    async def end(self, *, grace_ms: int) -> e.ProcessReaped:
        """Ladder on the whole tree: TERM, grace, KILL, reap; after a lost keeper, the sweep."""
        reaped = self._swept.plus(await self._ladder(grace_ms))
        self._swept = Reaped()
        if self._agent is not None:
            await self._agent.finish()
        return reaped_event("agent", reaped)

    async def capture(self) -> Captured:
        """Store what the run made; the agent's processes are gone before."""
        keeper = await self._take_keeper()
        git = self._git(keeper)
        limit_ms = self._services.limits.capture_deadline_ms
        # Some of the limit is left for the files that were made in it.
        files, complete = await capture_run(
            self._place, self._workspace, git, deadline_ms=limit_ms * 3 // 4
        )
        self._output_stored = {"stdout", "stderr"} <= {file.name for file in files}
        return Captured(
            files=files,
            complete=complete,
            reaped=reaped_event("capture", await self._kill_all()),
        )

    async def remove(self) -> None:
        """Move everything of the run into the trash; output that was not stored stays."""
        paths = [
            path
            for path in self._place.leftovers()
            if self._output_stored or path.parent != self._place.layout.output
        ]
        await trio.to_thread.run_sync(discard, paths, self._place.layout.trash)
        with contextlib.suppress(trio.WouldBlock):
            self._services.wake_trash.send_nowait(None)

    async def close(self) -> None:
        """End the keeper and all it holds. Safe to call twice."""
        if self._keeper is not None:
            await self._keeper.close()
            self._keeper = None
        if self._agent is not None:
            await self._agent.finish()

    # --- parts ---------------------------------------------------------------------------------

    async def _take_keeper(self) -> KeeperProcess:
        if self._keeper is None or self._keeper.lost:
            try:
                self._keeper = await self._services.pool.acquire()
            except (OSError, KeeperLost) as error:
                message = f"the keeper of the job could not be started: {error!r}"
                raise HostError("spawn_failed", message, detail="keeper") from error
            self._identity = self._keeper.identity
        return self._keeper

    async def _prepare(self, keeper: KeeperProcess) -> e.WorkspacePrepared:
        request = self._spec.workspace
        if request.kind == "scratch" or request.repo is None:
            return await prepare_scratch(self._place)
        repository = self._services.repositories.get(request.repo)
        prepared = await prepare_clone(self._place, request, repository, self._git(keeper))
        # What git started is reported as nobody's: the agent's report begins with the agent.
        with contextlib.suppress(KeeperLost):
            await keeper.kill_all(deadline_ms=self._services.limits.reap_deadline_ms)
        return prepared

    async def _undo(self) -> None:
        await self.close()
        await trio.to_thread.run_sync(discard, self._place.leftovers(), self._place.layout.trash)
        with contextlib.suppress(trio.WouldBlock):
            self._services.wake_trash.send_nowait(None)

    def _git(self, keeper: KeeperProcess) -> Git:
        return Git(keeper, self._services.setup, extra=self._mark.environment())

    def _write_prompt(self, launch: Launch) -> None:
        if launch.prompt_file:
            path = self._place.home / PROMPT_FILE
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE_FILE)
            with os.fdopen(fd, "wb") as file:
                file.write(self._spec.prompt.encode())

    async def _spawn(self, keeper: KeeperProcess, launch: Launch, pipes: Pipes) -> Child:
        try:
            child = await keeper.spawn(
                launch.argv,
                env=self._environment(),
                cwd=self._place.tree,
                stdin=pipes.child_stdin,
                stdout=pipes.child_stdout,
                stderr=pipes.child_stderr,
            )
        except SpawnFailed as error:
            pipes.close()
            message = f"{launch.argv[0]} could not be started: {error.text}"
            raise HostError("spawn_failed", message, detail=error.text) from error
        except KeeperLost:
            # The agent may have run, and have killed the keeper before that could say so.
            child = Child(0)
            child.note_failed(KeeperLost())
        except BaseException:
            pipes.close()
            raise
        pipes.close_child_ends()
        return child

    def _environment(self) -> dict[str, str]:
        return {
            **dict(self._services.environment),
            **dict(self._spec.environment),
            "HOME": str(self._place.home),
            "TMPDIR": str(self._place.tmp),
            "PWD": str(self._place.tree),
            **self._mark.environment(),
        }

    async def _ladder(self, grace_ms: int) -> Reaped:
        if self._keeper is None:
            await trio.lowlevel.checkpoint()
            return Reaped()
        try:
            if grace_ms > 0:
                await self._keeper.signal(SIGTERM)
                with trio.move_on_after(grace_ms / 1000):
                    await self._keeper.wait_empty()
        except KeeperLost:
            pass  # Seen once more, and answered, below.
        return await self._kill_all()

    async def _kill_all(self) -> Reaped:
        assert self._keeper is not None, "there is something to kill in"
        try:
            return await self._keeper.kill_all(deadline_ms=self._services.limits.reap_deadline_ms)
        except KeeperLost:
            return await self._sweep()

    async def _sweep_lost(self) -> None:
        self._swept = self._swept.plus(await self._sweep())

    async def _sweep(self) -> Reaped:
        return await sweep_run(
            self._mark,
            keeper=self._identity,
            registry=self._services.pool.registry,
            deadline_ms=self._services.limits.reap_deadline_ms,
        )


def _backend_of(spec: RunSpec) -> Backend:
    if spec.backend not in BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        message = f"backend {spec.backend!r} can not be run here; there are: {known}"
        raise HostError("spawn_failed", message, detail="backend")
    return BACKENDS[spec.backend](spec)


def reaped_event(phase: e.ReapPhase, reaped: Reaped) -> e.ProcessReaped:
    """Answer the event of a report."""
    return e.ProcessReaped(
        phase=phase,
        pids=[e.ReapedProcess(pid=pid, how=how) for pid, how in reaped.pids],
        seen=reaped.seen,
        left=reaped.left,
        duration_ms=reaped.duration_ms,
    )
