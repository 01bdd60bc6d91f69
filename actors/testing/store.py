"""A memory log that can die with its service, over a store that tells what it was given."""

from collections.abc import Callable

import attrs
import trio

from actors.testing.host import Crashed
from storage.batch import Batch
from storage.errors import AppendRefused
from storage.event_log import Append, JobQuery, Payload, Recorded
from storage.ids import Seq, StreamName
from storage.testing import MemoryEventLog, MemoryStore

BatchWatcher = Callable[[Batch], None]


@attrs.define
class WatchedStore(MemoryStore):
    """Calls ``before`` and ``after`` around each batch; either may raise Crashed."""

    before: list[BatchWatcher] = attrs.Factory(list)
    after: list[BatchWatcher] = attrs.Factory(list)

    def write(self, batch: Batch) -> None:
        """Take a finished batch."""
        for watch in self.before:
            watch(batch)
        # A slotted attrs class is built twice, so that super() without arguments finds the wrong one.
        MemoryStore.write(self, batch)
        for watch in self.after:
            watch(batch)


class MortalLog(MemoryEventLog):
    """After :meth:`perish` every call raises Crashed, also one that is under way.

    ``slow_until`` holds appends back up to a virtual time; their order stays that of the calls.
    ``refuse`` is asked before each append for an error to refuse it with, None to take it.
    """

    refuse: Callable[[Append], AppendRefused | None] | None = None

    dead: bool = False
    slow_until: float = 0.0
    _slow: trio.Lock | None = None

    def perish(self) -> None:
        """Be gone, with the service."""
        self.dead = True

    def _check(self) -> None:
        if self.dead:
            raise Crashed

    async def append(self, request: Append) -> tuple[Recorded, ...]:
        """Commit and answer the recorded events."""
        self._check()
        self._slow = self._slow or trio.Lock()
        if self._slow.locked() or trio.current_time() < self.slow_until:
            async with self._slow:
                await trio.sleep_until(self.slow_until)
                self._check()
        refused = self.refuse(request) if self.refuse is not None else None
        if refused is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise refused
        committed = await super().append(request)
        self._check()
        return committed

    async def read(
        self, stream: StreamName, *, after_version: int = 0, upto_seq: int | None = None
    ) -> list[Recorded]:
        """Answer the events of one stream in order."""
        self._check()
        found = await super().read(stream, after_version=after_version, upto_seq=upto_seq)
        self._check()
        return found

    async def payload_row(self, digest: str) -> Payload | None:
        """Answer a payload with its salt."""
        self._check()
        found = await super().payload_row(digest)
        self._check()
        return found

    async def jobs(self, query: JobQuery) -> list[tuple[Seq, str]]:
        """Answer the jobs that match."""
        self._check()
        found = await super().jobs(query)
        self._check()
        return found

    async def unfinished(self) -> list[tuple[Seq, str]]:
        """Answer all jobs without a terminal event."""
        self._check()
        found = await super().unfinished()
        self._check()
        return found

    async def job_for_key(self, key: str) -> str | None:
        """Answer the job of a key."""
        self._check()
        found = await super().job_for_key(key)
        self._check()
        return found
