"""The workbench: a runtime on the virtual clock for people who test their own agents."""

import functools
import random
import tempfile
import traceback
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import attrs
import trio
from trio.testing import MockClock

from actors.host import RunSpec
from actors.limits import Limits
from actors.messages import Submitted
from actors.testing.history import Expected, assert_history
from actors.testing.host import Crashed, Script, World
from actors.testing.program import Program
from actors.testing.store import WatchedStore
from actors.testing.world import EPOCH_NS, Harness
from storage import events as e
from storage.batch import Batch
from storage.ids import SERVICE_STREAM, IdSource, JobId
from storage.testing import MemoryEventLog, MemoryStore

Agent = Script | Callable[[RunSpec], Script]
"""How the runs of an agent go: all the same, or by the spec of the run (prompt, epoch, ...)."""

WAIT_S: Final = 7 * 86_400.0


@attrs.define(eq=False)
class Workbench(Harness):
    """A machine and the service on it: the real Supervisor, JobActors, recovery and event log.

    Whatever waits here waits in virtual time, and not longer than a week of it: what has not
    come by then is an AssertionError with the job's history.
    """

    agents: Mapping[str, Agent] = attrs.field(factory=dict)

    # --- jobs ----------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: str = "work",
        agent: str | None = None,
        **fields: Any,  # noqa: ANN401  any field of a request
    ) -> Submitted:
        """Submit a job as a client would; ``agent`` None is the first one of this workbench."""
        name = next(iter(self.agents)) if agent is None else agent
        if name not in self.agents:
            raise ValueError(f"there is no agent {name!r} here, only {', '.join(self.agents)}")
        # A slotted attrs class is built twice, so that super() without arguments can not be used.
        return await Harness.submit(self, prompt, name, **fields)

    async def run(self, prompt: str = "work", agent: str | None = None, **fields: Any) -> JobId:  # noqa: ANN401  any field of a request
        """Submit a job and wait until it is over and cleaned up."""
        job = (await self.submit(prompt, agent, **fields)).job_id
        await self.until_clean(job)
        return job

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something is true of the log; at once if it is already."""
        with trio.move_on_after(WAIT_S) as scope:
            await Harness.until(self, true)
        if scope.cancelled_caught:
            raise AssertionError(f"it was not true within {WAIT_S:.0f} s of virtual time")

    async def until_type(self, job: JobId, type_: str, count: int = 1) -> None:
        """Wait until an event of this type is in the job's stream, ``count`` times."""
        with trio.move_on_after(WAIT_S / 2):
            await Harness.until_type(self, job, type_, count)
            return
        expected: list[Expected] = [..., type_]
        self.assert_history(job, [*expected * count, ...])

    async def until_over(self, *jobs: JobId) -> None:
        """Wait until each job has its terminal event."""
        for job in jobs:
            with trio.move_on_after(WAIT_S / 2):
                await Harness.until_over(self, job)
                continue
            self._fail(job, f"{job} was not over within {WAIT_S / 2:.0f} s of virtual time")

    async def until_clean(self, *jobs: JobId) -> None:
        """Wait until each job is over and its workspace is gone."""
        await self.until_over(*jobs)
        for job in jobs:
            if self.state(job).workspace is not None:
                await self.until(functools.partial(_clean, self, job))

    # --- crashes -------------------------------------------------------------------------------

    async def crash_and_recover(self) -> None:
        """Kill the service as ``kill -9`` would, and start it again; ready on return."""
        if not await self.restart():
            raise AssertionError("the service crashed again before it was ready")

    def crash_at(self, type_: str, *, committed: bool = True, count: int = 1) -> None:
        """Let the service die at the ``count``-th commit with an event of this type, from now on.

        ``committed`` says whether the event is in the log when it dies. Then use ``recover``.
        """
        left = [count]

        def watch(batch: Batch) -> None:
            if any(record.type == type_ for record in batch.records):
                left[0] -= 1
                if left[0] == 0:
                    self.crash_now()
                    raise Crashed

        (self.store.after if committed else self.store.before).append(watch)

    async def recover(self) -> None:
        """Wait until the service is dead, and start it again; ready on return."""
        service = self.alive
        with trio.move_on_after(WAIT_S):
            await service.gone.wait()
        if not service.gone.is_set():
            raise AssertionError(f"the service did not die within {WAIT_S:.0f} s of virtual time")
        await self.crash_and_recover()

    # --- what the log says -----------------------------------------------------------------------

    def text(self, ref: e.PayloadRef | None) -> bytes | None:
        """Answer the bytes of a payload; None when they were erased, or for None."""
        payload = None if ref is None else self.store.payloads.get(ref.digest)
        return None if payload is None else payload.data

    def result(self, job: JobId) -> bytes | None:
        """Answer what the agent answered; None when there is no result."""
        return self.text(self.state(job).result)

    def error(self, job: JobId) -> bytes | None:
        """Answer the text of what went wrong; None when nothing was said."""
        return self.text(self.state(job).error)

    def stdin(self, job: JobId) -> bytes:
        """Answer what the program of the newest run has read from its stdin so far."""
        return self.world.launched[(job, self.state(job).epoch)].stdin

    def assert_history(
        self, job: JobId, expected: Sequence[Expected], *, ignoring: Collection[str] = ()
    ) -> None:
        """Raise AssertionError unless these are the events of the job; ``...`` is any number."""
        assert_history(
            self.history(job),
            expected,
            ignoring=ignoring,
            text_of=self.text,
            remarks=self._remarks(job),
        )

    def assert_nothing_left(self) -> None:
        """Raise AssertionError when a process or a workspace of any run is still there."""
        if self.world.alive or self.world.workspaces:
            places = ", ".join(f"{job} run {epoch}" for job, epoch in self.world.workspaces)
            text = f"{self.world.alive} processes are left, and the workspaces of: {places}"
            raise AssertionError(text)

    def _fail(self, job: JobId, why: str) -> NoReturn:
        try:
            self.assert_history(job, [])
        except AssertionError as error:
            history = str(error).partition("\n")[2]
            raise AssertionError(f"{why}\n{history}") from None
        raise AssertionError(why)

    def _remarks(self, job: JobId) -> list[str]:
        raised = [
            f"the backend raised in run {epoch}:\n{_trace(error)}"
            for (of, epoch), launched in self.world.launched.items()
            if of == job
            for error in launched.errors
        ]
        backends = [one for launched in self.world.launched.values() for one in launched.errors]
        crashed = [
            f"{name} crashed:\n{_trace(error)}"
            for name, error in self.crashes
            if not any(error is one for one in backends)
        ]
        return raised + crashed

    def _refine(self, spec: RunSpec) -> RunSpec:
        script = _script_of(self.agents, spec)
        return script.refine(spec) if isinstance(script, Program) else spec


