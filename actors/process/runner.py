"""The service's side of a keeper: start it, spawn under it, end what it holds, hear of ends.

A keeper is never tied to the service by PR_SET_PDEATHSIG: that signal follows the *thread* that
forked, and trio's worker threads end after ten idle seconds. Its life line is the channel.
"""

import marshal
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGCONT
from subprocess import DEVNULL
from typing import Any, Final

import trio

from actors.process.identity import ProcessIdentity, current_boot_id
from actors.process.keeper import FRAME_BYTES_MAX
from actors.process.process_table import read_process
from actors.process.reaped import Reaped
from actors.process.registry import KeeperRegistry
from actors.process.sweep import sweep_tree

KEEPER_FILE: Final = Path(__file__).with_name("keeper.py")
_SEND_LIMIT_S: Final = 5.0
_REPLY_SLACK_S: Final = 2.0
_EXIT_LIMIT_S: Final = 10.0
_TAKEOVER_LIMIT_MS: Final = 60_000
_READ_BYTES: Final = 65_536
_HEADER_BYTES: Final = 4

# Any: a frame is read field by field, each checked where it is used.
Frame = dict[str, Any]


class KeeperLost(Exception):
    """The keeper ended, or does not answer: its job's processes have to be looked for."""


class SpawnFailed(Exception):
    """A program could not be started; ``errno`` is the reason of the operating system."""

    def __init__(self, errno: int, text: str) -> None:
        super().__init__(f"{text} (errno {errno})")
        self.errno = errno
        self.text = text


