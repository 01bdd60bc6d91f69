"""The harness: the real Supervisor and recovery over a world that survives their crash."""

import random
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NoReturn

import attrs
import trio

from actors.host import RunSpec
from actors.job import RunRecipe
from actors.kernel import ChildSpec, open_supervision
from actors.limits import Limits
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
from actors.recovery import recover
from actors.supervisor import Supervisor
from actors.testing.host import (
    BOOT_ID,
    Crashed,
    FakeArtifacts,
    FakeHost,
    RunKey,
    Script,
    World,
)
from actors.testing.store import MortalLog, WatchedStore
from storage import events as e
from storage.batch import Batch
from storage.errors import AppendRefused
from storage.event_log import Append, Fact, Recorded
from storage.ids import SERVICE_STREAM, IdSource, JobId, job_stream
from storage.job_state import JobState, fold

EPOCH_NS = 1_700_000_000_000_000_000
Boundary = Callable[[str, RunKey | None], None]
Refusal = Callable[[Append], AppendRefused | None]


@attrs.define(eq=False)
class Service:
    """One incarnation of the service process."""

    number: int
    host: FakeHost
    log: MortalLog | None = None
    supervisor: Supervisor | None = None
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    ready: trio.Event = attrs.field(factory=trio.Event)
    gone: trio.Event = attrs.field(factory=trio.Event)
    crashed: bool = False
    stopping: trio.Event = attrs.field(factory=trio.Event)


