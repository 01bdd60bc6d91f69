"""The process table as /proc shows it, and signals that reach exactly the process that was meant.

The keeper reads it too, so it imports nothing of the product and little else.
"""

import _signal  # type: ignore[import-not-found]  # signal itself costs an enum
import os


class Process:
    """One line of the process table; (pid, start time) names a process for as long as it lives."""

    __slots__ = ("pid", "ppid", "session", "start_time", "state")

    def __init__(self, pid: int, state: str, ppid: int, session: int, start_time: int) -> None:
        self.pid = pid
        self.state = state
        self.ppid = ppid
        self.session = session
        self.start_time = start_time

    @property
    def dead(self) -> bool:
        """Whether it is a zombie: ended, and only waiting to be reaped."""
        return self.state in "ZX"


def read_process(pid: int) -> Process | None:
    """Answer the process of a pid; None when there is none."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        line = os.read(fd, 4096)
    except OSError:
        return None
    finally:
        os.close(fd)
    # The second field is the name in parentheses, and may hold any byte, also a parenthesis.
    fields = line[line.rfind(b")") + 2 :].split()
    return Process(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def process_table() -> dict[int, Process]:
    """Answer all processes that /proc shows now."""
    table = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  pathlib costs more than the keeper's start
        if name.isdigit():
            process = read_process(int(name))
            if process is not None:
                table[process.pid] = process
    return table


def descendants(roots: set[int], table: dict[int, Process]) -> list[Process]:
    """Answer all below the roots (without them) in a process table."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    seen = set(roots)
    waiting = list(roots)
    while waiting:
        for process in children.get(waiting.pop(), ()):
            if process.pid not in seen:
                seen.add(process.pid)
                found.append(process)
                waiting.append(process.pid)
    return found


def send_signal(process: Process, sig: int) -> bool:
    """Signal exactly this process; False when it is gone, also when its pid has a new owner."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = read_process(process.pid)
        if now is None or now.start_time != process.start_time:
            return False
        _signal.pidfd_send_signal(fd, sig)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


def how_ended(status: int) -> str:
    """Answer ``exit N`` or ``signal N`` for a raw wait status."""
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit {os.WEXITSTATUS(status)}"
