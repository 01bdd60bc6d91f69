"""The JobActor: one run of one job, from ``job.started`` to the terminal event or a requeue."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, Protocol

import attrs
import msgspec
import trio

from actors.host import (
    AgentOutcome,
    Captured,
    CapturedFile,
    Host,
    HostError,
    HostFact,
    Run,
    RunSpec,
)
from actors.limits import Limits
from actors.stream import ERROR_TEXT_BYTES_MAX, CancelledFirst, HandedOver, JobStream
from storage import events as e
from storage.errors import DiskFull, IllegalTransition, LogBusy
from storage.event_log import Fact, StoredArtifact
from storage.job_state import JobState


class ArtifactFiles(Protocol):
    """Where captured files are kept."""

    async def adopt(self, source: CapturedFile, salt: bytes) -> StoredArtifact:
        """Move a file into the store and answer its row, durable on return."""
        ...


Finished = Literal["terminal", "requeued", "interrupted", "not_started"]

LADDER_CAUSES: Final = frozenset({"cancelled", "timed_out", "budget_exceeded", "output_limit"})
"""Endings in which the agent still runs and is asked before it is killed."""

_PENDING: Final = e.PayloadRef(digest="", size=0)


@attrs.frozen(kw_only=True)
class RunRecipe:
    """What the definition of the job's agent gives to a run; made at the start of the run."""

    spec: RunSpec
    agent_digest: str


Recipe = Callable[[JobState, int], Awaitable[RunRecipe]]


