"""The data folder, held by one process at a time."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs

from storage.errors import FolderLocked

LOCK_ATTEMPTS: Final = 5
LOCK_PAUSE_S: Final = 0.02


@attrs.frozen
class DataFolder:
    """The places in a data folder; made by :meth:`lock`, or by a reader that takes no lock."""

    path: Path

    @property
    def log(self) -> Path:
        """The file of the event log."""
        return self.path / "log.db"

    @property
    def artifacts(self) -> Path:
        """The folder of artifact files."""
        return self.path / "artifacts"

    @property
    def output(self) -> Path:
        """The folder where the raw output of running jobs grows."""
        return self.path / "output"

    @property
    def ballast(self) -> Path:
        """The file that is given up when the disk is full."""
        return self.path / "ballast"

    @property
    def lock_file(self) -> Path:
        """The file whose lock is the folder's; the holder's pid is in it."""
        return self.path / "lock"

    @classmethod
    @contextmanager
    def lock(cls, path: Path) -> Iterator["DataFolder"]:
        """Hold the folder, made with mode 0700 if missing, for the block.

        The lock ends with the process, however that ends, and children that were exec'd do not
        have it. Raises FolderLocked with the holder's pid, within a tenth of a second.
        """
        folder = cls(path)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(folder.lock_file, flags, 0o600)
        try:
            if not _locked(descriptor):
                raise FolderLocked(str(path), _pid(folder.lock_file))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
            yield folder
            os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def holder(self) -> int | None:
        """Answer the pid of the process that holds the folder; None when nobody does.

        A holder that has not written its pid yet, or any that can not be told, is 0.
        """
        try:
            descriptor = os.open(self.lock_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _pid(self.lock_file) or 0
        finally:
            os.close(descriptor)
        return None


def _locked(descriptor: int) -> bool:
    # Somebody who asks for the holder has the lock for an instant: that is not a holder.
    for attempt in range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt + 1 < LOCK_ATTEMPTS:
                time.sleep(LOCK_PAUSE_S)
        else:
            return True
    return False


def _pid(file: Path) -> int | None:
    text = file.read_text(errors="replace").strip()
    return int(text) if text.isascii() and text.isdigit() else None
