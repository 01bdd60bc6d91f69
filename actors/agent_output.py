"""What an agent writes: raw bytes to files that recovery adopts, tails and facts to the log."""

import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Final

import trio

from actors.host import HostFact
from actors.ring_buffer import RingBuffer
from storage import events as e
from storage.ids import JobId

FACTS_PENDING_MAX: Final = 1024
OUTPUT_EVERY_S: Final = 1.0
LIVE_TAIL_BYTES: Final = 8_192
_READ_BYTES: Final = 65_536
_STREAMS: Final[tuple[e.OutputStream, ...]] = ("stdout", "stderr")


class OutputLimit(Exception):
    """An agent wrote more than it may; what fits is stored."""


class OutputBudget:
    """How many bytes both streams of a run may still write."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max

    def take(self, wanted: int) -> int:
        """Answer how many of the wanted bytes may be written; they are spent."""
        given = min(wanted, self._left)
        self._left -= given
        return given


class OutputFile:
    """The growing file of one stream, with the tail of it in memory."""

    def __init__(self, path: Path, budget: OutputBudget) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._budget = budget
        self.ring = RingBuffer()

    def write(self, data: bytes) -> None:
        """Append bytes; raises OutputLimit when not all of them fit, OSError when the disk is full.

        This blocks for the copy into the page cache, some 20 microseconds for 64 KiB. A thread
        hop costs ten times that for each read; the reader of a pipe is the hot loop here.
        """
        fits = data[: self._budget.take(len(data))]
        self.ring.push(fits)
        view = memoryview(fits)
        while view:
            view = view[os.write(self._fd, view) :]
        if len(fits) < len(data):
            raise OutputLimit

    def close(self) -> None:
        """Close the file; durability is capture's business. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LineSplitter:
    """Cuts a stream into lines without their ends; a line may have any length."""

    def __init__(self) -> None:
        self._part = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Answer the lines that are complete by now."""
        head, newline, rest = data.partition(b"\n")
        self._part += head
        if not newline:
            return []
        lines = [bytes(self._part), *rest.split(b"\n")]
        self._part = bytearray(lines.pop())
        return lines

    def finish(self) -> list[bytes]:
        """Answer the last line when it has no end."""
        last, self._part = bytes(self._part), bytearray()
        return [last] if last else []


class FactFeed:
    """Numbers the facts of a run and hands them out in batches, for one reader.

    Output facts coalesce: at most one per stream and second, the newest tail. All others are
    kept, in order; who makes many waits for ``room``.
    """

    def __init__(self, job: JobId, epoch: int, rings: dict[e.OutputStream, RingBuffer]) -> None:
        self._job = job
        self._epoch = epoch
        self._rings = rings
        self._number = 0
        self._pending: list[tuple[e.JobEvent, tuple[tuple[str, bytes], ...]]] = []
        self._told: dict[e.OutputStream, int] = dict.fromkeys(_STREAMS, 0)
        self._told_at = dict.fromkeys(_STREAMS, float("-inf"))
        self._closed = False
        self._changed = trio.Event()
        self._taken = trio.Event()

    def put(self, event: e.JobEvent, texts: tuple[tuple[str, bytes], ...] = ()) -> None:
        """Add a fact; it is never dropped."""
        self._pending.append((event, texts))
        self.note_change()

    def note_change(self) -> None:
        """Wake the reader: there is new output, or a new fact."""
        self._changed.set()

    async def room(self) -> None:
        """Wait until fewer than 1,024 facts are pending, or nobody will read them any more."""
        while len(self._pending) >= FACTS_PENDING_MAX and not self._closed:
            await self._taken.wait()

    def close(self) -> None:
        """Say that the agent has ended: what is pending is the last batch."""
        self._closed = True
        self._changed.set()
        self._taken.set()

    async def batches(self) -> AsyncGenerator[Sequence[HostFact], None]:
        """Yield batches until closed; the last one holds the newest tail of each stream."""
        while True:
            batch = self._take()
            if batch:
                yield batch
            elif self._closed:
                return
            else:
                await self._wait()

    def _take(self) -> list[HostFact]:
        facts = [self._fact(event, texts) for event, texts in self._pending]
        self._pending.clear()
        self._taken.set()
        self._taken = trio.Event()
        self._changed = trio.Event()
        now = trio.current_time()
        for stream in _STREAMS:
            if self._closed or self._due(stream) <= now:
                facts += self._output(stream, now)
        return facts

    def _due(self, stream: e.OutputStream) -> float:
        if self._rings[stream].total == self._told[stream]:
            return float("inf")
        return self._told_at[stream] + OUTPUT_EVERY_S

    async def _wait(self) -> None:
        with trio.move_on_at(min(self._due(stream) for stream in _STREAMS)):
            await self._changed.wait()

    def _output(self, stream: e.OutputStream, now: float) -> list[HostFact]:
        ring = self._rings[stream]
        if ring.total == self._told[stream]:
            return []
        self._told[stream], self._told_at[stream] = ring.total, now
        tail = ring.tail(None if self._closed else LIVE_TAIL_BYTES)
        event = e.OutputRecorded(
            stream=stream,
            offset=ring.total - len(tail),
            size=len(tail),
            tail=e.PayloadRef(digest="", size=len(tail)),
        )
        return [self._fact(event, (("tail", tail),))]

    def _fact(self, event: e.JobEvent, texts: tuple[tuple[str, bytes], ...]) -> HostFact:
        fact = HostFact(job=self._job, epoch=self._epoch, n=self._number, event=event, texts=texts)
        self._number += 1
        return fact


async def read_available(stream: trio.lowlevel.FdStream, bytes_max: int) -> list[bytes]:
    """Answer what lies in a pipe now, without waiting for more, at most about ``bytes_max``."""
    await trio.lowlevel.checkpoint()
    pieces = []
    size = 0
    while size < bytes_max:
        try:
            data = os.read(stream.fileno(), _READ_BYTES)
        except BlockingIOError:
            break
        if not data:
            break
        pieces.append(data)
        size += len(data)
    return pieces