class Child:
    """A program that a keeper started for us."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 0
        self.start_time = 0
        self.status: int | None = None
        self._failure: SpawnFailed | KeeperLost | None = None
        self._started = trio.Event()
        self._ended = trio.Event()

    async def wait(self) -> int:
        """Wait for its end and answer the raw wait status; raises KeeperLost."""
        await self._ended.wait()
        if self.status is None:
            raise KeeperLost from self._failure
        return self.status

    async def wait_started(self) -> None:
        """Wait until it runs its program; raises SpawnFailed or KeeperLost."""
        await self._started.wait()
        if self._failure is not None:
            raise self._failure

    def note_started(self, pid: int, start_time: int) -> None:
        """Take note that it runs."""
        self.pid, self.start_time = pid, start_time
        self._started.set()

    def note_ended(self, status: int) -> None:
        """Take note of its raw wait status."""
        self.status = status
        self._started.set()
        self._ended.set()

    def note_failed(self, failure: SpawnFailed | KeeperLost) -> None:
        """Take note that nothing will be heard of it any more."""
        if not self._ended.is_set():
            self._failure = failure
            self._started.set()
            self._ended.set()


class KeeperProcess:
    """One running keeper; made by :func:`run_keeper`, whose task lives as long as it does."""

    def __init__(self, process: trio.Process, channel: trio.socket.SocketType) -> None:
        self._process = process
        self._channel = channel
        self._sending = trio.Lock()
        self._children: dict[int, Child] = {}
        self._reports: dict[int, tuple[trio.Event, list[Reaped]]] = {}
        self._number = 0
        self._empty = trio.Event()
        self._lost = trio.Event()
        self._gone = trio.Event()
        self._buffer = bytearray()
        self.mechanism = ""
        found = read_process(process.pid)
        self.identity = ProcessIdentity(
            pid=process.pid,
            start_time=found.start_time if found is not None else 0,
            boot_id=current_boot_id(),
        )

    @property
    def lost(self) -> bool:
        """Whether nothing can be asked of it any more (also after ``close``)."""
        return self._lost.is_set()

    async def wait_lost(self) -> None:
        """Wait until nothing can be asked of it any more."""
        await self._lost.wait()

    async def wait_empty(self) -> None:
        """Wait until it holds no process; raises KeeperLost."""
        await self._empty.wait()
        if self.lost:
            raise KeeperLost

    async def spawn(
        self,
        argv: Sequence[str | bytes],
        *,
        env: Mapping[str, str],
        cwd: str | Path,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        rlimits: Mapping[int, tuple[int, int]] | None = None,
    ) -> Child:
        """Start a program and answer it once it runs; raises SpawnFailed or KeeperLost.

        The files are lent: the caller closes its own copies. None is ``/dev/null``. If it is
        cancelled half-way, the program may run: ``kill_all`` ends it.
        """
        self._number += 1
        child = self._children[self._number] = Child(self._number)
        files = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        given = {name: fd for name, fd in files.items() if fd is not None}
        frame = {
            "type": "spawn",
            "id": child.number,
            "argv": tuple(os.fsencode(word) for word in argv),
            "env": {os.fsencode(k): os.fsencode(v) for k, v in env.items()},
            "cwd": os.fsencode(cwd),
            "fds": tuple(given),
            "rlimits": dict(rlimits or {}),
        }
        self._empty = trio.Event()
        try:
            await self._send(frame, tuple(given.values()))
            await child.wait_started()
        except (SpawnFailed, KeeperLost):
            self._children.pop(child.number, None)
            raise
        return child

    async def signal(self, sig: int) -> None:
        """Signal every process that it holds; raises KeeperLost."""
        await self._send({"type": "signal", "sig": int(sig)})

    async def kill_all(self, *, deadline_ms: int) -> Reaped:
        """Kill every process that it holds, however deep, and answer what ended.

        Waits until none is left or the deadline is over (``left`` says so). Raises KeeperLost; a
        keeper that does not answer (an agent may have stopped it) counts as lost.
        """
        self._number += 1
        token = self._number
        done, answers = self._reports[token] = (trio.Event(), [])
        try:
            with trio.move_on_after(deadline_ms / 1000 + _REPLY_SLACK_S):
                await self._send(
                    {"type": "kill_all", "token": token, "deadline_ms": int(deadline_ms)}
                )
                await done.wait()
        finally:
            del self._reports[token]
        if answers:
            return answers[0]
        self._abandon()
        raise KeeperLost

    async def close(self) -> None:
        """End it and everything it holds, and wait until it is gone. Safe to call twice."""
        self._channel.close()
        await self._gone.wait()

    async def serve(self) -> None:
        """Read what it says until it ends; called by its own task alone."""
        while (frame := await self._frame()) is not None:
            self._take(frame)

    async def greet(self) -> None:
        """Wait for its first word; raises KeeperLost."""
        frame = await self._frame()
        if frame is not None and frame["type"] == "failed":
            raise KeeperLost(frame["text"])
        if frame is None or frame["type"] != "hello":
            raise KeeperLost
        self.mechanism = str(frame["mechanism"])
        self._empty.set()

    async def bury(self) -> None:
        """Let it end by itself with all that it holds, end it if it can not, and reap it.

        A keeper is not killed as long as it holds anything: its death would set that free.
        """
        self._abandon()
        with trio.move_on_after(_EXIT_LIMIT_S):
            await self._process.wait()
        if self._process.returncode is None:
            await sweep_tree(self.identity, deadline_ms=_TAKEOVER_LIMIT_MS)
            self._process.kill()
            await self._process.wait()
        self._gone.set()

    def _mark_lost(self) -> None:
        self._lost.set()
        self._empty.set()
        for child in self._children.values():
            child.note_failed(KeeperLost())
        self._children.clear()
        for done, _ in self._reports.values():
            done.set()

    def _abandon(self) -> None:
        # It kills all at the end of file; an agent may have stopped it before.
        if self._process.returncode is None:
            self._process.send_signal(SIGCONT)
        self._channel.close()
        self._mark_lost()

    def _take(self, frame: Frame) -> None:
        match frame:
            case {"type": "spawned", "id": number, "pid": pid, "start_time": start_time}:
                self._children[number].note_started(pid, start_time)
            case {"type": "spawn_failed", "id": number, "errno": errno, "text": text}:
                self._children.pop(number).note_failed(SpawnFailed(errno, text))
            case {"type": "exited", "id": number, "status": status}:
                self._children.pop(number).note_ended(status)
            case {"type": "empty"}:
                self._empty.set()
            case {"type": "reaped", "token": token}:
                self._reported(token, frame)
            case _:
                raise AssertionError(frame["type"])

    def _reported(self, token: int, frame: Frame) -> None:
        if token in self._reports:
            done, answers = self._reports[token]
            answers.append(
                Reaped(
                    pids=tuple((pid, how) for pid, how in frame["pids"]),
                    seen=frame["seen"],
                    left=frame["left"],
                    duration_ms=frame["ms"],
                )
            )
            done.set()

    async def _frame(self) -> Frame | None:
        header = await self._exactly(_HEADER_BYTES)
        if header is None:
            return None
        data = await self._exactly(int.from_bytes(header, "big"))
        # S302: written by our own keeper, which no agent writes for.
        return None if data is None else marshal.loads(data)  # noqa: S302

    async def _exactly(self, size: int) -> bytes | None:
        assert size <= FRAME_BYTES_MAX, "the keeper's frames are small"
        while len(self._buffer) < size:
            try:
                data = await self._channel.recv(_READ_BYTES)
            except (OSError, trio.ClosedResourceError):
                return None
            if not data:
                return None
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    async def _send(self, frame: Frame, fds: tuple[int, ...] = ()) -> None:
        data = marshal.dumps(frame)
        data = len(data).to_bytes(_HEADER_BYTES, "big") + data
        assert len(data) <= FRAME_BYTES_MAX, "prompts and files never go by frame"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(_fd_bytes(fd) for fd in fds))]
        async with self._sending:
            # Half a frame would be the end of the channel: shielded, with a limit of its own.
            with trio.move_on_after(_SEND_LIMIT_S, shield=True) as scope:
                try:
                    sent = await self._channel.sendmsg([data], rights if fds else [])
                    while sent < len(data):
                        sent += await self._channel.send(data[sent:])
                except (OSError, trio.ClosedResourceError) as error:
                    raise KeeperLost from error
            if scope.cancelled_caught:
                self._abandon()
                raise KeeperLost


async def run_keeper(
    registry: KeeperRegistry,
    mechanism: str = "subreaper",
    *,
    task_status: trio.TaskStatus[KeeperProcess] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one keeper until it is closed, ends, or this is cancelled: it is always reaped.

    Raises OSError or KeeperLost when it can not be started.
    """
    async with registry.forking:
        process, channel = await _start_keeper(mechanism)
        registry.pids.add(process.pid)
    keeper = KeeperProcess(process, channel)
    try:
        await keeper.greet()
        task_status.started(keeper)
        await keeper.serve()
    finally:
        with trio.CancelScope(shield=True):
            await keeper.bury()
        registry.pids.discard(process.pid)


async def _start_keeper(mechanism: str) -> tuple[trio.Process, trio.socket.SocketType]:
    ours, theirs = socket.socketpair()
    channel = trio.socket.from_stdlib_socket(ours)
    try:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-I", "-S", str(KEEPER_FILE), str(theirs.fileno()), mechanism],
            pass_fds=(theirs.fileno(),),
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=DEVNULL,
            env=keeper_environment(),
            start_new_session=True,
        )
    except BaseException:
        channel.close()
        raise
    finally:
        theirs.close()
    return process, channel


def keeper_environment() -> dict[str, str]:
    """Answer what a keeper sees of the service's environment: what an interpreter needs to start."""
    return {k: v for k, v in os.environ.items() if k in {"LD_LIBRARY_PATH", "PATH"}}


def _fd_bytes(fd: int) -> bytes:
    return fd.to_bytes(4, sys.byteorder)
