"""A host whose runs follow scripts on the virtual clock, over a world that outlives the service."""

import hashlib
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Literal

import attrs
import trio

from actors.backends import Launch
from actors.host import (
    AgentOutcome,
    Captured,
    CapturedFile,
    Host,
    HostError,
    HostFact,
    Prepared,
    Reconciled,
    Run,
    RunSpec,
)
from storage import events as e
from storage.codec import salted_digest
from storage.event_log import StoredArtifact
from storage.ids import JobId

RunKey = tuple[JobId, int]
CaptureScript = Literal["ok", "incomplete", "fails", "hangs"]
BOOT_ID = "boot-1"


class Crashed(BaseException):
    """The service is gone: raised in whatever it still tries to do. No border catches it."""


@attrs.frozen
class ScriptedFact:
    """A fact of a run, ``after_s`` seconds after the agent's start."""

    after_s: float
    event: e.JobEvent
    texts: tuple[tuple[str, bytes], ...] = ()


@attrs.frozen(kw_only=True)
class Script:
    """How a run goes; all times in virtual seconds, ``math.inf`` never.

    ``stuck`` processes survive KILL for ``stuck_s`` seconds. ``survives_crash`` leaves the tree
    alive when the service dies; ``unknown_s`` is how long a new host does not know about it.
    ``keeper_lost_s`` ends the run without a verdict. ``repeats_facts`` delivers each fact twice.
    """

    prepare_s: float = 0.1
    offer_error: HostError | None = None
    release_error: HostError | None = None
    run_s: float = 1.0
    facts: tuple[ScriptedFact, ...] = ()
    repeats_facts: bool = False
    exit_code: int = 0
    cause: e.Cause | None = None
    detail: str | None = None
    error: bytes | None = None
    result: bytes | None = b"done"
    crash: Exception | None = None
    children: int = 0
    ignores_term: bool = False
    term_s: float = 0.01
    end_s: float = 0.01
    stuck: int = 0
    stuck_s: float = math.inf
    keeper_lost_s: float = math.inf
    capture: CaptureScript = "ok"
    capture_s: float = 0.1
    remove_s: float = 0.0
    remove_error: HostError | None = None
    close_s: float = 0.0
    survives_crash: bool = False
    unknown_s: float = 0.0
    message_error: HostError | None = None

    def open_run(self, host: "FakeHost", spec: RunSpec) -> "FakeRun":
        """Answer the run that follows this script."""
        return FakeRun(host, spec)


@attrs.define
class Tree:
    """The processes of one run as the machine has them: role by pid.

    ``on_end`` is called, by pid, when a signal ends the process.
    """

    script: Script
    keeper: e.ProcessSpawned
    roles: dict[int, str]
    stuck_until: float = math.inf
    on_end: dict[int, Callable[[], None]] = attrs.field(factory=dict)

    def signal(self, how: str) -> list[e.ReapedProcess]:
        """End all that can be ended now, and answer them."""
        now = trio.current_time()
        if self.stuck_until == math.inf and "stuck" in self.roles.values():
            self.stuck_until = now + self.script.stuck_s
        gone = [p for p, role in self.roles.items() if role != "stuck" or now >= self.stuck_until]
        for pid in gone:
            del self.roles[pid]
            if pid in self.on_end:
                self.on_end.pop(pid)()
        return [e.ReapedProcess(pid=pid, how=how) for pid in gone]

    @property
    def left(self) -> int:
        """How many processes there are."""
        return len(self.roles)


@attrs.define(kw_only=True)
class Launched:
    """What a scripted program was given, and what its backend raised."""

    launch: Launch
    stdin: bytes = b""
    errors: list[Exception] = attrs.field(factory=list)


