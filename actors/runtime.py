"""The one place that assembles the runtime: log, host, Supervisor, and what joins them."""

import hashlib
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final, NoReturn

import attrs
import msgspec
import trio

from actors.agent_definitions import AgentCatalog, AgentDefinition
from actors.errors import AgentNotAllowed, UnknownAgent, UnknownModel
from actors.host import CapturedFile, Host, HostError, RunSpec
from actors.job import RunRecipe
from actors.kernel import ChildSpec, open_supervision
from actors.limits import Limits
from actors.local_host import open_local_host
from actors.messages import (
    Cancel,
    CancelAnswer,
    Explain,
    Submit,
    SubmitRequest,
    Submitted,
    Tell,
    Why,
)
from actors.process.identity import current_boot_id
from actors.recovery import recover
from actors.supervisor import Supervisor
from storage import events as e
from storage.artifacts import ArtifactStore
from storage.event_log import Append, EventLog, Fact, StoredArtifact
from storage.folder import DataFolder
from storage.ids import SERVICE_STREAM, IdSource, JobId
from storage.job_state import JobState
from storage.sqlite_log import SqliteEventLog

BUILT_IN_SHELL: Final = "shell"


@attrs.frozen(kw_only=True)
class RuntimeConfig:
    """What a runtime is made from; every value is checked by the configuration.

    ``environment`` is what the allow-list for agents chooses from; None is that of this process.
    ``models_allowed`` is for agents whose definition has no list of its own. ``embedded``: runs
    that were interrupted are ended, but jobs that wait in the log are left to the service.
    ``containment`` is the mechanism that holds jobs; ``auto``: the strongest that works here.
    """

    data: Path
    version: str
    limits: Limits = attrs.field(factory=Limits)
    agent_folders: tuple[Path, ...] = ()
    allow_shell: bool = False
    models_default: str = "sonnet"
    models_allowed: tuple[str, ...] = ("sonnet",)
    environment: Mapping[str, str] | None = None
    embedded: bool = False
    containment: str = "auto"


@attrs.frozen(kw_only=True)
class ModelCatalog:
    """The models that a request may name, and the one that stands for none."""

    default: str
    allowed: tuple[str, ...]


@attrs.frozen(kw_only=True)
class HostInfo:
    """What the host says of itself; for people, not part of any fold. Bytes and counts.

    ``containment_why_not`` says of each stronger mechanism why it is not in force.
    """

    containment: str
    containment_why_not: dict[str, str]
    confined: bool
    disk_free_bytes: int
    inodes_free: int
    degraded: list[str]
    log_pending: int


HostOpener = Callable[[str], AbstractAsyncContextManager[Host]]


def die(reason: str) -> NoReturn:
    """End the process at once: whether a commit is durable is not known."""
    os.write(2, f"watchkeeper: {reason}; the next start reads what is true\n".encode())
    os._exit(70)


@attrs.frozen(kw_only=True)
class Seams:
    """Where the uncertain comes in; a simulation replaces each."""

    ids: IdSource = attrs.field(factory=IdSource)
    clock_ns: Callable[[], int] = time.time_ns
    die: Callable[[str], NoReturn] = die
    boot_id: Callable[[], str] = current_boot_id
    open_host: HostOpener | None = None
    open_log: Callable[[str], AbstractAsyncContextManager[EventLog]] | None = None
    artifacts: ArtifactStore | None = None
    space: Callable[[Path], tuple[int, int]] | None = None
    on_crash: Callable[[str, Exception], None] = lambda _name, _error: None


