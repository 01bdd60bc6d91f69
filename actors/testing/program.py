"""A backend's own run over a scripted program: real parser, limits and pipes, and no process."""

import json
import math
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Final, Literal, TypeVar

import attrs
import trio

from actors.agent_run import AgentRun
from actors.backends import Backend, BackendFact, Launch, Verdict
from actors.host import AgentOutcome, HostError, HostFact, RunSpec
from actors.process.runner import Child, KeeperLost
from actors.process.tool import Pipes
from actors.testing.host import FakeHost, FakeRun, Launched, Script, Tree
from actors.workspace import DataLayout, RunPlace
from storage import events as e

_DECIDED_BY_THE_BACKEND: Final = (
    "facts",
    "repeats_facts",
    "cause",
    "detail",
    "error",
    "result",
    "crash",
)
_READ_BYTES: Final = 65_536
_KILLED: Final = 9
T = TypeVar("T")


@attrs.frozen
class Output:
    """Bytes that a program writes, ``after_s`` virtual seconds after its start."""

    after_s: float
    data: bytes
    stream: e.OutputStream = "stdout"


def lines(
    *said: str | bytes | Mapping[str, object],
    after_s: float = 0.1,
    every_s: float = 0.1,
    stream: e.OutputStream = "stdout",
) -> tuple[Output, ...]:
    """Answer one output for each line: the first after ``after_s``, then one each ``every_s``.

    A mapping is written as JSON. The end of the line is added.
    """
    return tuple(
        Output(after_s + number * every_s, _line(one) + b"\n", stream)
        for number, one in enumerate(said)
    )


def _line(said: str | bytes | Mapping[str, object]) -> bytes:
    if isinstance(said, bytes):
        return said
    return (said if isinstance(said, str) else json.dumps(dict(said))).encode()


@attrs.frozen(kw_only=True)
class Program(Script):
    """A run of ``backend`` over a program that writes ``output`` and ends after ``run_s``.

    All that a :class:`Script` says of processes holds: ``exit_code``, ``children``,
    ``ignores_term``, ``survives_crash``, ``keeper_lost_s``, ``release_error`` and the rest; what
    the backend decides can not be scripted. ``signal`` (None: none) ends the program instead of
    ``exit_code``. ``backend`` is called once for each run. ``name`` and the fields after it are
    what the agent's definition would say.
    """

    backend: Callable[[RunSpec], Backend]
    output: tuple[Output, ...] = ()
    signal: int | None = None
    name: str = "scripted"
    argv: tuple[str, ...] = ()
    prompt_by: Literal["stdin", "file"] = "stdin"
    line_format: Literal["text", "jsonl"] = "text"
    environment: tuple[tuple[str, str], ...] = ()

    def __attrs_post_init__(self) -> None:
        """Raise ValueError for what the backend decides, and for output that goes back in time."""
        plain = Script()
        for field in _DECIDED_BY_THE_BACKEND:
            if getattr(self, field) != getattr(plain, field):
                raise ValueError(f"{field} of a Program is for its backend to decide")
        times = [one.after_s for one in self.output]
        if times != sorted(times):
            raise ValueError(f"the output of a Program is in the order of time, not {times}")

    def open_run(self, host: FakeHost, spec: RunSpec) -> FakeRun:
        """Answer the run that follows this script."""
        return ProgramRun(host, spec, self)

    def refine(self, spec: RunSpec) -> RunSpec:
        """Answer the spec with what the agent's definition says."""
        return attrs.evolve(
            spec,
            backend=self.name,
            argv=self.argv,
            prompt_by=self.prompt_by,
            line_format=self.line_format,
            environment=self.environment,
        )


