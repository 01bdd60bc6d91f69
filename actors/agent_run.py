"""An agent's program while it runs: its pipes, its limits, its verdict.

The verdict is decided once, at the first of: the exit of the program, a limit, the loss of the
keeper. The pipes are read on until the whole process tree has been ended.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from actors.agent_output import (
    FactFeed,
    LineSplitter,
    OutputBudget,
    OutputFile,
    OutputLimit,
    read_available,
)
from actors.backends import Backend
from actors.backends.backend import BackendFact
from actors.host import AgentOutcome, RunSpec
from actors.process.runner import Child, KeeperLost
from actors.process.tool import Pipes, feed
from actors.workspace import DISK_FULL_ERRNOS, RunPlace
from storage import events as e

RESULT_BYTES_MAX: Final = 8 * 1024 * 1024
_READ_BYTES: Final = 65_536
_PIPE_BYTES_MAX: Final = 1 << 20
_LAST_OUTPUT_S: Final = 1.0


class AgentRun:
    """Runs as one task of the host; who started it calls ``finish`` when the tree is gone."""

    def __init__(self, spec: RunSpec, place: RunPlace, backend: Backend) -> None:
        self._spec = spec
        self._backend = backend
        budget = OutputBudget(spec.output_bytes_max)
        self._stdout = OutputFile(place.output("stdout"), budget)
        try:
            self._stderr = OutputFile(place.output("stderr"), budget)
        except OSError:
            self._stdout.close()
            raise
        self._lines = LineSplitter()
        self._spent_microusd = 0
        self._cause: e.Cause | None = None
        self._detail: str | None = None
        self._exit: e.ExitStatus | None = None
        self._lost = False
        self._stopping = trio.Event()
        self._outcome: AgentOutcome | None = None
        self._decided = trio.Event()
        self._tree_gone = trio.Event()
        self._finished = trio.Event()
        self.feed = FactFeed(
            spec.job, spec.epoch, {"stdout": self._stdout.ring, "stderr": self._stderr.ring}
        )

    async def run(
        self,
        child: Child,
        pipes: Pipes,
        stdin: bytes | None,
        sweep: Callable[[], Awaitable[None]],
    ) -> None:
        """Drain the pipes, decide the verdict, and stay until ``finish``.

        ``sweep`` ends what a lost keeper left; the verdict waits for it.
        """
        try:
            with pipes:
                await self._run(child, pipes, stdin, sweep)
        except Exception as error:  # noqa: BLE001  the border of an actor: a bug ends its own job
            if self._outcome is None:
                detail = f"{type(error).__name__} while the agent ran"
                self._settle(AgentOutcome(exit=e.ExitStatus(), cause="internal", detail=detail))
            await self._tree_gone.wait()
        finally:
            self.abandon()

    async def outcome(self) -> AgentOutcome:
        """Wait for the verdict."""
        await self._decided.wait()
        assert self._outcome is not None, "decided means that there is an outcome"
        return self._outcome

    async def finish(self) -> None:
        """Say that the process tree is gone; returns when the last output is in its file."""
        self._tree_gone.set()
        await self._finished.wait()

    def abandon(self) -> None:
        """Close the files; a run that never had a verdict counts as interrupted."""
        self._stdout.close()
        self._stderr.close()
        if self._outcome is None:
            self._settle(AgentOutcome(exit=e.ExitStatus(), interrupted=True, detail="stopped"))
        self._finished.set()

    async def _run(
        self,
        child: Child,
        pipes: Pipes,
        stdin: bytes | None,
        sweep: Callable[[], Awaitable[None]],
    ) -> None:
        assert pipes.stdout is not None, "an agent's output is always read"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_exit, child)
            reading = trio.CancelScope()
            nursery.start_soon(self._read, pipes, stdin, reading)
            with trio.move_on_after(self._spec.timeout_ms / 1000):
                await self._stopping.wait()
            # When both ends come in one moment the agent's own counts, whichever task is woken
            # first: after a checkpoint all of that moment have run.
            await trio.lowlevel.checkpoint()
            if child.status is not None:
                self._exit = exit_status(child.status)
            elif not self._stopping.is_set():
                self._cause = "timed_out"
            if self._exit is not None:
                # What the program wrote is in the pipes by now; a grandchild that holds them open
                # is not waited for.
                reading.cancel()
                await self._read_rest(pipes)
            if self._lost:
                await sweep()
            self._settle(self._decide())
            await self._tree_gone.wait()
            with trio.move_on_after(_LAST_OUTPUT_S):
                await self._read_rest(pipes)
            nursery.cancel_scope.cancel()

    async def _watch_exit(self, child: Child) -> None:
        try:
            status = await child.wait()
        except KeeperLost:
            self._lost = True
        else:
            self._exit = exit_status(status)
        self._stopping.set()

    # --- output --------------------------------------------------------------------------------

    async def _read(self, pipes: Pipes, stdin: bytes | None, reading: trio.CancelScope) -> None:
        assert pipes.stdout is not None, "an agent's output is always read"
        with reading:
            async with trio.open_nursery() as nursery:
                if pipes.stdin is not None:
                    nursery.start_soon(feed, pipes.stdin, stdin or b"")
                nursery.start_soon(self._pump, pipes.stdout, self._stdout)
                nursery.start_soon(self._pump, pipes.stderr, self._stderr)

    async def _pump(self, stream: trio.lowlevel.FdStream, file: OutputFile) -> None:
        while data := await stream.receive_some(_READ_BYTES):
            self._take(data, file)
            await self.feed.room()

    async def _read_rest(self, pipes: Pipes) -> None:
        assert pipes.stdout is not None, "an agent's output is always read"
        for stream, file in ((pipes.stdout, self._stdout), (pipes.stderr, self._stderr)):
            for data in await read_available(stream, _PIPE_BYTES_MAX):
                self._take(data, file)
        if self._outcome is None:
            self._tell(self._lines.finish())

    def _take(self, data: bytes, file: OutputFile) -> None:
        if self._cause in ("output_limit", "disk_full"):
            return  # Read and dropped: the program shall not block before it is ended.
        try:
            file.write(data)
        except OutputLimit:
            self._stop("output_limit", f"more than {self._spec.output_bytes_max} bytes")
        except OSError as error:
            full = error.errno in DISK_FULL_ERRNOS
            self._stop("disk_full" if full else "internal", f"output: {error.strerror}")
        self.feed.note_change()
        if file is self._stdout and self._backend.reads_lines and self._outcome is None:
            self._tell(self._lines.feed(data))

    def _tell(self, lines: list[bytes]) -> None:
        for line in lines:
            for fact in self._backend.line(line):
                self.feed.put(fact.event, fact.texts)
                self._charge(fact)

    def _charge(self, fact: BackendFact) -> None:
        if isinstance(fact.event, e.UsageRecorded):
            self._spent_microusd += fact.event.cost_microusd
            if self._spent_microusd > self._spec.max_budget_microusd > 0:
                spent, allowed = self._spent_microusd, self._spec.max_budget_microusd
                self._stop("budget_exceeded", f"{spent} of {allowed} micro-dollars")

    # --- verdict -------------------------------------------------------------------------------

    def _stop(self, cause: e.Cause, detail: str) -> None:
        if self._cause is None and self._outcome is None:
            self._cause, self._detail = cause, detail
            self._stopping.set()

    def _decide(self) -> AgentOutcome:
        exit_now = self._exit or e.ExitStatus()
        if self._lost:
            return AgentOutcome(exit=exit_now, detail="keeper_lost", interrupted=True)
        verdict = self._backend.verdict(
            exit_now, self._stdout.ring.tail(), self._stderr.ring.tail()
        )
        if self._cause is not None:
            return AgentOutcome(
                exit=exit_now,
                cause=self._cause,
                detail=self._detail or self._limit_text(),
                result=_bounded(verdict.result),
            )
        return AgentOutcome(
            exit=exit_now,
            cause=verdict.cause,
            detail=verdict.detail,
            error=verdict.error,
            result=_bounded(verdict.result),
        )

    def _limit_text(self) -> str | None:
        return f"after {self._spec.timeout_ms} ms" if self._cause == "timed_out" else None

    def _settle(self, outcome: AgentOutcome) -> None:
        assert self._outcome is None, "a verdict stands"
        self._outcome = outcome
        self.feed.close()
        self._decided.set()


def _bounded(result: bytes | None) -> bytes | None:
    return None if result is None else result[:RESULT_BYTES_MAX]


def exit_status(status: int) -> e.ExitStatus:
    """Answer the exit of a raw wait status: exit code 137 and signal 9 are not the same."""
    if os.WIFSIGNALED(status):
        return e.ExitStatus(signal=os.WTERMSIG(status))
    return e.ExitStatus(code=os.WEXITSTATUS(status))
