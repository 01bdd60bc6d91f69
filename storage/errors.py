"""What can go wrong in the log, as classes with fields."""


class StorageError(Exception):
    """Any expected error of the log or of what stands beside it."""


class AppendRefused(StorageError):
    """An append of which nothing was written; only this request failed, not its batch."""

    code = "refused"


class VersionConflict(AppendRefused):
    """The stream is not at the version that the writer expected: a bug of the writer."""

    code = "version_conflict"

    def __init__(self, stream: str, expected: int, actual: int) -> None:
        super().__init__(f"stream {stream} is at version {actual}, the writer expected {expected}")
        self.stream = stream
        self.expected = expected
        self.actual = actual


class DuplicateKey(AppendRefused):
    """The idempotency key belongs to a job that is already in the log."""

    code = "duplicate"

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the idempotency key belongs to job {job_id}")
        self.job_id = job_id


class LogBusy(AppendRefused):
    """The writer's inbox is full; try again when some appends have been committed."""

    code = "busy"

    def __init__(self, pending_max: int) -> None:
        super().__init__(f"the log has {pending_max} appends pending; try again")
        self.pending_max = pending_max


class LogClosed(AppendRefused):
    """The log is closed and takes no more appends."""

    code = "closed"

    def __init__(self) -> None:
        super().__init__("the log is closed")


class LogReadOnly(AppendRefused):
    """The log was opened read-only: it is damaged, or the disk was full at start."""

    code = "read_only"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the log is read-only: {reason}")
        self.reason = reason


class DiskFull(AppendRefused):
    """SQLite found no room; the transaction was rolled back, nothing was written."""

    code = "disk_full"

    def __init__(self) -> None:
        super().__init__("no space left for the log; free some and try again")


class OutcomeUnknown(StorageError):
    """COMMIT or fsync failed: whether the batch is durable is not known.

    The process must end at once; its next start reads what is true.
    """


class IllegalTransition(StorageError):
    """An event that may not follow the state of its job: a bug, or an edited log."""

    def __init__(self, stream: str, state: str, event: str) -> None:
        super().__init__(f"{event} may not follow state {state} in stream {stream}")
        self.stream = stream
        self.state = state
        self.event = event


class LogDamaged(StorageError):
    """The log contradicts itself at a known place."""

    def __init__(self, seq: int, reason: str) -> None:
        super().__init__(f"the log is damaged at seq {seq}: {reason}")
        self.seq = seq
        self.reason = reason


class LogTooNew(StorageError):
    """The log was written by a newer version of the schema than this code knows."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(
            f"the log has schema {found}, this version knows up to {known}; "
            "install the version that wrote it, or a newer one"
        )
        self.found = found
        self.known = known


class FolderLocked(StorageError):
    """Another process holds the data folder."""

    def __init__(self, folder: str, pid: int | None) -> None:
        holder = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"{holder} holds the data folder {folder}; stop it, or use another --data")
        self.folder = folder
        self.pid = pid


class EventUnreadable(StorageError):
    """An event's body is not what its type says it is."""

    def __init__(self, seq: int, reason: str) -> None:
        super().__init__(f"event {seq} can not be read: {reason}")
        self.seq = seq
        self.reason = reason


class PointNotInLog(StorageError):
    """A point in time was asked for that is past the head of the log."""

    def __init__(self, asked: int, head: int) -> None:
        super().__init__(f"seq {asked} is past the head of the log, which is {head}")
        self.asked = asked
        self.head = head


class JobUnknown(StorageError):
    """No such job, or none at the point in time that was asked for."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id}")
        self.job_id = job_id


class ArtifactUnavailable(StorageError):
    """An artifact that was erased, or whose file is gone."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"artifact {name} is not available: {reason}")
        self.name = name
        self.reason = reason