class ProgramRun(FakeRun):
    """One run of a scripted program: as on this machine, but for workspace and processes."""

    def __init__(self, host: FakeHost, spec: RunSpec, program: Program) -> None:
        super().__init__(host, spec)
        self._program = program
        self._agent: AgentRun | None = None

    async def release(self) -> None:
        """Start the program; its time limit counts from here."""
        world = self._world
        assert world.nursery is not None, "a Program runs in a workbench"
        assert world.data is not None, "a Program runs in a workbench"
        place = RunPlace(DataLayout(world.data), self._spec.job, self._spec.epoch)
        launched = world.launched[self._key] = Launched(launch=Launch(argv=()))
        backend = _WatchedBackend(self._program.backend(self._spec), launched.errors)
        launched.launch = launch = backend.launch(home=place.home, tree=place.tree)
        if not launch.argv:
            raise HostError("spawn_failed", "the backend answered no command", detail="argv")
        await super().release()
        place.output("stdout").parent.mkdir(exist_ok=True)
        agent = self._agent = AgentRun(self._spec, place, backend)
        pipes, child = Pipes(stdin=launch.stdin is not None), Child(1)
        process = _Process(self._program, world.trees[self._key], child, pipes, launched)
        world.nursery.start_soon(process.live)
        world.nursery.start_soon(self._attend, agent, child, pipes, launch.stdin)

    async def _attend(
        self, agent: AgentRun, child: Child, pipes: Pipes, stdin: bytes | None
    ) -> None:
        """Run the agent for as long as the service lives."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_with_service, nursery.cancel_scope)
            await agent.run(child, pipes, stdin, self._sweep)
            nursery.cancel_scope.cancel()

    async def _end_with_service(self, scope: trio.CancelScope) -> None:
        await self._host.wait_dead()
        scope.cancel()

    async def _sweep(self) -> None:
        await trio.lowlevel.checkpoint()
        self._world.kill(self._key)

    def facts(self) -> AbstractAsyncContextManager[AsyncGenerator[Sequence[HostFact], None]]:
        """Batches of what the backend told, until the agent has ended."""
        assert self._agent is not None, "facts come after release"
        return aclosing(self._agent.feed.batches())

    async def outcome(self) -> AgentOutcome:
        """Wait for the verdict: by the backend, or by a limit."""
        assert self._agent is not None, "an outcome comes after release"
        outcome = await self._agent.outcome()
        await self._host.wait(0)
        return outcome

    async def message(self, text: str) -> None:
        """Always raises HostError, as for every program of this machine."""
        del text
        self._host.check("message", self._key)
        await self._host.wait(0)
        message = f"agent {self._spec.agent} takes no messages"
        raise HostError("internal", message, detail="no_messages")

    async def end(self, *, grace_ms: int) -> e.ProcessReaped:
        """TERM, grace if anybody ignores it, KILL; then the last output is read."""
        reaped = await super().end(grace_ms=grace_ms)
        await self._finish()
        return reaped

    async def close(self) -> None:
        """End the keeper and all that can be ended with it."""
        await super().close()
        await self._finish()

    async def _finish(self) -> None:
        if self._agent is not None:
            await self._agent.finish()


class _WatchedBackend(Backend):
    """Keeps what a backend raises: the log only says that it did."""

    def __init__(self, backend: Backend, errors: list[Exception]) -> None:
        self._backend = backend
        self._errors = errors

    @property
    def reads_lines(self) -> bool:
        return self._backend.reads_lines

    def launch(self, *, home: Path, tree: Path) -> Launch:
        return self._watch(lambda: self._backend.launch(home=home, tree=tree))

    def line(self, line: bytes) -> list[BackendFact]:
        return self._watch(lambda: self._backend.line(line))

    def verdict(self, exit_status: e.ExitStatus, stdout: bytes, stderr: bytes) -> Verdict:
        return self._watch(lambda: self._backend.verdict(exit_status, stdout, stderr))

    def _watch(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            self._errors.append(error)
            raise


class _Process:
    """What stands for the agent's process: it reads and writes real pipes on the virtual clock."""

    def __init__(
        self, program: Program, tree: Tree, child: Child, pipes: Pipes, launched: Launched
    ) -> None:
        self._program = program
        self._tree = tree
        self._child = child
        self._launched = launched
        self._started_at = trio.current_time()
        self._pid = next(pid for pid, role in tree.roles.items() if role == "agent")
        self._stdin = None if pipes.child_stdin is None else _own(pipes.child_stdin)
        assert pipes.child_stdout is not None, "a program has an output"
        self._streams: dict[e.OutputStream, trio.lowlevel.FdStream] = {
            "stdout": _own(pipes.child_stdout),
            "stderr": _own(pipes.child_stderr),
        }
        pipes.close_child_ends()

    async def live(self) -> None:
        """Follow the script to the end, or until it is killed."""
        try:
            with trio.CancelScope() as scope:
                self._tree.on_end[self._pid] = scope.cancel
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read_prompt)
                    nursery.start_soon(self._lose_keeper)
                    await self._follow_script()
                    nursery.cancel_scope.cancel()
        finally:
            for stream in (self._stdin, *self._streams.values()):
                if stream is not None:
                    stream.close()
            self._tree.on_end.pop(self._pid, None)
            self._tree.roles.pop(self._pid, None)
        if self._child.status is None:
            self._child.note_ended(_KILLED)

    async def _follow_script(self) -> None:
        program = self._program
        try:
            for output in program.output:
                if output.after_s > program.run_s:
                    break
                await trio.sleep_until(self._started_at + output.after_s)
                await self._streams[output.stream].send_all(output.data)
        except trio.BrokenResourceError:
            pass  # Nobody reads any more: the service that did is gone.
        await trio.sleep_until(self._started_at + program.run_s)
        # In the moment of its deadline, so that an end at the very limit still counts as one.
        exit_status = program.exit_code << 8 if program.signal is None else program.signal
        self._child.note_ended(exit_status)

    async def _read_prompt(self) -> None:
        if self._stdin is not None:
            while data := await self._stdin.receive_some(_READ_BYTES):
                self._launched.stdin += data

    async def _lose_keeper(self) -> None:
        if self._program.keeper_lost_s < math.inf:
            await trio.sleep_until(self._started_at + self._program.keeper_lost_s)
            for pid in [p for p, role in self._tree.roles.items() if role == "keeper"]:
                del self._tree.roles[pid]
            self._child.note_failed(KeeperLost())
            await trio.sleep_forever()


def _own(fd: int) -> trio.lowlevel.FdStream:
    return trio.lowlevel.FdStream(os.dup(fd))