class JobActor:
    """Owns the stream of one job for one epoch.

    ``begin`` runs it from the queue, ``resume`` ends a run of an earlier service process. Both
    answer how it finished: ``terminal`` (the workspace is still to be cleaned by the janitor),
    ``requeued``, ``interrupted`` (the next start of the service goes on) or ``not_started``
    (the log had no room; the job still waits).
    """

    def __init__(
        self,
        stream: JobStream,
        host: Host,
        artifacts: ArtifactFiles,
        limits: Limits,
        recipe: Recipe,
        salt: Callable[[], bytes],
    ) -> None:
        self.stream = stream
        self.run: Run | None = None
        self._host = host
        self._artifacts = artifacts
        self._limits = limits
        self._recipe = recipe
        self._salt = salt
        self._live_scope = trio.CancelScope()
        self._capture_scope = trio.CancelScope()
        self._stopping = False

    # --- what others may ask of it -----------------------------------------------------------

    async def cancel(self, *, by: str, request_id: str | None) -> Literal["accepted", "terminal"]:
        """Commit the request, then cancel the run; without effect once a verdict stands."""
        answer = await self.stream.request_cancel(by=by, request_id=request_id)
        if answer == "accepted":
            self._live_scope.cancel()
        return answer

    def stop(self) -> None:
        """Kill the run at once and leave its ending to the next start of the service."""
        self._stopping = True
        self.stream.giving_up = True
        self._live_scope.cancel()
        self._capture_scope.cancel()

    async def message(self, text: str, *, by: str, request_id: str | None) -> None:
        """Tell the running agent something; raises HostError where it can not be told."""
        if self.run is None or self.stream.state.phase != "begun":
            raise HostError("internal", "the agent is not running")
        await self.run.message(text)
        fact = self.stream.fact(e.AgentMessaged(text=_PENDING), text=text.encode())
        try:
            await self.stream.append([fact], by=by, request_id=request_id)
        except (IllegalTransition, HandedOver) as error:
            raise HostError("internal", "the agent has just ended") from error

    # --- the run -------------------------------------------------------------------------------

    async def begin(self, task_status: trio.TaskStatus[None]) -> Finished:
        """Run the job; the status is given just before ``job.started`` takes its place."""
        epoch = self.stream.state.epoch + 1
        try:
            recipe = await self._recipe(self.stream.state, epoch)
        except HostError as error:
            task_status.started()
            await self._end_with(error, left=0)
            return "terminal"
        task_status.started()
        if self._stopping:
            return "not_started"
        not_started = await self._append_started(recipe, epoch)
        if not_started is not None:
            return not_started
        self.run = self._host.open_run(recipe.spec)
        trouble = await self._live(self.run, recipe.spec.backend)
        return await self._finish(self.run, trouble)

    async def resume(self, task_status: trio.TaskStatus[None]) -> Finished:
        """Capture and end a run that an earlier service process left; its tree is gone."""
        state = self.stream.state
        task_status.started()
        try:
            spec = (await self._recipe(state, state.epoch)).spec
        except HostError:
            # What is left to do needs neither the agent's definition nor the prompt.
            spec = _bare_spec(state, self._limits)
        self.run = self._host.adopt_run(spec, state.workspace)
        return await self._finish(self.run, None)

    async def _append_started(self, recipe: RunRecipe, epoch: int) -> Finished | None:
        first = e.JobStarted(
            agent_digest=recipe.agent_digest,
            containment=self._host.containment,
            confined=self._host.confined,
        )
        try:
            await self.stream.append([first], epoch=epoch, unless_cancelled=True)
        except (DiskFull, LogBusy):
            return "not_started"
        except CancelledFirst:
            await self.stream.append_surely([e.JobCancelled()])
            return "terminal"
        return None

    async def _live(self, run: Run, backend: str) -> HostError | None:
        """Prepare and run the agent up to its verdict; answer why it could not begin."""
        with self._live_scope:
            try:
                with trio.fail_after(self._limits.prepare_deadline_ms / 1000):
                    prepared = await run.offer()
            except trio.TooSlowError:
                return HostError("workspace_failed", "preparing the workspace took too long")
            except HostError as error:
                return error
            if self._stopping:
                return None
            begun: list[e.JobEvent] = [
                prepared.workspace,
                prepared.keeper,
                e.AgentStarted(backend=backend),
            ]
            try:
                await self.stream.append_surely(begun, unless_cancelled=True)
            except CancelledFirst:
                return None
            try:
                await run.release()
            except HostError as error:
                await self._append_verdict(_outcome_of(error))
                return None
            await self._attend(run)
        return None

    async def _attend(self, run: Run) -> None:
        """Write the agent's facts until it ended, then its verdict."""
        async with run.facts() as batches:
            async for batch in batches:
                fresh = unseen(batch, self.stream.state)
                if fresh:
                    await self.stream.append_surely([self.stream.of_host(f) for f in fresh])
        outcome = await run.outcome()
        if outcome.interrupted:
            await self.stream.append_surely([e.RunInterrupted(why=outcome.detail or "lost")])
            return
        await self._append_verdict(outcome)

    async def _append_verdict(self, outcome: AgentOutcome) -> None:
        event = e.AgentEnded(exit=outcome.exit, cause=outcome.cause, detail=outcome.detail)
        error = None if outcome.error is None else outcome.error[:ERROR_TEXT_BYTES_MAX]
        await self.stream.append_surely(
            [self.stream.fact(event, error=error, result=outcome.result)]
        )

    # --- the ending ----------------------------------------------------------------------------

    async def _finish(self, run: Run, trouble: HostError | None) -> Finished:
        """Reap, capture, and append the end; shielded, each part with its own deadline."""
        finished: Finished = "interrupted"
        with trio.CancelScope(shield=True):
            finished = await self._finish_shielded(run, trouble)
        return finished

    async def _finish_shielded(self, run: Run, trouble: HostError | None) -> Finished:
        if self.stream.state.phase == "started":
            return await self._finish_unbegun(run, trouble)
        if self.stream.state.phase == "begun":
            if self._stopping:
                return await self._interrupt(run)
            await self._append_verdict(AgentOutcome(exit=e.ExitStatus(), cause="cancelled"))
        reaped = await self._end(run, self._grace_ms())
        await self.stream.append_surely([reaped])
        return await self._capture_and_end(run, reaped)

    def _grace_ms(self) -> int:
        cause = cause_of_ending(self.stream.state)
        return self._limits.grace_ms if cause in LADDER_CAUSES and not self._stopping else 0

    async def _finish_unbegun(self, run: Run, trouble: HostError | None) -> Finished:
        reaped = await self._end(run, 0)
        if trouble is None and self.stream.state.cancel_requested_by is None:
            assert self._stopping, "a run that did not begin was cancelled, stopped, or in trouble"
            return "interrupted"
        await self._end_with(trouble, left=reaped.left)
        return "terminal"

    async def _end_with(self, trouble: HostError | None, *, left: int) -> None:
        """End a job whose run did not begin: by its trouble, unless it was cancelled first."""
        try:
            if trouble is not None:
                last = e.ending(trouble.cause, detail=trouble.detail, left=left)
                text = str(trouble).encode()[:ERROR_TEXT_BYTES_MAX]
                fact = self.stream.fact(last, error=text)
                await self.stream.append_surely([fact], unless_cancelled=True)
                return
        except CancelledFirst:
            pass
        await self.stream.append_surely([e.JobCancelled(left=left)])

    async def _interrupt(self, run: Run) -> Finished:
        reaped = await self._end(run, 0)
        await self.stream.append_surely([reaped, e.RunInterrupted(why="service_stopped")])
        return "interrupted"

    async def _end(self, run: Run, grace_ms: int) -> e.ProcessReaped:
        reaped = e.ProcessReaped(phase="agent", left=1)
        with trio.move_on_after((grace_ms + self._limits.reap_deadline_ms) / 1000):
            reaped = await run.end(grace_ms=grace_ms)
        return reaped

    async def _capture_and_end(self, run: Run, reaped: e.ProcessReaped) -> Finished:
        captured, facts = await self._capture(run)
        if captured is None and self._stopping:
            return "interrupted"
        if captured is None:
            # A capture that was given up may have left processes of its own.
            again = msgspec.structs.replace(await self._end(run, 0), phase="capture")
            facts, left = [again], max(reaped.left, again.left)
        else:
            left = max(reaped.left, captured.reaped.left)
        if requeues(self.stream.state) and not left:
            # Before the workspace goes: a crash after it could not capture again.
            await self.stream.append_surely(facts)
            facts = []
            if await self._requeue(run):
                return "requeued"
        state = self.stream.state
        cause = cause_of_ending(state)
        last = e.ending(
            cause,
            detail=state.interrupted_why if cause == "interrupted" else None,
            left=left,
            artifacts="complete" if captured and captured.complete else "incomplete",
        )
        await self.stream.append_surely([*facts, last])
        return "terminal"

    async def _requeue(self, run: Run) -> bool:
        """Put the job back in its place; answer False when it can not be, or a cancel came first."""
        why = self.stream.state.interrupted_why or "interrupted"
        try:
            await run.remove()
            await self.stream.append_surely(
                [e.WorkspaceRemoved(), e.JobRequeued(why=why)], unless_cancelled=True
            )
        except (HostError, CancelledFirst):
            return False
        return True

    async def _capture(self, run: Run) -> tuple[Captured | None, list[e.JobEvent | Fact]]:
        """Store what the run made; answer it with the facts for the batch of the ending."""
        facts: list[e.JobEvent | Fact] = []
        deadline_s = self._limits.capture_deadline_ms / 1000
        with self._capture_scope, trio.move_on_after(deadline_s):
            try:
                captured = await run.capture()
            except (HostError, OSError):
                # The disk can be full or broken; the verdict stands, without what was made.
                return None, []
            try:
                for file in captured.files:
                    row = await self._artifacts.adopt(file, self._salt())
                    stored = e.ArtifactStored(name=file.name, digest=row.digest, size=row.size)
                    facts.append(Fact(event=stored, artifacts=(row,)))
            except OSError:
                # The store has no room: what it took is kept, the end says that more was made.
                captured = attrs.evolve(captured, complete=False)
            facts.append(captured.reaped)
            return captured, facts
        return None, []


