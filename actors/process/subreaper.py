"""Holds a job together by parenthood: the mechanism that works everywhere."""

import _signal  # type: ignore[import-not-found]  # signal itself costs an enum
import ctypes
import os
import time

from actors.process.process_table import Process, descendants, process_table, send_signal

_FREEZE_PASSES_MAX = 64
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGKILL = int(_signal.SIGKILL)
_SIGSTOP = int(_signal.SIGSTOP)
_SIGCONT = int(_signal.SIGCONT)


class Subreaper:
    """Holds a job together by parenthood: whatever loses its parent becomes ours."""

    name = "subreaper"

    def __init__(self) -> None:
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def enter(self, _channel: int) -> None:
        """Prepare the keeper, before any process of the job."""
        if self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")

    def enter_child(self, keeper_pid: int) -> None:
        """Prepare a child, between fork and exec."""
        self._prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != keeper_pid:  # The keeper died before the line above.
            os._exit(127)

    def members(self) -> list[Process]:
        """Answer the processes of the job."""
        return descendants({os.getpid()}, process_table())

    def signal(self, sig: int) -> None:
        """Signal all; the stopped ones are woken, so that they can act on it."""
        for process in self.members():
            if self._send(process, sig) and sig not in (_SIGKILL, _SIGSTOP):
                self._send(process, _SIGCONT)

    def freeze(self, deadline: float) -> list[Process]:
        """Stop all until a look finds no process that was not stopped; answer them."""
        stopped: dict[tuple[int, int], Process] = {}
        for _ in range(_FREEZE_PASSES_MAX):
            fresh = [
                process
                for process in self.members()
                if not process.dead and (process.pid, process.start_time) not in stopped
            ]
            if not fresh:
                break
            for process in fresh:
                stopped[process.pid, process.start_time] = process
                self._send(process, _SIGSTOP)
            if time.monotonic() > deadline:
                break
        return list(stopped.values())

    def kill(self, frozen: list[Process]) -> None:
        """Kill what was frozen."""
        for process in frozen:
            self._send(process, _SIGKILL)

    def take_end(self) -> tuple[int, int, int]:
        """Reap one: answer its pid twice and its raw status; pid 0: none has ended.

        Raises ChildProcessError when there is no process at all.
        """
        pid, status = os.waitpid(-1, os.WNOHANG)
        return pid, pid, status

    def outside(self, pid: int) -> int:
        """Answer the pid itself: there is one numbering."""
        return pid

    def _send(self, process: Process, sig: int) -> bool:
        if process.ppid != os.getpid():
            return send_signal(process, sig)
        # A child of ours keeps its pid until we reap it, in this thread: no need to look twice.
        try:
            os.kill(process.pid, sig)
        except OSError:
            return False
        return True
