"""Runs one program inside a keeper and answers what it wrote: for git, above all."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import trio

from actors.process.runner import KeeperLost, KeeperProcess, SpawnFailed

READ_BYTES: Final = 65_536
_STDERR_BYTES_MAX: Final = 65_536
_KILL_LIMIT_MS: Final = 5_000
_HELD_PIPE_S: Final = 1.0


class OutputTooLong(Exception):
    """A tool wrote more than its caller was ready to keep; it was killed."""


@attrs.frozen(kw_only=True)
class ToolResult:
    """How a tool ended: exit code (negative: the signal), and what it wrote.

    Of stderr only the first 64 KiB are kept.
    """

    code: int
    stdout: bytes
    stderr: bytes


async def run_tool(
    keeper: KeeperProcess,
    argv: Sequence[str | bytes],
    *,
    env: Mapping[str, str],
    cwd: str | Path,
    stdin: bytes | None = None,
    stdout_to: int | None = None,
    output_bytes_max: int = 64 * 1024 * 1024,
) -> ToolResult:
    """Run a program to its end inside a keeper, both of its pipes drained all the while.

    ``stdout_to`` sends its output to an open file instead. When this is cancelled, or the output
    is too long (OutputTooLong), everything in the keeper is killed before it returns. Raises
    SpawnFailed and KeeperLost.
    """
    over = False
    try:
        result = await _run(keeper, argv, env, cwd, stdin, stdout_to, output_bytes_max)
        over = True
    except (SpawnFailed, KeeperLost):
        over = True
        raise
    finally:
        # Not ``except Cancelled``: out of a nursery it comes inside an exception group.
        if not over:
            # A lost keeper is its owner's to sweep after; this caller is on its way out anyway.
            with trio.CancelScope(shield=True), contextlib.suppress(KeeperLost):
                await keeper.kill_all(deadline_ms=_KILL_LIMIT_MS)
    return result


async def _run(
    keeper: KeeperProcess,
    argv: Sequence[str | bytes],
    env: Mapping[str, str],
    cwd: str | Path,
    stdin: bytes | None,
    stdout_to: int | None,
    output_bytes_max: int,
) -> ToolResult:
    with Pipes(stdin=stdin is not None, stdout=stdout_to is None) as pipes:
        child = await keeper.spawn(
            argv,
            env=env,
            cwd=cwd,
            stdin=pipes.child_stdin,
            stdout=pipes.child_stdout if stdout_to is None else stdout_to,
            stderr=pipes.child_stderr,
        )
        pipes.close_child_ends()
        stdout, stderr = bytearray(), bytearray()
        code = -1
        try:
            async with trio.open_nursery() as nursery:
                drained = trio.Event()
                nursery.start_soon(_pump, pipes, stdin, stdout, stderr, output_bytes_max, drained)
                code = os.waitstatus_to_exitcode(await child.wait())
                # The pumps end at the end of file. A grandchild (a daemon of a fetch) may hold
                # the pipes open for longer: what the tool wrote is in the pipe by now.
                with trio.move_on_after(_HELD_PIPE_S):
                    await drained.wait()
                nursery.cancel_scope.cancel()
        except* OutputTooLong:
            raise OutputTooLong from None
        except* KeeperLost:
            raise KeeperLost from None
        return ToolResult(code=code, stdout=bytes(stdout), stderr=bytes(stderr))


async def _pump(
    pipes: "Pipes",
    stdin: bytes | None,
    stdout: bytearray,
    stderr: bytearray,
    output_bytes_max: int,
    drained: trio.Event,
) -> None:
    async with trio.open_nursery() as nursery:
        if pipes.stdin is not None:
            nursery.start_soon(feed, pipes.stdin, stdin or b"")
        if pipes.stdout is not None:
            nursery.start_soon(_keep, pipes.stdout, stdout, output_bytes_max)
        nursery.start_soon(_keep_first, pipes.stderr, stderr, _STDERR_BYTES_MAX)
    drained.set()


async def feed(stream: trio.lowlevel.FdStream, data: bytes) -> None:
    """Write all to a pipe, then close it; a reader that goes away ends it quietly."""
    async with stream:
        try:
            await stream.send_all(data)
        except trio.BrokenResourceError:
            return


async def _keep(stream: trio.lowlevel.FdStream, kept: bytearray, bytes_max: int) -> None:
    while data := await stream.receive_some(READ_BYTES):
        kept += data
        if len(kept) > bytes_max:
            raise OutputTooLong


async def _keep_first(stream: trio.lowlevel.FdStream, kept: bytearray, bytes_max: int) -> None:
    while data := await stream.receive_some(READ_BYTES):
        kept += data[: bytes_max - len(kept)]


class Pipes:
    """The pipes of one child: our ends as streams, its ends as plain files until it has them.

    Raises OSError when no more files can be opened.
    """

    def __init__(self, *, stdin: bool, stdout: bool = True) -> None:
        self._child_ends: list[int] = []
        self._streams: list[trio.lowlevel.FdStream] = []
        self.child_stdin: int | None = None
        self.child_stdout: int | None = None
        self.stdin: trio.lowlevel.FdStream | None = None
        self.stdout: trio.lowlevel.FdStream | None = None
        try:
            if stdin:
                self.child_stdin, write = os.pipe()
                self._child_ends.append(self.child_stdin)
                self.stdin = self._ours(write)
            if stdout:
                self.stdout, self.child_stdout = self._reading()
            self.stderr, self.child_stderr = self._reading()
        except OSError:
            self.close()
            raise

    def __enter__(self) -> "Pipes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all ends that are still open. Safe to call twice."""
        self.close_child_ends()
        for stream in self._streams:
            stream.close()

    def close_child_ends(self) -> None:
        """Close what the child has its own copy of by now; the end of file depends on it."""
        while self._child_ends:
            os.close(self._child_ends.pop())

    def _reading(self) -> tuple[trio.lowlevel.FdStream, int]:
        read, write = os.pipe()
        self._child_ends.append(write)
        return self._ours(read), write

    def _ours(self, fd: int) -> trio.lowlevel.FdStream:
        stream = trio.lowlevel.FdStream(fd)
        self._streams.append(stream)
        return stream
