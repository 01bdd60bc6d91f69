"""What the runtime refuses, as classes with fields; the edge turns each into a reply."""

from storage.ids import JobId


class ActorsError(Exception):
    """Any expected error of the runtime; everything else is a bug."""


class AdmissionError(ActorsError):
    """A job was not accepted, and nothing was written."""

    code = "refused"


class AdmissionPaused(AdmissionError):
    """No job is accepted now; the same request may be accepted after ``retry_after_s`` seconds."""

    code = "paused"
    reason = "no job is accepted now"

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"{self.reason}; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class QueueFull(AdmissionPaused):
    """Running and queued jobs together have reached the queue's depth."""

    code = "queue_full"
    reason = "the queue is full"


class Draining(AdmissionPaused):
    """The service is about to stop."""

    code = "draining"
    reason = "the service is stopping and takes no new jobs"


class DiskLow(AdmissionPaused):
    """The disk of the data folder is below its low-water mark."""

    code = "disk_low"
    reason = "the disk of the data folder is almost full"


class UnknownAgent(AdmissionError):
    """No agent has this name; ``known`` are those that exist."""

    code = "unknown_agent"

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"there is no agent {name!r}; known are {', '.join(known) or 'none'}")
        self.name = name
        self.known = known


class UnknownModel(AdmissionError):
    """The agent takes no model of this name; ``allowed`` are those it takes."""

    code = "unknown_model"

    def __init__(self, name: str, allowed: tuple[str, ...]) -> None:
        super().__init__(f"there is no model {name!r}; allowed are {', '.join(allowed) or 'none'}")
        self.name = name
        self.allowed = allowed


class AgentNotAllowed(AdmissionError):
    """The agent exists, but not for this caller; ``why`` says what would allow it."""

    code = "agent_not_allowed"

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"agent {name!r} is not allowed here: {why}")
        self.name = name
        self.why = why


class KeyReused(AdmissionError):
    """The idempotency key belongs to a job that was submitted with another body."""

    code = "idempotency_key_reused"

    def __init__(self, job_id: JobId) -> None:
        super().__init__(
            f"this Idempotency-Key belongs to job {job_id}, which was submitted with "
            "another body; use a new key"
        )
        self.job_id = job_id


class NotRunning(ActorsError):
    """The job has no running agent that could be spoken to."""

    code = "not_running"

    def __init__(self, job: JobId, status: str) -> None:
        super().__init__(f"job {job} is {status}; only a running agent takes messages")
        self.job = job
        self.status = status


class ContainmentUnavailable(ActorsError):
    """The mechanism that the configuration asks for does not work here; ``why`` says why."""

    code = "containment_unavailable"

    def __init__(self, mode: str, why: str) -> None:
        super().__init__(
            f"[containment] mode = {mode} does not work here: {why}; "
            "set it to auto, or to what watchkeeper doctor says works"
        )
        self.mode = mode
        self.why = why
