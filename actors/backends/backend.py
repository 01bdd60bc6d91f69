"""What a backend is: how its program is started, what its lines mean, how its end is judged.

A backend does no I/O. It is told the lines of stdout and the exit, and answers facts and a verdict.
"""

from pathlib import Path
from typing import Final, Protocol

import attrs

from actors.host import RunSpec
from storage import events as e

ERROR_TAIL_BYTES: Final = 8_192
PROMPT_FILE: Final = "watchkeeper-prompt"


@attrs.frozen(kw_only=True)
class Launch:
    """How an agent's program is started.

    ``stdin`` None is ``/dev/null``. ``prompt_file`` true: the prompt is written, mode 0600, into
    the file :data:`PROMPT_FILE` of the job's home folder first.
    """

    argv: tuple[str, ...]
    stdin: bytes | None = None
    prompt_file: bool = False


@attrs.frozen(kw_only=True)
class BackendFact:
    """An event that a line told, with the texts that its payload references stand for."""

    event: e.JobEvent
    texts: tuple[tuple[str, bytes], ...] = ()


@attrs.frozen(kw_only=True)
class Verdict:
    """What the agent's end means; ``cause`` None is success."""

    cause: e.Cause | None = None
    detail: str | None = None
    error: bytes | None = None
    result: bytes | None = None


class Backend(Protocol):
    """One run of one kind of agent."""

    @property
    def reads_lines(self) -> bool:
        """Whether ``line`` wants to hear the lines of stdout."""
        ...

    def launch(self, *, home: Path, tree: Path) -> Launch:
        """Answer how to start the program for a workspace."""
        ...

    def line(self, line: bytes) -> list[BackendFact]:
        """Take one line of stdout, without its end, and answer what it tells."""
        ...

    def verdict(self, exit_status: e.ExitStatus, stdout: bytes, stderr: bytes) -> Verdict:
        """Judge the end, from the exit and the tails of both streams."""
        ...


class PlainBackend:
    """A program whose whole answer is its output and its exit code."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec

    @property
    def reads_lines(self) -> bool:
        """Whether lines are told: they mean nothing here."""
        return False

    def line(self, line: bytes) -> list[BackendFact]:
        """Answer nothing: lines are plain output."""
        return []

    def verdict(self, exit_status: e.ExitStatus, stdout: bytes, stderr: bytes) -> Verdict:
        """Exit code 0 is success with the tail of stdout as the result."""
        return judge_exit(exit_status, result=stdout, stderr=stderr)


def judge_exit(exit_status: e.ExitStatus, *, result: bytes | None, stderr: bytes) -> Verdict:
    """Answer the verdict of an exit alone; the code or the signal goes into the detail."""
    if exit_status.code == 0:
        return Verdict(result=result)
    if exit_status.signal is not None:
        detail = f"signal {exit_status.signal}"
    else:
        detail = f"exit code {exit_status.code}"
    error = stderr[-ERROR_TAIL_BYTES:] or detail.encode()
    return Verdict(cause="agent_exit", detail=detail, error=error, result=result)
