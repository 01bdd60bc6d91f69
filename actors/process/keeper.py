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

``failed {text}`` instead of ``hello`` says why the mechanism does not work here.

A mechanism says how the processes of the job are found and held together: ``subreaper`` works
everywhere, ``pidns`` where namespaces may be made. Pids in frames are the numbers that the service
sees, 0 where that can not be told. ``python -I -S keeper.py probe MECHANISM`` tries a mechanism in
the working directory and writes ``ok``, or why it does not work.
"""

import _signal  # type: ignore[import-not-found]  # signal itself costs an enum
import _socket
import contextlib
import marshal
import os
import select
import sys
import time

if __name__ == "__main__":
    # At the end: nothing of the standard library is looked for among the packages.
    sys.path.append(__file__.rsplit("/", 3)[0])

from actors.process.pidns import PidNamespace
from actors.process.process_table import Process, how_ended, read_process
from actors.process.subreaper import Subreaper

PIDS_REPORTED_MAX = 256
FRAME_BYTES_MAX = 32 * 1024 * 1024
_HEADER_BYTES = 4
_FDS_PER_FRAME_MAX = 8
_FD_BYTES = 4
_CLOSE_UPTO = 1 << 16
_SIGNALS_END = 65
_QUIET_MS = 10
_ESRCH = 3
_EACCES = 13
_EINVAL = 22
_STDIO = {"stdin": 0, "stdout": 1, "stderr": 2}

Mechanism = Subreaper | PidNamespace
MECHANISMS: dict[str, type[Subreaper] | type[PidNamespace]] = {
    "pidns": PidNamespace,
    "subreaper": Subreaper,
}
"""The strongest first."""


class Keeper:
    """The loop of the keeper: frames of the service in, ends of processes out."""

    def __init__(self, channel: _socket.socket, mechanism: Mechanism) -> None:
        self._channel = channel
        self._mechanism = mechanism
        self._pid = os.getpid()
        self._wake_r, self._wake_w = os.pipe()
        self._children: dict[int, int] = {}
        self._starting: dict[int, tuple[int, int, int]] = {}
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._busy = False
        self._pids: list[tuple[int, str]] = []
        self._reaped: set[int] = set()
        self._seen = 0

    def run(self) -> None:
        """Serve until the service says quit or is gone; nothing of the job is left then."""
        self._catch_signals()
        recorded = self._pid
        try:
            self._mechanism.enter(self._channel.fileno())
        except OSError as error:
            self._send({"type": "failed", "text": error.strerror or str(error)})
            return
        self._pid = os.getpid()
        self._send({"type": "hello", "pid": recorded, "mechanism": self._mechanism.name})
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
            self._starting[told_r] = (number, pid, self._mechanism.outside(pid))
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
        number, pid, outside = self._starting.pop(fd)
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
        self._send({"type": "spawned", "id": number, "pid": outside, "start_time": start_time})

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
                pid, outside, status = self._mechanism.take_end()
            except ChildProcessError:
                if self._busy:
                    self._busy = False
                    self._send({"type": "empty"})
                return count
            if pid == 0:
                return count
            count += 1
            self._ended(pid, outside, status)

    def _ended(self, pid: int, outside: int, status: int) -> None:
        for fd, (_, starting, _) in list(self._starting.items()):
            if starting == pid:
                self._started(fd)
        self._seen += 1
        self._reaped.add(pid)
        if len(self._pids) < PIDS_REPORTED_MAX:
            self._pids.append((outside, how_ended(status)))
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


def _probe(mechanism: Mechanism) -> None:
    """Write ``ok`` once a child was started, killed and reaped under the mechanism."""
    ours, theirs = _socket.socketpair()  # Both stay open: nobody hangs up on a probe.
    try:
        mechanism.enter(theirs.fileno())
        _try_out(mechanism)
    except OSError as error:
        answer = error.strerror or str(error)
    else:
        answer = "ok"
    os.write(1, answer.encode())
    ours.close()


def _try_out(mechanism: Mechanism) -> None:
    if not os.access(".", os.R_OK | os.W_OK | os.X_OK):
        raise OSError(_EACCES, "the data folder can not be written from inside")
    pid = os.fork()
    if pid == 0:
        while True:
            time.sleep(60)
    if mechanism.outside(pid) == 0:
        raise OSError(_ESRCH, "the numbers outside of processes can not be told")
    mechanism.kill(mechanism.freeze(time.monotonic() + 1))
    os.waitpid(pid, 0)


def main() -> None:
    """Run the keeper of the channel and the mechanism that the command line names."""
    if sys.argv[1] == "probe":
        _probe(MECHANISMS[sys.argv[2]]())
        return
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
