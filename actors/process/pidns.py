"""Holds a job together by a pid namespace: when its pid 1 ends, the kernel kills all the rest.

The process that the service started (A) stays outside: it is the recorded keeper, and does no more
than watch. Its child (B) is pid 1 of the new namespace, serves the channel, and is the parent of
everything that loses its own. A holds B by its parent-death signal; A is single-threaded, and
that signal follows the thread that forked. B reads the channel, so that a service that dies while
A is stopped is noticed as well; A looks at it for the hang-up alone.
"""

import _signal  # type: ignore[import-not-found]  # signal itself costs an enum
import contextlib
import ctypes
import os
import select

from actors.process.process_table import Process, process_table

_CLONE_NEWNS = 0x00020000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_REC = 1 << 14
_MS_SLAVE = 1 << 19
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_EXIT_OWNER_GONE = 0
_SIGKILL = int(_signal.SIGKILL)
_SIGSTOP = int(_signal.SIGSTOP)
_SIGCONT = int(_signal.SIGCONT)


class PidNamespace:
    """The keeper's loop runs as pid 1 of a namespace that holds the job and nothing else."""

    name = "pidns"

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._outer_proc = -1

    def enter(self, channel: int) -> None:
        """Go on as pid 1 of a new namespace; raises OSError where the system forbids it.

        The caller's own process stays outside and never returns from here.
        """
        self._unshare()
        self._outer_proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        life_r, life_w = os.pipe()
        inner = os.fork()
        if inner:
            os.close(life_r)
            _watch(channel, inner)
        os.close(life_w)
        self._check(self._libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
        life = select.poll()
        life.register(life_r, 0)
        if life.poll(0):  # The outer process died before the signal was asked for.
            os._exit(_EXIT_OWNER_GONE)
        os.close(life_r)
        self._mount_proc()

    def enter_child(self, keeper_pid: int) -> None:
        """Do nothing: a child can not outlive its pid 1."""

    def members(self) -> list[Process]:
        """Answer the processes of the job, by their numbers inside."""
        return [process for process in process_table().values() if process.pid != os.getpid()]

    def signal(self, sig: int) -> None:
        """Signal all; the stopped ones are woken, so that they can act on it."""
        # -1 is every process of the namespace but its pid 1; the kernel forks none meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, sig)
            if sig not in (_SIGKILL, _SIGSTOP):
                os.kill(-1, _SIGCONT)

    def freeze(self, _deadline: float) -> list[Process]:
        """Answer nothing: there is no fork that escapes a signal to all."""
        return []

    def kill(self, _frozen: list[Process]) -> None:
        """Kill all."""
        self.signal(_SIGKILL)

    def take_end(self) -> tuple[int, int, int]:
        """Reap one: answer its pid, its number outside, its raw status; pid 0: none has ended.

        Raises ChildProcessError when there is no process at all.
        """
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None or found.si_pid == 0:
            return 0, 0, 0
        outside = self.outside(found.si_pid)
        pid, status = os.waitpid(found.si_pid, 0)
        return pid, outside, status

    def outside(self, pid: int) -> int:
        """Answer the number outside of a process that was not reaped; 0: it can not be told."""
        # The old /proc shows a pidfd's process by the numbers of its own namespace.
        try:
            pidfd = os.pidfd_open(pid)
            try:
                path = f"self/fdinfo/{pidfd}"
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._outer_proc)
                try:
                    text = os.read(fd, 4096)
                finally:
                    os.close(fd)
            finally:
                os.close(pidfd)
        except OSError:
            return 0
        for line in text.split(b"\n"):
            if line.startswith(b"Pid:"):
                return max(0, int(line[4:]))
        return 0

    def _unshare(self) -> None:
        uid, gid = os.geteuid(), os.getegid()
        flags = _CLONE_NEWPID | _CLONE_NEWNS | _CLONE_NEWIPC
        if uid == 0:
            self._check(self._libc.unshare(flags), "unshare")
        else:
            self._check(self._libc.unshare(flags | _CLONE_NEWUSER), "unshare with a user namespace")
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{uid} {uid} 1")
            _write("/proc/self/gid_map", f"{gid} {gid} 1")
        # After the maps: the files above belong to root once we can not be dumped.
        self._check(self._libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")

    def _mount_proc(self) -> None:
        # Slaves: nothing of ours gets out, and a disk that the host mounts or unmounts while this
        # keeper waits for its job is seen here too (a private copy would hold the disk busy).
        mount = self._libc.mount
        self._check(mount(None, b"/", None, _MS_REC | _MS_SLAVE, None), "mount --make-rslave /")
        flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        self._check(mount(b"proc", b"/proc", b"proc", flags, None), "mount of a new /proc")

    def _check(self, result: int, what: str) -> None:
        if result != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{what}: {os.strerror(code)}")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"{path}: {error.strerror}") from error
    finally:
        os.close(fd)


def _watch(channel: int, inner: int) -> None:
    """Wait for the end of the inner process, or bring it about when the channel hangs up."""
    pidfd = os.pidfd_open(inner)
    poll = select.poll()
    poll.register(channel, 0)
    poll.register(pidfd, select.POLLIN)
    ready = {fd for fd, _ in poll.poll()}
    if pidfd not in ready:
        # Its end is the end of all: the kernel lets nobody wait for it before that.
        _signal.pidfd_send_signal(pidfd, _SIGKILL)
    _, status = os.waitpid(inner, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
