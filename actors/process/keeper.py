"""The keeper: the one small process that owns every process of a job, and ends them with itself.

It is run as a script, ``python -I -S keeper.py FD MECHANISM``, and imports nothing of the product
and little else: its start is on the way of a job. ``FD`` is one end of a socket pair; both
directions carry frames, four bytes of length (big-endian) and a dictionary in ``marshal`` form.
End of file on it means that the service is gone: everything is killed, then the keeper ends.

To the keeper: ``spawn {id, argv, env, cwd, fds, rlimits}`` (the files come by SCM_RIGHTS with the
frame, ``fds`` names them in order), ``signal {sig}``, ``kill_all {token, deadline_ms}``, ``quit``.
From it: ``hello``, ``spawned {id, pid, start_time}``, ``spawn_failed {id, errno, text}``,
``exited {id, status}`` (the raw wait status), ``empty`` (no process is left) and
``reaped {token, pids, seen, left, ms}``.

A mechanism says how the processes of the job are found and held together. ``subreaper`` works
everywhere; others take its place by the same six methods.
"""

import _signal  # type: ignore[import-not-found]  # signal itself costs an enum
import _socket
import contextlib
import ctypes
import marshal
import os
import select
import sys
import time

PIDS_REPORTED_MAX = 256
FRAME_BYTES_MAX = 32 * 1024 * 1024
_HEADER_BYTES = 4
_FDS_PER_FRAME_MAX = 8
_FD_BYTES = 4
_CLOSE_UPTO = 1 << 16
_SIGNALS_END = 65
_QUIET_MS = 10
_FREEZE_PASSES_MAX = 64
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_EINVAL = 22
_SIGKILL = int(_signal.SIGKILL)
_SIGSTOP = int(_signal.SIGSTOP)
_SIGCONT = int(_signal.SIGCONT)
_STDIO = {"stdin": 0, "stdout": 1, "stderr": 2}


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


class Subreaper:
    """Holds a job together by parenthood: whatever loses its parent becomes ours."""

    name = "subreaper"

    def __init__(self) -> None:
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def enter(self) -> None:
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

    def _send(self, process: Process, sig: int) -> bool:
        if process.ppid != os.getpid():
            return send_signal(process, sig)
        # A child of ours keeps its pid until we reap it, in this thread: no need to look twice.
        try:
            os.kill(process.pid, sig)
        except OSError:
            return False
        return True


MECHANISMS: dict[str, type[Subreaper]] = {"subreaper": Subreaper}


