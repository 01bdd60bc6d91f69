"""Which process is meant: a pid counts only together with its start time and the boot.

The kernel gives a pid to a new process as soon as the old one is reaped; start time (field 22 of
``/proc/PID/stat``, in clock ticks since the boot) and boot id make the name unique.
"""

import functools
from pathlib import Path
from typing import Final

import attrs

from actors.process.keeper import read_process

MARK_JOB: Final = "WATCHKEEPER_JOB_ID"
MARK_EPOCH: Final = "WATCHKEEPER_EPOCH"
MARK_LOG: Final = "WATCHKEEPER_LOG_ID"


@attrs.frozen(kw_only=True)
class ProcessIdentity:
    """The name of one process, for ever."""

    pid: int
    start_time: int
    boot_id: str

    def alive(self, boot_id: str) -> bool:
        """Answer whether it lives in this boot; a zombie does not."""
        if self.boot_id != boot_id:
            return False
        process = read_process(self.pid)
        return process is not None and process.start_time == self.start_time and not process.dead


@attrs.frozen(kw_only=True)
class Mark:
    """What the environment of every process of one run carries, so that it can be found again."""

    job: str
    epoch: int
    log_id: str

    def environment(self) -> dict[str, str]:
        """Answer the variables that a child gets."""
        return {MARK_JOB: self.job, MARK_EPOCH: str(self.epoch), MARK_LOG: self.log_id}

    def marks(self, environment: frozenset[bytes]) -> bool:
        """Answer whether an environment (as ``NAME=value``) is one of this run."""
        return all(
            f"{name}={value}".encode() in environment for name, value in self.environment().items()
        )


@functools.cache
def current_boot_id() -> str:
    """Answer the kernel's random name of this boot; a process lives in one boot only."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def environment_of(pid: int) -> frozenset[bytes]:
    """Answer a process's environment at its exec; empty when it is gone or not ours to read."""
    try:
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return frozenset()