def unseen(batch: Sequence[HostFact], state: JobState) -> list[HostFact]:
    """Answer the facts of a batch that are not in the log yet, each once, in order."""
    seen = state.facts_seen
    fresh: list[HostFact] = []
    for fact in batch:
        if fact.epoch == state.epoch and fact.n > seen:
            fresh.append(fact)
            seen = fact.n
    return fresh


def requeues(state: JobState) -> bool:
    """Answer whether an interrupted run is to be followed by another one."""
    return (
        state.phase == "interrupted"
        and state.cancel_requested_by is None
        and state.attempts < state.submitted.max_attempts
    )


def cause_of_ending(state: JobState) -> e.Cause | None:
    """Answer the cause that a run ends with, from what its stream says; None: completed."""
    if state.ended is not None:
        return state.ended.cause
    return "interrupted" if state.cancel_requested_by is None else "cancelled"


def _bare_spec(state: JobState, limits: Limits) -> RunSpec:
    """Answer what capturing and removing an earlier run needs to know of it."""
    submitted = state.submitted
    return RunSpec(
        job=state.job_id,
        epoch=state.epoch,
        agent=submitted.agent,
        backend=state.backend or "",
        prompt="",
        workspace=submitted.workspace,
        timeout_ms=submitted.timeout_ms,
        max_budget_microusd=submitted.max_budget_microusd,
        grace_ms=limits.grace_ms,
        output_bytes_max=limits.output_bytes_max,
    )


def _outcome_of(error: HostError) -> AgentOutcome:
    return AgentOutcome(
        exit=e.ExitStatus(), cause=error.cause, detail=error.detail, error=str(error).encode()
    )