class Keeper:
    """The loop of the keeper: frames of the service in, ends of processes out."""

    def __init__(self, channel: _socket.socket, mechanism: Subreaper) -> None:
        self._channel = channel
        self._mechanism = mechanism
        self._pid = os.getpid()
        self._wake_r, self._wake_w = os.pipe()
        self._children: dict[int, int] = {}
        self._starting: dict[int, tuple[int, int]] = {}
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._busy = False
        self._pids: list[tuple[int, str]] = []
        self._reaped: set[int] = set()
        self._seen = 0

    def run(self) -> None:
        """Serve until the service says quit or is gone; nothing of the job is left then."""
        self._catch_signals()
        self._mechanism.enter()
        self._send({"type": "hello", "pid": self._pid, "mechanism": self._mechanism.name})
        while self._step():
            pass
        self._channel.close()
        while self._end_all(60.0):
            pass

    def _catch_signals(self) -> None:
        for sig in (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP):
            _signal.signal(sig, _signal.SIG_IGN)
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        _signal.signal(_signal.SIGCHLD, lambda _sig, _frame: None)
        _signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)

    def _step(self) -> bool:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._wake_r, select.POLLIN)
        for fd in self._starting:
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        for fd in ready & self._starting.keys():
            self._started(fd)
        if self._wake_r in ready:
            self._reap()
        return self._channel.fileno() not in ready or self._receive()

    def _receive(self) -> bool:
        try:
            data, ancillary, _flags, _address = self._channel.recvmsg(
                65536,
                _socket.CMSG_SPACE(_FDS_PER_FRAME_MAX * _FD_BYTES),
                _socket.MSG_CMSG_CLOEXEC,
            )
        except OSError:
            return False
        for level, kind, raw in ancillary:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                for at in range(0, len(raw) - len(raw) % _FD_BYTES, _FD_BYTES):
                    self._fds.append(int.from_bytes(raw[at : at + _FD_BYTES], sys.byteorder))
        if not data:
            return False
        self._buffer += data
        return self._take_frames()

    def _take_frames(self) -> bool:
        while len(self._buffer) >= _HEADER_BYTES:
            size = int.from_bytes(self._buffer[:_HEADER_BYTES], "big")
            if size > FRAME_BYTES_MAX:
                return False
            if len(self._buffer) < _HEADER_BYTES + size:
                break
            message = marshal.loads(self._buffer[_HEADER_BYTES : _HEADER_BYTES + size])  # noqa: S302  the service's own
            del self._buffer[: _HEADER_BYTES + size]
            if not self._handle(message):
                return False
        return True

    def _handle(self, message: dict[str, object]) -> bool:
        match message:
            case {"type": "spawn"}:
                self._spawn(message)
            case {"type": "signal", "sig": int(sig)}:
                self._mechanism.signal(sig)
            case {"type": "kill_all", "token": int(token), "deadline_ms": int(deadline_ms)}:
                self._kill_all(token, deadline_ms)
            case _:
                return False
        return True

    # --- starting ------------------------------------------------------------------------------

    def _spawn(self, message: dict[str, object]) -> None:
        names = message["fds"]
        number = message["id"]
        assert isinstance(names, tuple), "a frame's own form"
        assert isinstance(number, int), "a frame's own form"
        fds = [self._fds.pop(0) for _ in names]
        try:
            if message["rlimits"]:
                import resource  # noqa: F401  loaded here, since the child must not import
            told_r, told_w = os.pipe()
            try:
                pid = os.fork()
            except OSError:
                os.close(told_r)
                raise
            else:
                if pid == 0:
                    self._become(message, dict(zip(names, fds, strict=True)), told_w)
            finally:
                os.close(told_w)
        except OSError as error:
            self._spawn_failed(number, error.errno or 0, f"fork: {error.strerror}")
        else:
            self._busy = True
            self._children[pid] = number
            self._starting[told_r] = (number, pid)
        finally:
            for fd in fds:
                os.close(fd)

    def _become(self, message: dict[str, object], files: dict[str, int], told: int) -> None:
        try:
            _signal.set_wakeup_fd(-1)
            os.setsid()
            self._mechanism.enter_child(self._pid)
            _default_signals()
            _place_files(files)
            os.closerange(3, told)
            os.closerange(told + 1, _CLOSE_UPTO)
            _execute(message)
        except OSError as error:
            text = f"{error.filename or ''!s}: {error.strerror}"
            os.write(told, marshal.dumps((error.errno or 0, text[-1000:])))
        except ValueError as error:
            os.write(told, marshal.dumps((_EINVAL, str(error)[-1000:])))
        finally:
            os._exit(127)

    def _started(self, fd: int) -> None:
        number, pid = self._starting.pop(fd)
        told = os.read(fd, 65536)
        os.close(fd)
        if told:
            # It will be reaped like any other, but nobody hears of its end.
            self._children.pop(pid, None)
            code, text = marshal.loads(told)  # noqa: S302  written by our own fork
            self._spawn_failed(number, code, text)
            return
        process = read_process(pid)
        start_time = process.start_time if process is not None else 0
        self._send({"type": "spawned", "id": number, "pid": pid, "start_time": start_time})

    def _spawn_failed(self, number: int, code: int, text: str) -> None:
        self._send({"type": "spawn_failed", "id": number, "errno": code, "text": text})

    # --- ending --------------------------------------------------------------------------------

    def _reap(self) -> int:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_r, 4096):
                pass
        count = 0
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                if self._busy:
                    self._busy = False
                    self._send({"type": "empty"})
                return count
            if pid == 0:
                return count
            count += 1
            self._ended(pid, status)

    def _ended(self, pid: int, status: int) -> None:
        for fd, (_, starting) in list(self._starting.items()):
            if starting == pid:
                self._started(fd)
        self._seen += 1
        self._reaped.add(pid)
        if len(self._pids) < PIDS_REPORTED_MAX:
            self._pids.append((pid, how_ended(status)))
        number = self._children.pop(pid, None)
        if number is not None:
            self._send({"type": "exited", "id": number, "status": status})

    def _kill_all(self, token: int, deadline_ms: int) -> None:
        started = time.monotonic()
        left = self._end_all(deadline_ms / 1000)
        report = {
            "type": "reaped",
            "token": token,
            "pids": self._pids,
            "seen": self._seen,
            "left": left,
            "ms": int((time.monotonic() - started) * 1000),
        }
        self._send(report)
        self._pids, self._reaped, self._seen = [], set(), 0

    def _end_all(self, limit_s: float) -> int:
        deadline = time.monotonic() + limit_s
        killed: dict[int, Process] = {}
        self._reap()
        while self._busy and time.monotonic() < deadline:
            # Frozen first: a process that is stopped can not fork away from the kill.
            frozen = self._mechanism.freeze(deadline)
            self._mechanism.kill(frozen)
            killed.update((process.pid, process) for process in frozen)
            while self._wait_for_ends():
                pass
        for pid in killed.keys() - self._reaped:
            # Reaped by its own parent, in the moment before that was killed too.
            self._seen += 1
            if len(self._pids) < PIDS_REPORTED_MAX and read_process(pid) is None:
                self._pids.append((pid, "gone"))
        return len(self._mechanism.members()) if self._busy else 0

    def _wait_for_ends(self) -> bool:
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        poll.poll(_QUIET_MS)
        return self._reap() > 0 and self._busy

    def _send(self, message: dict[str, object]) -> None:
        data = marshal.dumps(message)
        # A service that is gone is seen by the end of file, not here.
        with contextlib.suppress(OSError):
            self._channel.sendall(len(data).to_bytes(_HEADER_BYTES, "big") + data)


