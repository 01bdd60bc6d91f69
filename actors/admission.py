"""Who starts next: the order of the queue as a pure value and its functions."""

import bisect
from collections.abc import Iterator

import attrs

from storage.ids import JobId


@attrs.frozen(slots=True, order=True)
class QueuedJob:
    """A job that waits; ordered by (higher priority first, lower seq of ``job.submitted``)."""

    rank: int
    submitted_seq: int
    job: JobId = attrs.field(order=False)
    version: int = attrs.field(order=False)
    owned: bool = attrs.field(order=False, default=False)

    @classmethod
    def of(
        cls, job: JobId, *, priority: int, submitted_seq: int, version: int, owned: bool = False
    ) -> "QueuedJob":
        """Answer the entry of a job; ``version`` is that of its stream."""
        return cls(-priority, submitted_seq, job, version, owned)


class Queue:
    """The waiting jobs in their order; every call is without waiting."""

    def __init__(self) -> None:
        self._order: list[QueuedJob] = []
        self._by_job: dict[JobId, QueuedJob] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[QueuedJob]:
        return iter(self._order)

    def __contains__(self, job: object) -> bool:
        return job in self._by_job

    def add(self, entry: QueuedJob) -> None:
        """Add a job that is not in the queue yet, at its place."""
        assert entry.job not in self._by_job, "a job waits once"
        bisect.insort(self._order, entry)
        self._by_job[entry.job] = entry

    def take_first(self) -> QueuedJob | None:
        """Remove and answer the job that starts next; None when nobody waits."""
        if not self._order:
            return None
        entry = self._order.pop(0)
        del self._by_job[entry.job]
        return entry

    def take(self, job: JobId) -> QueuedJob | None:
        """Remove and answer a job, wherever it stands; None when it does not wait."""
        entry = self._by_job.pop(job, None)
        if entry is not None:
            index = bisect.bisect_left(self._order, entry)
            assert self._order[index].job == job, "the order and the index agree"
            del self._order[index]
        return entry

    def position(self, job: JobId) -> int | None:
        """Answer how many jobs start before this one; None when it does not wait."""
        entry = self._by_job.get(job)
        return None if entry is None else bisect.bisect_left(self._order, entry)
