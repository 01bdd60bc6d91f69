"""The event log as its users see it: what is appended, what comes back, and the protocol.

Implementations: :class:`storage.sqlite_log.SqliteEventLog` (production) and
:class:`storage.testing.MemoryEventLog`; both pass one contract suite.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Final, Protocol

import attrs

from storage.events import AnyEvent, PayloadRef
from storage.ids import Seq, StreamName

if TYPE_CHECKING:
    # The fold reads recorded events, so that a real import would go round in a circle.
    from storage.projections import ServiceState

EVENTS_PER_PAGE_MAX: Final = 1000


@attrs.frozen(kw_only=True)
class Payload:
    """Bytes that go beside an event, in its transaction; made by :func:`storage.codec.payload`."""

    digest: str
    salt: bytes
    data: bytes

    @property
    def ref(self) -> PayloadRef:
        """What the event says of these bytes."""
        return PayloadRef(digest=self.digest, size=len(self.data))


@attrs.frozen(kw_only=True)
class StoredArtifact:
    """The erasable row of an artifact: salted digest, and the file (plain SHA-256) on disk."""

    digest: str
    salt: bytes
    file: str
    size: int


@attrs.frozen(kw_only=True)
class Fact:
    """One event to be appended, with what the envelope needs beyond the request.

    ``epoch`` is the run (None for events of the service and from before the first run: stored
    as 0). ``n`` is the number of the host's fact, None where there is none. ``payloads`` and
    ``artifacts`` are rows for the same transaction.
    """

    event: AnyEvent
    epoch: int = 0
    n: int | None = None
    payloads: tuple[Payload, ...] = ()
    artifacts: tuple[StoredArtifact, ...] = ()


@attrs.frozen(kw_only=True)
class Append:
    """One request: all facts of one stream, committed together or not at all.

    ``expected_version`` is the version of the stream before this append (0: no event yet).
    """

    stream: StreamName
    expected_version: int
    facts: tuple[Fact, ...]
    by: str = "service"
    request_id: str | None = None
    caused_by: int | None = None


@attrs.frozen(kw_only=True)
class Recorded:
    """A committed event with its envelope; ``version`` counts the stream from 1."""

    seq: Seq
    stream: StreamName
    version: int
    type: str
    schema: int
    recorded_at_ns: int
    session: str
    by: str
    request_id: str | None
    caused_by: int | None
    epoch: int
    n: int | None
    prev_leaf: str | None
    event: AnyEvent
    leaf: str


@attrs.frozen(kw_only=True)
class JobQuery:
    """A filter over the list of jobs; None everywhere is all. Newest first.

    ``before`` is an exclusive upper bound of the seq of ``job.submitted`` (the cursor).
    ``since_ns`` and ``until_ns`` bound the time of submission, inclusive and exclusive.
    ``owner`` empty string means jobs owned by the service.
    """

    status: frozenset[str] | None = None
    agent: str | None = None
    owner: str | None = None
    label: tuple[str, str] | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    before: int | None = None
    limit: int = 50


class EventLog(Protocol):
    """The append-only log. All waiting methods are cancellable except ``append``."""

    @property
    def log_id(self) -> str:
        """The random id that this log was born with."""
        ...

    @property
    def head(self) -> Seq:
        """The seq of the newest committed event; 0 for an empty log."""
        ...

    @property
    def service_state(self) -> "ServiceState":
        """The state of the service at the head, without waiting."""
        ...

    async def append(self, request: Append) -> tuple[Recorded, ...]:
        """Commit and answer the recorded events, in order.

        Waits for the commit and is not cancelled while it waits, so that the caller always
        learns what happened. Raises a subclass of AppendRefused when nothing was written. An
        unknown outcome ends the process and never returns.
        """
        ...

    async def read(
        self, stream: StreamName, *, after_version: int = 0, upto_seq: int | None = None
    ) -> list[Recorded]:
        """Answer the events of one stream in order; an unknown stream is empty."""
        ...

    async def read_all(
        self, *, after: int = 0, upto: int | None = None, limit: int = EVENTS_PER_PAGE_MAX
    ) -> list[Recorded]:
        """Answer events of all streams in commit order, at most ``limit``."""
        ...

    async def payload(self, digest: str) -> bytes | None:
        """Answer the bytes of a payload; None when they were erased."""
        ...

    async def payload_row(self, digest: str) -> Payload | None:
        """Answer a payload with its salt; None when it was erased."""
        ...

    async def payloads(self, digests: Sequence[str]) -> dict[str, bytes]:
        """Answer those of the payloads that are there."""
        ...

    async def artifact(self, digest: str) -> StoredArtifact | None:
        """Answer the row of an artifact; None when it was erased."""
        ...

    async def seq_at(self, at_ns: int) -> Seq:
        """Answer the last seq recorded at or before a time; 0 when there is none."""
        ...

    async def jobs(self, query: JobQuery) -> list[tuple[Seq, str]]:
        """Answer (seq of ``job.submitted``, job id) of the jobs that match, newest first."""
        ...

    async def unfinished(self) -> list[tuple[Seq, str]]:
        """Answer (seq of ``job.submitted``, job id) of all jobs without a terminal event."""
        ...

    async def job_for_key(self, key: str) -> str | None:
        """Answer the job that an idempotency key (digest) belongs to; None when none does."""
        ...

    def follow(
        self, *, stream: StreamName | None = None, after: int = 0
    ) -> AbstractAsyncContextManager[AsyncGenerator[Recorded, None]]:
        """Replay the events after a seq, then follow: no gap, no double, in order.

        ``stream`` None follows the whole log. The generator ends when the log is closed.
        """
        ...

    async def wait_past(self, seq: int, *, stream: StreamName | None = None) -> None:
        """Return when the head (or, with a stream, that stream's last event) is past ``seq``."""
        ...

    async def aclose(self) -> None:
        """Commit what is pending, refuse the rest, release the file. Safe to call twice."""
        ...