def _default_signals() -> None:
    for sig in range(1, _SIGNALS_END):
        # KILL, STOP and the two that the C library keeps refuse.
        with contextlib.suppress(OSError, ValueError):
            _signal.signal(sig, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])


def _place_files(files: dict[str, int]) -> None:
    for name, number in _STDIO.items():
        if name in files:
            os.dup2(files[name], number)
        else:
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, number)


def _execute(message: dict[str, object]) -> None:
    argv, env, cwd, rlimits = (message[name] for name in ("argv", "env", "cwd", "rlimits"))
    assert isinstance(argv, tuple), "a frame's own form"
    assert isinstance(env, dict), "a frame's own form"
    assert isinstance(cwd, bytes), "a frame's own form"
    os.chdir(cwd)
    if isinstance(rlimits, dict) and rlimits:
        import resource

        for which, (soft, hard) in rlimits.items():
            resource.setrlimit(which, (soft, hard))
    failure: OSError | None = None
    for path in _candidates(argv[0], env.get(b"PATH", os.defpath.encode())):
        try:
            os.execve(path, argv, env)  # noqa: S606  no shell is the point
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            # The first file that is there, but will not run, is the one to speak of.
            failure = OSError(error.errno, error.strerror, os.fsdecode(path))
            if not isinstance(error, PermissionError):
                break
    raise failure or FileNotFoundError(2, "No such file or directory", os.fsdecode(argv[0]))


def _candidates(name: bytes, path: bytes) -> list[bytes]:
    if b"/" in name:
        return [name]
    return [(folder or b".") + b"/" + name for folder in path.split(b":")]


def main() -> None:
    """Run the keeper of the channel and the mechanism that the command line names."""
    channel = _socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    with contextlib.suppress(OSError):
        os.setsid()
    os.chdir("/")
    Keeper(channel, MECHANISMS[sys.argv[2]]()).run()


if __name__ == "__main__":
    main()
