"""How a command finds the service on its data folder: one private file."""

import os
from pathlib import Path
from typing import Final

import msgspec

from web.auth import write_private

FILE: Final = "local.json"


class LocalService(msgspec.Struct, frozen=True, kw_only=True):
    """A running service: its address, and a token of this start that counts as local."""

    url: str
    token: str
    pid: int


def announce(data: Path, service: LocalService) -> None:
    """Write the file, with mode 0600."""
    write_private(data / FILE, msgspec.json.encode(service))


def withdraw(data: Path) -> None:
    """Remove the file."""
    (data / FILE).unlink(missing_ok=True)


def find(data: Path) -> LocalService | None:
    """Answer the service that lives on this folder; None when there is none."""
    try:
        service = msgspec.json.decode((data / FILE).read_bytes(), type=LocalService)
    except (OSError, msgspec.DecodeError):
        return None
    return service if alive(service.pid) else None


def alive(pid: int) -> bool:
    """Answer whether a process exists."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