class Runtime:
    """A running service, without its HTTP side; made by :func:`open_runtime`."""

    def __init__(
        self,
        config: RuntimeConfig,
        seams: Seams,
        log: EventLog,
        artifacts: ArtifactStore,
        host: Host,
        nursery: trio.Nursery,
    ) -> None:
        self.config = config
        self.log = log
        self.artifacts = artifacts
        self.limits = config.limits
        self.agents = AgentCatalog.load(config.agent_folders)
        self.models = ModelCatalog(default=config.models_default, allowed=config.models_allowed)
        self.ready = False
        self._seams = seams
        self._host = host
        self._supervisor = Supervisor(
            log=log,
            host=host,
            artifacts=_Adopter(artifacts, config.data),
            ids=seams.ids,
            limits=config.limits,
            recipe=self._recipe,
            nursery=nursery,
            disk_low=self._disk_low,
            on_crash=lambda job, error: seams.on_crash(f"job {job}", error),
        )

    @property
    def draining(self) -> bool:
        """Whether no job is admitted any more."""
        return self._supervisor.draining

    async def submit(self, request: SubmitRequest) -> Submitted:
        """Accept a job; returns after the commit. Raises AdmissionError, AppendRefused."""
        chosen = attrs.evolve(request, model=self._model_of(request))
        return await self._supervisor.ref.ask(lambda reply: Submit(request=chosen, reply=reply))

    async def cancel(self, job: JobId, *, by: str, request_id: str | None) -> CancelAnswer:
        """End a job; answers once the request is committed. Raises JobUnknown."""
        return await self._supervisor.ref.ask(
            lambda reply: Cancel(job=job, by=by, request_id=request_id, reply=reply)
        )

    async def message(self, job: JobId, text: str, *, by: str, request_id: str | None) -> None:
        """Say something to a running agent; raises NotRunning, JobUnknown."""
        await self._supervisor.ref.ask(
            lambda reply: Tell(job=job, text=text, by=by, request_id=request_id, reply=reply)
        )

    async def why(self, job: JobId) -> Why:
        """Say why a job is in its state; raises JobUnknown."""
        return await self._supervisor.ref.ask(lambda reply: Explain(job=job, reply=reply))

    def host_info(self) -> HostInfo:
        """Say how the host is; looks at the disk."""
        free_bytes, free_inodes = self._space()
        return HostInfo(
            containment=self._host.containment,
            containment_why_not=dict(self._host.containment_why_not),
            confined=self._host.confined,
            disk_free_bytes=free_bytes,
            inodes_free=free_inodes,
            degraded=self._supervisor.degraded,
            log_pending=int(getattr(self.log, "pending", 0)),
        )

    async def drain(self) -> None:
        """Stop admitting, wait for running jobs up to the limit, kill the rest, say stopped."""
        if self.draining:
            return
        self._supervisor.draining = True
        await self._say(e.ServiceDraining(drain_ms=self.limits.drain_ms))
        await self._supervisor.stop()
        await self._say(e.ServiceStopped())

    # --- start ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Say that the service has started, recover, and say that it is ready."""
        await self._say(
            e.ServiceStarted(
                version=self.config.version,
                config_digest=self._config_digest(),
                capacity=self.limits.capacity,
                queue_depth=self.limits.queue_depth,
                containment=self._host.containment,
                confined=self._host.confined,
                boot_id=self._seams.boot_id(),
                log_id=self.log.log_id,
            )
        )
        recovered = await recover(self.log, self._host, self._seams.ids, self.limits)
        if self.config.embedded:
            recovered.queued.clear()
        self._supervisor.adopt(recovered)
        await self._say(e.ServiceReady(recovered=recovered.found))
        self.ready = True

    def children(self) -> list[ChildSpec]:
        """Answer the long-lived tasks, for a supervision."""
        return [
            ChildSpec(name="supervisor", run=self._supervisor.run, restart="temporary"),
            ChildSpec(name="dispatcher", run=self._supervisor.dispatch, restart="temporary"),
        ]

    def _config_digest(self) -> str:
        values = attrs.asdict(
            attrs.evolve(self.config, environment=None),
            value_serializer=lambda _i, _a, v: str(v) if isinstance(v, Path) else v,
        )
        return hashlib.sha256(msgspec.json.encode(values)).hexdigest()

    async def _say(self, event: e.ServiceEvent) -> None:
        # One writer at a time: start and drain never overlap.
        history = await self.log.read(SERVICE_STREAM)
        version = history[-1].version if history else 0
        await self.log.append(
            Append(stream=SERVICE_STREAM, expected_version=version, facts=(Fact(event=event),))
        )

    # --- what a job's definition gives to its run --------------------------------------------

    def _model_of(self, request: SubmitRequest) -> str:
        """Answer the model a request means; raises AdmissionError when it is not to be run."""
        definition = self._definition(request.agent)
        if request.agent == BUILT_IN_SHELL and not (request.local or self.config.allow_shell):
            raise AgentNotAllowed(
                request.agent, "set [agents] allow_shell = true to run it over HTTP"
            )
        default = definition.model or self.models.default
        allowed = definition.models or self.models.allowed
        if request.model not in (None, default) and request.model not in allowed:
            raise UnknownModel(str(request.model), allowed)
        return request.model or default

    def _definition(self, name: str) -> AgentDefinition:
        definition = self.agents.get(name)
        if definition is None:
            raise UnknownAgent(name, tuple(self.agents.names()))
        return definition

    async def _recipe(self, state: JobState, epoch: int) -> RunRecipe:
        submitted = state.submitted
        definition = self.agents.get(submitted.agent)
        if definition is None:
            raise HostError("spawn_failed", f"agent {submitted.agent!r} is not defined any more")
        prompt = await self.log.payload(submitted.prompt.digest)
        if prompt is None:
            raise HostError("spawn_failed", "the prompt was erased", detail="prompt_erased")
        spec = RunSpec(
            job=state.job_id,
            epoch=epoch,
            agent=submitted.agent,
            backend=definition.backend,
            argv=definition.argv,
            prompt=prompt.decode(),
            prompt_by=definition.prompt_by,
            line_format=definition.line_format,
            model=submitted.model,
            environment=definition.environment,
            workspace=submitted.workspace,
            timeout_ms=submitted.timeout_ms,
            max_budget_microusd=submitted.max_budget_microusd,
            grace_ms=self.limits.grace_ms,
            output_bytes_max=self.limits.output_bytes_max,
            session_id=submitted.session_id,
        )
        return RunRecipe(spec=spec, agent_digest=definition.digest)

    # --- the disk --------------------------------------------------------------------------------

    def _space(self) -> tuple[int, int]:
        return (self._seams.space or _space)(self.config.data)

    def _disk_low(self) -> bool:
        free_bytes, free_inodes = self._space()
        return free_bytes < self.limits.low_water_bytes or free_inodes < INODES_LOW