@attrs.define(kw_only=True)
class World:
    """A machine: processes, workspaces and artifact files by (job, epoch), whoever serves.

    Scripted programs live in ``nursery`` and write into the folder ``data``; None: there are none.
    """

    script: Callable[[RunSpec], Script]
    nursery: trio.Nursery | None = None
    data: Path | None = None
    launched: dict[RunKey, Launched] = attrs.field(factory=dict)
    scripts: dict[RunKey, Script] = attrs.field(factory=dict)
    trees: dict[RunKey, Tree] = attrs.field(factory=dict)
    workspaces: dict[RunKey, bool] = attrs.field(factory=dict)
    released: dict[RunKey, int] = attrs.field(factory=dict)
    removed: list[RunKey] = attrs.field(factory=list)
    messages: list[tuple[RunKey, str]] = attrs.field(factory=list)
    files: dict[str, bytes] = attrs.field(factory=dict)
    next_pid: int = 100

    def script_of(self, spec: RunSpec) -> Script:
        """Answer the script of a run; drawn once, so that it survives the service."""
        key = (spec.job, spec.epoch)
        if key not in self.scripts:
            self.scripts[key] = self.script(spec)
        return self.scripts[key]

    def spawn(self) -> int:
        """Answer the pid of a new process."""
        self.next_pid += 1
        return self.next_pid

    def kill(self, key: RunKey, how: str = "signal 9") -> tuple[list[e.ReapedProcess], int]:
        """Answer what a KILL to a run's tree ended, and how many are left."""
        tree = self.trees.get(key)
        if tree is None:
            return [], 0
        ended = tree.signal(how)
        if not tree.roles:
            del self.trees[key]
        return ended, tree.left

    def service_died(self) -> None:
        """Let each keeper see the end of its pipe: it kills its tree, unless it is scripted."""
        for key, tree in list(self.trees.items()):
            if not tree.script.survives_crash:
                self.kill(key)

    @property
    def alive(self) -> int:
        """How many processes of any run there are."""
        now = trio.current_time()
        return sum(t.left for t in self.trees.values() if now < t.stuck_until)


class FakeHost(Host):
    """The host of one service process over a world; after :meth:`die` it does nothing more.

    ``before`` is called with the name of each verb and its run, before it has an effect, and
    again with ``verb.done`` after it; it may raise Crashed.
    """

    def __init__(
        self, world: World, before: Callable[[str, RunKey | None], None] | None = None
    ) -> None:
        self.world = world
        self._before = before or (lambda _verb, _key: None)
        self._opened_at = trio.current_time()
        self._dead = trio.Event()

    @property
    def containment(self) -> str:
        """The mechanism in force."""
        return "fake"

    @property
    def confined(self) -> bool:
        """Nothing is confined."""
        return False

    def die(self) -> None:
        """Refuse everything from here on: the service process is gone."""
        self._dead.set()

    def check(self, verb: str, key: RunKey | None = None) -> None:
        """Raise Crashed when the service is gone, or dies here."""
        if self._dead.is_set():
            raise Crashed
        self._before(verb, key)

    async def wait_dead(self) -> None:
        """Wait until the service process is gone."""
        await self._dead.wait()

    async def wait(self, seconds: float) -> None:
        """Wait, also shielded, but not longer than the service lives."""
        if self._dead.is_set():
            raise Crashed
        with trio.move_on_after(seconds):
            await self._dead.wait()
        if self._dead.is_set():
            raise Crashed
        await trio.lowlevel.checkpoint_if_cancelled()

    def open_run(self, spec: RunSpec) -> Run:
        """Answer the run of this epoch."""
        self.check("open_run", (spec.job, spec.epoch))
        return self.world.script_of(spec).open_run(self, spec)

    def adopt_run(self, spec: RunSpec, workspace: e.WorkspacePrepared | None) -> Run:
        """Answer a run of an earlier service process."""
        del workspace
        self.check("adopt_run", (spec.job, spec.epoch))
        return FakeRun(self, spec)

    async def reconcile(self, job: JobId, epoch: int, keeper: e.ProcessSpawned) -> Reconciled:
        """Answer whether the run's tree is there."""
        key = (job, epoch)
        self.check("reconcile", key)
        await self.wait(0)
        script = self.world.scripts.get(key)
        if script is not None and trio.current_time() < self._opened_at + script.unknown_s:
            return "unknown"
        tree = self.world.trees.get(key)
        if tree is None:
            return "gone"
        assert tree.keeper == keeper, "the log knows the keeper of each run that began"
        return "alive"

    async def reap(
        self, job: JobId, epoch: int, keeper: e.ProcessSpawned | None
    ) -> e.ProcessReaped:
        """End what is left of the run."""
        del keeper
        self.check("reap", (job, epoch))
        await self.wait(0.01)
        ended, left = self.world.kill((job, epoch))
        self.check("reap.done", (job, epoch))
        return e.ProcessReaped(phase="recovery", pids=ended, seen=len(ended) + left, left=left)

    async def sweep(self, keep: frozenset[RunKey]) -> int:
        """Remove what belongs to no run in ``keep``."""
        self.check("sweep")
        await self.wait(0.01)
        strange = [key for key in self.world.trees if key not in keep]
        orphans = [key for key in self.world.workspaces if key not in keep]
        for key in strange:
            self.world.kill(key)
        for key in orphans:
            del self.world.workspaces[key]
        self.check("sweep.done")
        return len(strange) + len(orphans)


