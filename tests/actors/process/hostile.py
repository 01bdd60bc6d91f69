"""An agent that does not want to end: ``hostile.py BEHAVIOUR MARK READY stay|leave``.

Every process of it has MARK in its command line, by a fork or by an exec. The file READY appears
once all are there; then the leader stays until it is killed, or leaves with 0. No behaviour forks
more than a thousand times, and each ends by itself after a minute.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

LIFE_S = 60
FORKS = 500
CHAIN = 300
FLOOD_BYTES = 4 * 1024 * 1024
BEHAVIOURS = {}


def behaviour(function):
    BEHAVIOURS[function.__name__] = function
    return function


def stay():
    deadline = time.monotonic() + LIFE_S
    while time.monotonic() < deadline:
        time.sleep(1)
    os._exit(0)


def child(*steps):
    """Start a child that takes the steps and stays; answer once it has taken them."""
    r, w = os.pipe()
    if os.fork() == 0:
        os.close(r)
        for step in steps:
            step()
        with contextlib.suppress(OSError):
            os.write(w, b".")
            os.close(w)
        stay()
    os.close(w)
    os.read(r, 1)
    os.close(r)


def orphan(*steps):
    """Start a grandchild that takes the steps, and end its parent."""
    pid = os.fork()
    if pid == 0:
        child(*steps)
        os._exit(0)
    os.waitpid(pid, 0)


def ignore(*signals):
    for number in signals:
        signal.signal(number, signal.SIG_IGN)


def become(name, environment):
    """Become a sleep under a name of our choice; the mark is the time that it sleeps."""
    if os.fork() == 0:
        os.setsid()
        os.execve("/bin/sleep", [name, sys.argv[2]], environment)


@behaviour
def double_fork():
    orphan(os.setsid, lambda: os.chdir("/"))


@behaviour
def own_sessions():
    for _ in range(3):
        child(os.setsid)


@behaviour
def nohup():
    child(lambda: ignore(signal.SIGHUP))
    orphan(lambda: ignore(signal.SIGHUP))


@behaviour
def ignores_term_and_int():
    ignore(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    child()
    orphan(os.setsid)


@behaviour
def blocks_all_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    child()
    orphan(os.setsid)


@behaviour
def stops_itself():
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            os.kill(os.getpid(), signal.SIGSTOP)
            stay()
    time.sleep(0.02)


@behaviour
def holds_stdout():
    orphan(os.setsid)
    child()


@behaviour
def forks_500():
    for _ in range(FORKS):
        if os.fork() == 0:
            os.setsid()
            stay()


@behaviour
def forks_while_killed():
    def fork_on():
        for _ in range(FORKS):
            if os.fork() == 0:
                time.sleep(0.2)
                os._exit(0)
            time.sleep(0.002)

    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            ignore(signal.SIGTERM, signal.SIGCHLD)
            fork_on()
            stay()


@behaviour
def another_name():
    become("[kworker/0:1]", dict(os.environ))


@behaviour
def clears_environment():
    become("sleep", {})
    if os.fork() == 0:  # Its parent is gone, its session is new, its environment is empty.
        become("sleep", {})
        os._exit(0)
    os.wait()


@behaviour
def closes_files():
    orphan(os.setsid, lambda: os.closerange(0, 1 << 16))


@behaviour
def exits_while_forking():
    if os.fork() == 0:
        os.setsid()
        for _ in range(CHAIN):
            if os.fork():
                os._exit(0)
            time.sleep(0.002)
        stay()


@behaviour
def floods_both_pipes():
    for number in (1, 2):
        if os.fork() == 0:
            written = 0
            while written < FLOOD_BYTES:
                written += os.write(number, b"x" * 65_536)
            stay()


@behaviour
def prints_and_never_exits():
    os.write(1, b"the result\n")
    child()


@behaviour
def kills_its_parent():
    become("sleep", {})
    if os.fork() == 0:
        os.setsid()
        keeper = int(os.environ["HOSTILE_PARENT"])
        while not Path(sys.argv[3]).exists():
            time.sleep(0.001)
        with contextlib.suppress(OSError):
            os.kill(keeper, signal.SIGKILL)
        stay()


def main():
    name, _mark, ready, then = sys.argv[1:]
    os.environ["HOSTILE_PARENT"] = str(os.getppid())
    BEHAVIOURS[name]()
    part = Path(ready).with_suffix(".part")
    part.touch()
    part.rename(ready)
    if then == "leave":
        os._exit(0)
    stay()


if __name__ == "__main__":
    main()