INODES_LOW: Final = 1_000


class _Adopter:
    """Puts captured files into the artifact store; their own copies go with the capture."""

    def __init__(self, store: ArtifactStore, data: Path) -> None:
        self._store = store
        self._data = data

    async def adopt(self, source: CapturedFile, salt: bytes) -> StoredArtifact:
        return await self._store.put_file(self._data / source.path, salt)


@asynccontextmanager
async def open_runtime(
    config: RuntimeConfig, seams: Seams | None = None
) -> AsyncGenerator[Runtime, None]:
    """Hold the data folder, open the log, recover, and run until the block is left.

    Leaving the block without :meth:`Runtime.drain` kills what runs at once; the next start goes
    on from the log. Raises FolderLocked, LogTooNew, ContainmentUnavailable.
    """
    seams = seams or Seams()
    with DataFolder.lock(config.data) as folder:
        async with (
            _open_log(folder, seams, config.limits) as log,
            _open_host(config, seams, log.log_id) as host,
            trio.open_nursery() as nursery,
        ):
            artifacts = seams.artifacts or ArtifactStore(folder.artifacts)
            runtime = Runtime(config, seams, log, artifacts, host, nursery)
            async with open_supervision(seams.on_crash) as supervision:
                for child in runtime.children():
                    supervision.start(child)
                await runtime.start()
                yield runtime
            nursery.cancel_scope.cancel()


def _open_log(
    folder: DataFolder, seams: Seams, limits: Limits
) -> AbstractAsyncContextManager[EventLog]:
    session = seams.ids.new("ses")
    if seams.open_log is not None:
        return seams.open_log(session)
    _make_ballast(folder.ballast)
    return SqliteEventLog.open(
        folder.log,
        ids=seams.ids,
        clock_ns=seams.clock_ns,
        session=session,
        die=seams.die,
        pending_max=limits.appends_pending_max,
        ballast=folder.ballast,
    )


def _open_host(
    config: RuntimeConfig, seams: Seams, log_id: str
) -> AbstractAsyncContextManager[Host]:
    if seams.open_host is not None:
        return seams.open_host(log_id)
    return open_local_host(
        config.data,
        log_id=log_id,
        limits=config.limits,
        environment=config.environment,
        mode=config.containment,
    )


BALLAST_BYTES: Final = 4 * 1024 * 1024


def _make_ballast(path: Path) -> None:
    """Set room aside that the log gives up when the disk is full."""
    if not path.exists():
        path.write_bytes(b"\0" * BALLAST_BYTES)


def _space(path: Path) -> tuple[int, int]:
    found = os.statvfs(path)
    # A file system without a fixed number of inodes says 0 of 0.
    inodes = found.f_favail if found.f_files else INODES_LOW
    return found.f_bavail * found.f_frsize, inodes


__all__ = ["HostInfo", "ModelCatalog", "Runtime", "RuntimeConfig", "Seams", "open_runtime"]