class FakeRun(Run):
    """One scripted run."""

    def __init__(self, host: FakeHost, spec: RunSpec) -> None:
        self._host = host
        self._world = host.world
        self._spec = spec
        self._key: RunKey = (spec.job, spec.epoch)
        self._script = host.world.script_of(spec)
        self._started_at: float | None = None
        self._ended = trio.Event()

    async def offer(self) -> Prepared:
        """Make workspace and keeper after ``prepare_s``; cancelled or failing, undo it."""
        self._host.check("offer", self._key)
        assert self._key not in self._world.workspaces, "an epoch is prepared once"
        self._world.workspaces[self._key] = True
        try:
            await self._prepare()
        except Crashed:
            raise
        except BaseException:
            self._world.workspaces.pop(self._key, None)
            raise
        pid = self._world.spawn()
        keeper = e.ProcessSpawned(keeper=f"k{pid}", pid=pid, start_time=pid * 7, boot_id=BOOT_ID)
        self._world.trees[self._key] = Tree(self._script, keeper, {pid: "keeper"})
        self._host.check("offer.done", self._key)
        kind = self._spec.workspace.kind
        return Prepared(workspace=e.WorkspacePrepared(kind=kind, strategy="fake"), keeper=keeper)

    async def _prepare(self) -> None:
        await self._host.wait(self._script.prepare_s)
        if self._script.offer_error is not None:
            raise self._script.offer_error

    async def release(self) -> None:
        """Start the agent and its children."""
        self._host.check("release", self._key)
        await self._host.wait(0)
        if self._script.release_error is not None:
            raise self._script.release_error
        roles = self._world.trees[self._key].roles
        self._world.released[self._key] = self._world.released.get(self._key, 0) + 1
        roles[self._world.spawn()] = "agent"
        for _ in range(self._script.children):
            roles[self._world.spawn()] = "child"
        for _ in range(self._script.stuck):
            roles[self._world.spawn()] = "stuck"
        self._started_at = trio.current_time()
        self._host.check("release.done", self._key)

    def facts(self) -> AbstractAsyncContextManager[AsyncGenerator[Sequence[HostFact], None]]:
        """Batches as scripted, until the agent has ended."""
        return aclosing(self._facts())

    async def _facts(self) -> AsyncGenerator[Sequence[HostFact], None]:
        assert self._started_at is not None, "the agent was released"
        for n, scripted in enumerate(self._script.facts):
            due = self._started_at + scripted.after_s
            if due > self._ends_at:
                break
            await self._host.wait(max(0.0, due - trio.current_time()))
            if self._ended.is_set():
                return
            fact = HostFact(
                job=self._spec.job,
                epoch=self._spec.epoch,
                n=n,
                event=scripted.event,
                texts=scripted.texts,
            )
            yield [fact, fact] if self._script.repeats_facts else [fact]
            if self._script.repeats_facts:
                yield [fact]

    @property
    def _ends_at(self) -> float:
        assert self._started_at is not None, "the agent was released"
        return self._started_at + min(
            self._script.run_s, self._script.keeper_lost_s, self._spec.timeout_ms / 1000
        )

    async def outcome(self) -> AgentOutcome:
        """Wait for the scripted end, the limit, or the loss of the keeper."""
        script = self._script
        with trio.move_on_after(max(0.0, self._ends_at - trio.current_time())):
            await self._ended.wait()
        await self._host.wait(0)
        if script.crash is not None:
            raise script.crash
        limit_s = self._spec.timeout_ms / 1000
        if script.keeper_lost_s <= min(script.run_s, limit_s):
            self._drop("keeper")
            return AgentOutcome(exit=e.ExitStatus(), interrupted=True, detail="keeper_lost")
        if script.run_s > limit_s:
            return AgentOutcome(exit=e.ExitStatus(), cause="timed_out")
        self._drop("agent")
        code = script.exit_code
        cause: e.Cause | None = script.cause or ("agent_exit" if code else None)
        return AgentOutcome(
            exit=e.ExitStatus(code=code),
            cause=cause,
            detail=script.detail,
            error=script.error,
            result=script.result if cause is None else None,
        )

    def _drop(self, role: str) -> None:
        tree = self._world.trees.get(self._key)
        for pid in [p for p, r in (tree.roles if tree else {}).items() if r == role]:
            assert tree is not None, "it had a role"
            del tree.roles[pid]

    async def message(self, text: str) -> None:
        """Keep the message in the world's record."""
        self._host.check("message", self._key)
        await self._host.wait(0)
        if self._script.message_error is not None:
            raise self._script.message_error
        self._world.messages.append((self._key, text))

    async def end(self, *, grace_ms: int) -> e.ProcessReaped:
        """TERM, grace if anybody ignores it, KILL."""
        self._host.check("end", self._key)
        began_at = trio.current_time()
        tree = self._world.trees.get(self._key)
        if tree is not None and grace_ms and "agent" in tree.roles.values():
            asked_s = grace_ms / 1000
            await self._host.wait(
                asked_s if self._script.ignores_term else min(self._script.term_s, asked_s)
            )
        await self._host.wait(self._script.end_s)
        how = "signal 9" if self._script.ignores_term or not grace_ms else "signal 15"
        ended, left = self._world.kill(self._key, how)
        self._ended.set()
        self._host.check("end.done", self._key)
        return e.ProcessReaped(
            phase="agent",
            pids=ended,
            seen=len(ended) + left,
            left=left,
            duration_ms=round((trio.current_time() - began_at) * 1000),
        )

    async def capture(self) -> Captured:
        """Store one file of the workspace, as scripted, inside a process of its own."""
        self._host.check("capture", self._key)
        script = self._script
        if self._key not in self._world.workspaces:
            raise HostError("internal", "the workspace is gone")
        pid = self._world.spawn()
        keeper = e.ProcessSpawned(keeper=f"k{pid}", pid=pid, start_time=pid * 7, boot_id=BOOT_ID)
        tree = self._world.trees.setdefault(self._key, Tree(script, keeper, {}))
        tree.roles[pid] = "capture"
        await self._host.wait(math.inf if script.capture == "hangs" else script.capture_s)
        ended, left = self._world.kill(self._key)
        if script.capture == "fails":
            raise HostError("internal", "git could not read the workspace")
        data = f"diff of {self._spec.job} {self._spec.epoch}".encode()
        name = hashlib.sha256(data).hexdigest()
        path = f"capture/{name}"
        self._world.files[path] = data
        self._host.check("capture.done", self._key)
        return Captured(
            files=(CapturedFile(name="diff", path=path, sha256=name, size=len(data)),),
            complete=script.capture == "ok",
            reaped=e.ProcessReaped(phase="capture", pids=ended, seen=len(ended), left=left),
        )

    async def remove(self) -> None:
        """Take the workspace away."""
        self._host.check("remove", self._key)
        await self._host.wait(self._script.remove_s)
        if self._script.remove_error is not None:
            raise self._script.remove_error
        if self._world.workspaces.pop(self._key, None):
            self._world.removed.append(self._key)
        self._host.check("remove.done", self._key)

    async def close(self) -> None:
        """End the keeper and all that can be ended with it."""
        self._host.check("close", self._key)
        await self._host.wait(self._script.close_s)
        self._world.kill(self._key)
        self._ended.set()
        self._host.check("close.done", self._key)


class FakeArtifacts:
    """Where captured files go; the bytes are in the world, so that they outlive the service."""

    def __init__(self, host: FakeHost) -> None:
        self._host = host

    async def adopt(self, source: CapturedFile, salt: bytes) -> StoredArtifact:
        """Move a file into the store and answer its row."""
        self._host.check("adopt")
        await self._host.wait(0)
        data = self._host.world.files.pop(source.path)
        self._host.world.files[source.sha256] = data
        self._host.check("adopt.done")
        return StoredArtifact(
            digest=salted_digest(salt, data), salt=salt, file=source.sha256, size=source.size
        )