@attrs.define(eq=False)
class Harness:
    """A world, and the service that runs in it at the moment."""

    nursery: trio.Nursery
    world: World
    limits: Limits
    store: WatchedStore
    ids: IdSource
    boundary: Boundary
    crashes: list[tuple[str, Exception]] = attrs.field(factory=list)
    jump_ns: int = 0
    disk_low: bool = False
    refuse: Refusal | None = None
    slow_until: float = 0.0
    service: Service | None = None
    changed: trio.Event = attrs.field(factory=trio.Event)
    starts: int = 0

    def __attrs_post_init__(self) -> None:
        self.store.after.append(self._wake)

    def _wake(self, _batch: Batch) -> None:
        self._wake_all()

    def clock_ns(self) -> int:
        """Answer the wall clock: virtual time, and its jumps."""
        return EPOCH_NS + round(trio.current_time() * 1e9) + self.jump_ns

    # --- the life of the service ---------------------------------------------------------------

    @property
    def alive(self) -> Service:
        """The service that runs now."""
        assert self.service is not None, "a service was started"
        return self.service

    @property
    def supervisor(self) -> Supervisor:
        """The Supervisor of the service that runs now."""
        assert self.alive.supervisor is not None, "the service is up"
        return self.alive.supervisor

    @property
    def log(self) -> MortalLog:
        """The log of the service that runs now."""
        assert self.alive.log is not None, "the service is up"
        return self.alive.log

    async def start(self) -> bool:
        """Start a service; answer whether it became ready (False: it crashed before)."""
        assert self.service is None or self.service.gone.is_set(), "one service at a time"
        self.starts += 1
        service = self.service = Service(self.starts, FakeHost(self.world, self.boundary))
        self.nursery.start_soon(self._live, service)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for event in (service.ready, service.gone):
                    nursery.start_soon(_cancel_after, event, scope)
        return service.ready.is_set()

    def crash_now(self) -> None:
        """Let the service be gone from this instant; nothing of it has an effect any more."""
        service = self.alive
        if not service.crashed and not service.gone.is_set():
            service.crashed = True
            service.host.die()
            if service.log is not None:
                service.log.perish()
            self.world.service_died()
            service.scope.cancel()

    async def crash(self) -> None:
        """Crash, and wait until nothing of the service is left in this process either."""
        self.crash_now()
        await self.alive.gone.wait()

    async def restart(self) -> bool:
        """Crash, if it lives, and start again."""
        await self.crash()
        return await self.start()

    async def stop(self) -> None:
        """Drain, as on SIGTERM, and wait for the end, also for one by a crash."""
        service = self.alive
        with trio.CancelScope() as scope:
            self.nursery.start_soon(_cancel_after, service.gone, scope)
            try:
                await self._drain(service)
            except Crashed:
                pass
            except AppendRefused:
                # A service that can not say that it stops ends all the same.
                self.crash_now()
            await service.gone.wait()

    async def _drain(self, service: Service) -> None:
        self.supervisor.draining = True
        await self._say(service, e.ServiceDraining(drain_ms=self.limits.drain_ms))
        await self.supervisor.stop()
        await self._say(service, e.ServiceStopped())
        service.stopping.set()

    async def _live(self, service: Service) -> None:
        try:
            with service.scope:
                await self._serve(service)
        except BaseExceptionGroup as group:
            # Whatever comes up in a process that is gone can not have had an effect.
            rest = group.split(_of_a_crash)[1]
            if rest is not None and not service.crashed:
                raise
            if any(isinstance(one, AssertionError) for one in _leaves(group)):
                raise
        except Crashed:
            pass
        finally:
            service.gone.set()
            self._wake_all()

    def _wake_all(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def _serve(self, service: Service) -> None:
        async with AsyncExitStack() as stack:
            log = service.log = await stack.enter_async_context(self._open_log(service))
            nursery = await stack.enter_async_context(trio.open_nursery())
            supervisor = service.supervisor = Supervisor(
                log=log,
                host=service.host,
                artifacts=FakeArtifacts(service.host),
                ids=self.ids,
                limits=self.limits,
                recipe=self._recipe,
                nursery=nursery,
                disk_low=lambda: self.disk_low,
                on_crash=self._on_crash,
            )
            supervision = await stack.enter_async_context(open_supervision(self._on_crash))
            for name, run in (("supervisor", supervisor.run), ("dispatcher", supervisor.dispatch)):
                supervision.start(ChildSpec(name=name, run=run, restart="temporary"))
            try:
                await self._begin(service, supervisor)
            except AppendRefused as refused:
                # A service that can not say that it started ends, and is started again later.
                self.crash_now()
                raise Crashed from refused
            service.ready.set()
            self._wake_all()
            await service.stopping.wait()
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def _open_log(self, service: Service) -> AsyncGenerator[MortalLog, None]:
        def die(_reason: str) -> NoReturn:
            self.crash_now()
            raise Crashed

        log = MortalLog(
            self.store,
            ids=self.ids,
            clock_ns=self.clock_ns,
            session=self.ids.new("ses"),
            die=die,
        )
        log.refuse = self._refusal
        log.slow_until = self.slow_until
        service.log = log
        try:
            yield log
        finally:
            if not log.dead:
                await log.aclose()

    def _refusal(self, request: Append) -> AppendRefused | None:
        return None if self.refuse is None else self.refuse(request)

    async def _begin(self, service: Service, supervisor: Supervisor) -> None:
        log = service.log
        assert log is not None, "it was opened"
        started = e.ServiceStarted(
            version="0",
            config_digest="",
            capacity=self.limits.capacity,
            queue_depth=self.limits.queue_depth,
            containment=service.host.containment,
            boot_id=BOOT_ID,
            log_id=log.log_id,
        )
        await self._say(service, started)
        recovered = await recover(log, service.host, self.ids, self.limits)
        supervisor.adopt(recovered)
        await self._say(service, e.ServiceReady(recovered=recovered.found))

    async def _say(self, service: Service, event: e.ServiceEvent) -> None:
        assert service.log is not None, "it was opened"
        history = await service.log.read(SERVICE_STREAM)
        version = history[-1].version if history else 0
        await service.log.append(
            Append(stream=SERVICE_STREAM, expected_version=version, facts=(Fact(event=event),))
        )

    def _on_crash(self, name: str, error: Exception) -> None:
        self.crashes.append((name, error))

    async def _recipe(self, state: JobState, epoch: int) -> RunRecipe:
        prompt = await self.log.payload(state.submitted.prompt.digest)
        assert prompt is not None, "nothing is erased here"
        spec = RunSpec(
            job=state.job_id,
            epoch=epoch,
            agent=state.submitted.agent,
            backend="fake",
            prompt=prompt.decode(),
            model=state.submitted.model,
            workspace=state.submitted.workspace,
            timeout_ms=state.submitted.timeout_ms,
            max_budget_microusd=state.submitted.max_budget_microusd,
            grace_ms=self.limits.grace_ms,
            output_bytes_max=self.limits.output_bytes_max,
            session_id=state.submitted.session_id,
        )
        return RunRecipe(spec=self._refine(spec), agent_digest="d" * 64)

    def _refine(self, spec: RunSpec) -> RunSpec:
        """Answer the spec as the definition of its agent makes it."""
        return spec

    # --- what a client does ----------------------------------------------------------------------

    async def submit(self, prompt: str = "work", agent: str = "echo", **fields: Any) -> Submitted:  # noqa: ANN401  any field of a request
        """Submit a job as a client would."""
        request = SubmitRequest(
            prompt=prompt, agent=agent, body_digest_source=prompt.encode(), **fields
        )
        return await self.supervisor.ref.ask(lambda reply: Submit(request=request, reply=reply))

    async def cancel(self, job: JobId, by: str = "me") -> CancelAnswer:
        """Ask for the end of a job."""
        return await self.supervisor.ref.ask(
            lambda reply: Cancel(job=job, by=by, request_id=None, reply=reply)
        )

    async def message(self, job: JobId, text: str) -> None:
        """Say something to a running agent."""
        await self.supervisor.ref.ask(
            lambda reply: Tell(job=job, text=text, by="me", request_id=None, reply=reply)
        )

    async def why(self, job: JobId) -> Why:
        """Ask why a job is in its state."""
        return await self.supervisor.ref.ask(lambda reply: Explain(job=job, reply=reply))

    # --- what the log says ---------------------------------------------------------------------

    def history(self, job: JobId) -> list[Recorded]:
        """Answer the events of a job, without a checkpoint."""
        return self.store.streams.get(job_stream(job), [])

    def types(self, job: JobId) -> list[str]:
        """Answer the types of a job's events."""
        return [record.type for record in self.history(job)]

    def state(self, job: JobId) -> JobState:
        """Answer the state of a job."""
        state = fold(self.history(job))
        assert state is not None, "the job is in the log"
        return state

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something is true of the log or the service; at once if it is already."""
        while not true():
            await self.changed.wait()

    async def until_type(self, job: JobId, type_: str, count: int = 1) -> None:
        """Wait until an event of this type is in the job's stream, ``count`` times."""
        await self.until(lambda: self.types(job).count(type_) >= count)

    async def until_over(self, *jobs: JobId) -> None:
        """Wait until each job has its terminal event."""
        await self.until(lambda: all(self.state(job).terminal for job in jobs))


@asynccontextmanager
async def open_world(
    script: Script | Callable[[RunSpec], Script] | None = None,
    *,
    limits: Limits | None = None,
    boundary: Boundary | None = None,
    random_bytes: Callable[[int], bytes] | None = None,
    started: bool = True,
) -> AsyncGenerator[Harness, None]:
    """Open a world and, unless ``started`` is False, a service in it; crash what lives at the end.

    ``script`` says how runs go, by their spec. ``boundary`` is called around each verb of the
    host and may raise Crashed after calling ``crash_now``.
    """
    scripts = script if callable(script) else lambda _spec: script or Script()
    async with trio.open_nursery() as nursery:
        ids = IdSource(
            lambda: EPOCH_NS + round(trio.current_time() * 1e9),
            random_bytes or random.Random(7).randbytes,  # noqa: S311  not a secret
        )
        harness = Harness(
            nursery=nursery,
            world=World(script=scripts),
            limits=limits or Limits(),
            store=WatchedStore(),
            ids=ids,
            boundary=boundary or (lambda _verb, _key: None),
        )
        if started:
            await harness.start()
        yield harness
        if harness.service is not None:
            await harness.crash()


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _of_a_crash(error: BaseException) -> bool:
    return isinstance(error, (Crashed, trio.Cancelled))


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for one in group.exceptions:
        if isinstance(one, BaseExceptionGroup):
            yield from _leaves(one)
        else:
            yield one