def _clean(bench: Workbench, job: JobId) -> bool:
    state = bench.state(job)
    if state.workspace_removed_epoch == state.epoch:
        return True
    # What a service that died had still to remove, the next one has swept away without an event.
    writer, now = bench.history(job)[-1].session, bench.store.streams[SERVICE_STREAM][-1].session
    return writer != now and (job, state.epoch) not in bench.world.workspaces


def _script_of(agents: Mapping[str, Agent], spec: RunSpec) -> Script:
    agent = agents[spec.agent]
    return agent if isinstance(agent, Script) else agent(spec)


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


@asynccontextmanager
async def open_workbench(
    agents: Mapping[str, Agent] | Agent | None = None, *, limits: Limits | None = None
) -> AsyncGenerator[Workbench, None]:
    """Open a workbench with these agents and a service that is ready.

    One agent without a name is called ``agent``; None is an agent that ends well after 1 s. It
    must run on trio's MockClock: see :func:`actors.testing.virtual_clock`. The error of a test comes out of the
    block as it is, not in a group.
    """
    if not isinstance(trio.lowlevel.current_clock(), MockClock):
        raise RuntimeError(  # noqa: TRY004  not the caller's value, the place of the call
            "a workbench needs the virtual clock: decorate the test with "
            "actors.testing.virtual_clock, or use the fixture autojump_clock of pytest-trio"
        )
    named = agents if isinstance(agents, Mapping) else {"agent": agents or Script()}
    failure: BaseException | None = None
    with tempfile.TemporaryDirectory(prefix="watchkeeper-") as folder:
        try:
            async with trio.open_nursery() as nursery:
                bench = _workbench(nursery, named, limits or Limits(), Path(folder))
                try:
                    await bench.start()
                    yield bench
                    await bench.crash()
                finally:
                    # At once and not by a ladder: what comes after a test is no part of it.
                    bench.crash_now()
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failure = _only(group)
    if failure is not None:
        raise failure


def _workbench(
    nursery: trio.Nursery, agents: Mapping[str, Agent], limits: Limits, data: Path
) -> Workbench:
    ids = IdSource(
        lambda: EPOCH_NS + round(trio.current_time() * 1e9),
        random.Random(7).randbytes,  # noqa: S311  not a secret
    )
    return Workbench(
        nursery=nursery,
        world=World(script=lambda spec: _script_of(agents, spec), nursery=nursery, data=data),
        limits=limits,
        store=WatchedStore(),
        ids=ids,
        boundary=lambda _verb, _key: None,
        agents=agents,
    )


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Answer the one exception of a group of groups of one; else the group."""
    inner: BaseException = group
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        inner = inner.exceptions[0]
    return inner


def memory_log(store: MemoryStore | None = None) -> MemoryEventLog:
    """Answer an event log in memory: the same promises as the real one, and the same ids each time.

    ``store`` is what an earlier log left; None is an empty one. Its clock moves on by one
    millisecond with each reading.
    """
    clock = iter(range(EPOCH_NS, EPOCH_NS + 10**18, 10**6))

    def die(reason: str) -> NoReturn:
        raise RuntimeError(f"the outcome of an append is not known: {reason}")

    return MemoryEventLog(
        MemoryStore() if store is None else store,
        ids=IdSource(lambda: EPOCH_NS, random.Random(7).randbytes),  # noqa: S311  not a secret
        clock_ns=lambda: next(clock),
        session="ses_kit",
        die=die,
    )
