"""What runs as an agent, one file for each kind of program."""

from collections.abc import Callable
from typing import Final

from actors.backends.backend import Backend, BackendFact, Launch, Verdict
from actors.backends.command import CommandBackend
from actors.backends.echo import EchoBackend
from actors.backends.shell import ShellBackend
from actors.host import RunSpec

BACKENDS: Final[dict[str, Callable[[RunSpec], Backend]]] = {
    "command": CommandBackend,
    "echo": EchoBackend,
    "shell": ShellBackend,
}

__all__ = ["BACKENDS", "Backend", "BackendFact", "Launch", "Verdict"]
