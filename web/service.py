"""What the web room needs of the runtime: one protocol, and the values that cross it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from actors.limits import Limits
from actors.messages import CancelAnswer, SubmitRequest, Submitted, Why
from storage.event_log import EventLog
from storage.ids import JobId
from storage.projections import ServiceState

__all__ = [
    "AgentNames",
    "ArtifactFiles",
    "CancelAnswer",
    "HostInfo",
    "RuntimeApi",
    "ServiceLog",
    "SubmitRequest",
    "Submitted",
    "Why",
]


class ServiceLog(EventLog, Protocol):
    """The log, with the folds over all its streams."""

    @property
    def service_state(self) -> ServiceState:
        """The newest committed fold of the service; no I/O."""
        ...

    async def read_service_state(self, at_seq: int) -> ServiceState:
        """Answer the service's state as it was at a seq."""
        ...


class ArtifactFiles(Protocol):
    """Where the files of artifacts lie."""

    def path(self, file: str, /) -> Path:
        """Answer the path of an artifact's file, by its plain SHA-256."""
        ...


class HostInfo(Protocol):
    """What the host says of itself; for people, not part of any fold."""

    @property
    def containment(self) -> str:
        """The mechanism in force."""
        ...

    @property
    def confined(self) -> bool:
        """Whether jobs see only what is theirs."""
        ...

    @property
    def containment_why_not(self) -> Mapping[str, str]:
        """Why each stronger mechanism is not in force."""
        ...

    @property
    def disk_free_bytes(self) -> int:
        """Free bytes of the data folder's disk."""
        ...

    @property
    def inodes_free(self) -> int:
        """Free inodes of the data folder's disk."""
        ...

    @property
    def degraded(self) -> list[str]:
        """What is not as it should be, one sentence each; empty when all is well."""
        ...

    @property
    def log_pending(self) -> int:
        """Appends that wait for their commit."""
        ...


class AgentNames(Protocol):
    """The agents that are defined."""

    def names(self) -> list[str]:
        """Answer the names, sorted."""
        ...


class RuntimeApi(Protocol):
    """The runtime as the web room uses it."""

    @property
    def log(self) -> ServiceLog:
        """The event log; reads go straight to it."""
        ...

    @property
    def artifacts(self) -> ArtifactFiles:
        """The files of artifacts."""
        ...

    @property
    def limits(self) -> Limits:
        """The limits in force."""
        ...

    @property
    def agents(self) -> AgentNames:
        """The agents that are defined."""
        ...

    @property
    def ready(self) -> bool:
        """Whether recovery is over and jobs are admitted."""
        ...

    @property
    def draining(self) -> bool:
        """Whether the service is about to stop."""
        ...

    async def submit(self, request: SubmitRequest) -> Submitted:
        """Accept a job; returns after the commit. Raises AdmissionError."""
        ...

    async def cancel(self, job: JobId, *, by: str, request_id: str | None) -> CancelAnswer:
        """Ask for a job to end; raises JobUnknown."""
        ...

    async def message(self, job: JobId, text: str, *, by: str, request_id: str | None) -> None:
        """Say something to a running agent; raises NotRunning, JobUnknown."""
        ...

    async def why(self, job: JobId) -> Why:
        """Say why a job is in its state; raises JobUnknown."""
        ...

    def host_info(self) -> HostInfo:
        """Say how the host is."""
        ...

    async def drain(self) -> None:
        """Stop admitting, wait for running jobs, end what is left."""
        ...
