"""The owner token of one job's stream: whoever holds it, and nobody else, appends to it."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Literal

import msgspec
import trio

from actors.host import HostFact
from storage import codec
from storage import events as e
from storage.errors import DiskFull, LogBusy
from storage.event_log import Append, EventLog, Fact, Payload, Recorded
from storage.ids import IdSource, JobId, Seq, job_stream
from storage.job_state import JobState, evolve, fold

RETRY_S: Final = 1.0
ERROR_TEXT_BYTES_MAX: Final = 16 * 1024


class CancelledFirst(Exception):
    """A cancel was committed before an event that may not follow one; nothing was written."""


class HandedOver(Exception):
    """The stream has another writer by now; ask again for whoever that is."""


class JobStream:
    """Appends to ``job/ID`` in order and folds what was committed.

    Appends of several tasks (the run, a cancel, the clock of output) queue up in order of
    their call. State is never ahead of the log.
    """

    def __init__(self, log: EventLog, ids: IdSource, state: JobState) -> None:
        self._log = log
        self._ids = ids
        self._lock = trio.Lock()
        self._handed_over = False
        self.state = state
        self.pending_retry = False
        self.giving_up = False

    @property
    def job(self) -> JobId:
        """The job whose stream this is."""
        return self.state.job_id

    async def append(
        self,
        events: Iterable[e.JobEvent | Fact],
        *,
        epoch: int | None = None,
        by: str = "service",
        request_id: str | None = None,
        caused_by: int | None = None,
        unless_cancelled: bool = False,
    ) -> tuple[Recorded, ...]:
        """Commit the events as one batch and fold them; is not cancelled half-way.

        Raises AppendRefused, IllegalTransition and, where asked for, CancelledFirst, with
        nothing written.
        """
        async with self._turn():
            if unless_cancelled and self.state.cancel_requested_by is not None:
                raise CancelledFirst
            committed = await self._append(events, epoch, by, request_id, caused_by)
        return committed

    async def request_cancel(
        self, *, by: str, request_id: str | None
    ) -> Literal["accepted", "terminal"]:
        """Commit a request to cancel, once; answer ``terminal`` when the job is over.

        Raises AppendRefused, and HandedOver when the job has another writer by now.
        """
        async with self._turn():
            if self.state.terminal:
                return "terminal"
            if self.state.cancel_requested_by is None:
                await self._append([e.JobCancelRequested()], None, by, request_id, None)
        return "accepted"

    async def hand_over(self) -> bool:
        """Give the owner token up, unless a cancel was committed; waits for pending appends.

        After True nothing is appended through this object, also by who waited for its turn.
        """
        async with self._turn():
            if self.state.cancel_requested_by is not None:
                return False
            self._handed_over = True
        return True

    async def append_surely(
        self,
        events: Sequence[e.JobEvent | Fact],
        *,
        epoch: int | None = None,
        unless_cancelled: bool = False,
    ) -> tuple[Recorded, ...]:
        """Commit the events, and try again each second while the disk is full or the log busy.

        Once ``giving_up`` is set (the service stops) it raises what it can not mend.
        """
        while True:
            try:
                committed = await self.append(
                    events, epoch=epoch, unless_cancelled=unless_cancelled
                )
            except (DiskFull, LogBusy):
                if self.giving_up:
                    raise
                self.pending_retry = True
                with trio.CancelScope(shield=True):
                    await trio.sleep(RETRY_S)
            else:
                self.pending_retry = False
                return committed

    async def reload(self) -> None:
        """Fold the stream again from the log, after a writer that crashed."""
        state = fold(await self._log.read(job_stream(self.job)))
        assert state is not None, "a stream that was written to is not empty"
        self.state = state

    def text(self, data: bytes) -> Payload:
        """Answer bytes with a fresh salt, ready to go beside an event."""
        return codec.payload(data, self._ids.salt())

    def fact(self, event: e.JobEvent, **texts: bytes | None) -> Fact:
        """Answer an event whose named fields refer to these texts; None leaves a field alone."""
        payloads = {name: self.text(data) for name, data in texts.items() if data is not None}
        refs = {name: payload.ref for name, payload in payloads.items()}
        filled = msgspec.structs.replace(event, **refs) if refs else event
        return Fact(event=filled, payloads=tuple(payloads.values()))

    def of_host(self, fact: HostFact) -> Fact:
        """Answer a fact of the host with its texts salted."""
        filled = self.fact(fact.event, **dict(fact.texts))
        return Fact(event=filled.event, epoch=fact.epoch, n=fact.n, payloads=filled.payloads)

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None, None]:
        """Hold the stream, in the order of the calls, shielded; raises HandedOver."""
        with trio.CancelScope(shield=True):
            try:
                self._lock.acquire_nowait()
            except trio.WouldBlock:
                await self._lock.acquire()
            try:
                if self._handed_over:
                    raise HandedOver
                yield
            finally:
                self._lock.release()

    async def _append(
        self,
        events: Iterable[e.JobEvent | Fact],
        epoch: int | None,
        by: str,
        request_id: str | None,
        caused_by: int | None,
    ) -> tuple[Recorded, ...]:
        run = self.state.epoch if epoch is None else epoch
        facts = tuple(_with_epoch(event, run) for event in events)
        assert facts, "an append has at least one event"
        self._check(facts)
        committed = await self._log.append(
            Append(
                stream=job_stream(self.job),
                expected_version=self.state.version,
                facts=facts,
                by=by,
                request_id=request_id,
                caused_by=caused_by,
            )
        )
        for record in committed:
            self.state = evolve(self.state, record)
        return committed

    def _check(self, facts: Iterable[Fact]) -> None:
        """Fold the facts as if they were committed: an illegal one must not reach the log."""
        state = self.state
        for fact in facts:
            state = evolve(state, _as_if_recorded(state, fact))


def _as_if_recorded(state: JobState, fact: Fact) -> Recorded:
    assert not isinstance(fact.event, e.ServiceEvent), "a job's stream holds a job's events"
    return Recorded(
        seq=Seq(state.seq + 1),
        stream=job_stream(state.job_id),
        version=state.version + 1,
        type=e.event_type(fact.event),
        schema=codec.EVENT_SCHEMA,
        recorded_at_ns=state.created_at_ns,
        session="",
        by="",
        request_id=None,
        caused_by=None,
        epoch=fact.epoch,
        n=fact.n,
        prev_leaf=state.leaf,
        event=fact.event,
        leaf="",
    )


def _with_epoch(event: e.JobEvent | Fact, epoch: int) -> Fact:
    if not isinstance(event, Fact):
        return Fact(event=event, epoch=epoch)
    if event.epoch:
        return event
    return Fact(
        event=event.event,
        epoch=epoch,
        n=event.n,
        payloads=event.payloads,
        artifacts=event.artifacts,
    )
