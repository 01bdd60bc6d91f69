"""The newest events in memory, and those who wait for the next ones."""

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final

import trio

from storage.errors import LogClosed
from storage.event_log import Recorded
from storage.ids import Seq, StreamName

RING_EVENTS: Final = 2_048
SLICE_EVENTS: Final = 256

Page = Callable[[StreamName | None, int], Awaitable[list[Recorded]]]
"""Reads events of a stream (None: of the log) after a seq from the disk, at least one if any."""


class Feed:
    """A ring of the newest events, filled after each commit, and a place to wait per stream.

    Used from the trio thread only. Those who wait for one stream are woken by its events alone.
    """

    def __init__(self, head: int, *, ring_events: int = RING_EVENTS) -> None:
        assert ring_events > 0, "the ring holds something"
        self.head = Seq(head)
        self.closed = False
        self._size = ring_events
        self._first = head + 1
        self._ring: list[Recorded | None] = [None] * ring_events
        self._streams: dict[str, deque[Recorded]] = {}
        self._lots: dict[str | None, trio.lowlevel.ParkingLot] = {}

    def publish(self, records: Sequence[Recorded]) -> None:
        """Take committed events, in order, and wake those who wait for them."""
        assert not records or records[0].seq == self.head + 1, "the feed has no gap"
        for record in records:
            self._put(record)
        if self._lots:
            self._wake({None, *(record.stream for record in records)})

    def close(self) -> None:
        """End all who wait; they see what was published before."""
        self.closed = True
        self._wake(set(self._lots))

    async def wait(self, stream: StreamName | None) -> None:
        """Return after the next publication with an event of the stream, or when closed.

        There is no checkpoint between the call and the waiting: look, then wait, misses nothing.
        """
        if self.closed:
            await trio.lowlevel.checkpoint()
            return
        lot = self._lots.get(stream)
        if lot is None:
            lot = self._lots[stream] = trio.lowlevel.ParkingLot()
        try:
            await lot.park()
        finally:
            if not lot and self._lots.get(stream) is lot:
                del self._lots[stream]

    def after(
        self, seq: int, stream: StreamName | None, limit: int = SLICE_EVENTS
    ) -> list[Recorded] | None:
        """Answer the next events after a seq; None when the ring does not reach back that far."""
        if stream is None:
            if seq + 1 < self._first:
                return None
            return self._slice(max(seq + 1, self._first), min(self.head, seq + limit))
        held = self._streams.get(stream)
        if seq + 1 < self._first and not (held and held[0].version == 1):
            return None
        found = []
        for record in reversed(held or ()):
            if record.seq <= seq:
                break
            found.append(record)
        found.reverse()
        return found[:limit]

    def stream(self, stream: StreamName, after_version: int) -> list[Recorded] | None:
        """Answer a stream's events after a version; None when the ring does not hold them all."""
        held = self._streams.get(stream)
        if held and held[0].version <= after_version + 1:
            return [record for record in held if record.version > after_version]
        return [] if self._first == 1 and not held else None

    def last_seq(self, stream: StreamName) -> int | None:
        """Answer the seq of a stream's newest event; None when the ring does not know."""
        held = self._streams.get(stream)
        return int(held[-1].seq) if held else None

    def _put(self, record: Recorded) -> None:
        slot = record.seq % self._size
        old = self._ring[slot]
        if old is not None:
            held = self._streams[old.stream]
            held.popleft()
            if not held:
                del self._streams[old.stream]
            self._first = old.seq + 1
        self._ring[slot] = record
        held_now = self._streams.get(record.stream)
        if held_now is None:
            held_now = self._streams[record.stream] = deque()
        held_now.append(record)
        self.head = record.seq

    def _slice(self, first: int, last: int) -> list[Recorded]:
        size = self._size
        found = [self._ring[seq % size] for seq in range(first, last + 1)]
        return [record for record in found if record is not None]

    def _wake(self, streams: set[str | None]) -> None:
        if len(streams) > len(self._lots):
            streams = streams & self._lots.keys()
        for stream in streams:
            lot = self._lots.get(stream)
            if lot is not None:
                lot.unpark_all()


@asynccontextmanager
async def following(
    feed: Feed, page: Page, *, stream: StreamName | None, after: int
) -> AsyncIterator[AsyncGenerator[Recorded, None]]:
    """Answer a generator that replays events after a seq, then follows, until the feed closes."""
    async with aclosing(_follow(feed, page, stream, after)) as generator:
        yield generator


async def wait_past(
    feed: Feed, last: Callable[[StreamName], Awaitable[int]], seq: int, stream: StreamName | None
) -> None:
    """Return when the log's head, or a stream's last event, is past a seq.

    ``last`` looks a stream's last seq up where the ring does not know it. Raises LogClosed.
    """
    await trio.lowlevel.checkpoint()
    while True:
        if stream is None:
            known = int(feed.head)
        elif seq >= feed.head:
            known = 0
        else:
            known = feed.last_seq(stream) or max(await last(stream), feed.last_seq(stream) or 0)
        if known > seq:
            return
        if feed.closed:
            raise LogClosed
        await feed.wait(stream)


async def _follow(
    feed: Feed, page: Page, stream: StreamName | None, after: int
) -> AsyncGenerator[Recorded, None]:
    position = after
    while True:
        found = feed.after(position, stream)
        if found is None:
            if feed.closed:
                return
            head = feed.head
            found = await page(stream, position)
            if not found:
                # Nothing of this stream up to the head at that time: go on from there.
                position = max(position, int(head))
                continue
        if not found:
            if feed.closed:
                return
            await feed.wait(stream)
        for record in found:
            position = int(record.seq)
            yield record
