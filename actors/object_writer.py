"""Writes files of a tree as git objects, and their contents into a tar file; exact bytes.

Nothing of git's filters and line endings takes part: what the agent wrote is what is stored. Files
are opened without following links and without waiting.
"""

import contextlib
import hashlib
import os
import stat
import tarfile
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs

from actors.git_index import git_mode
from actors.tree_walk import WalkStopped

_CHUNK_BYTES: Final = 1 << 20
_READABLE: Final = 0o600


class FileChanged(Exception):
    """A file is not what it was a moment ago; nobody should be left to change it."""


@attrs.frozen
class StoredFile:
    """A file that was stored: its git mode, its object and its size."""

    mode: int
    oid: str
    size: int


class ObjectWriter:
    """Writes loose objects below one folder, uncompressed: they live only until the diff."""

    def __init__(self, objects: Path, object_format: str, stop: threading.Event) -> None:
        self._objects = objects
        self._format = object_format
        self._stop = stop
        self._number = 0

    def store(self, top: Path, path: bytes, info: os.stat_result) -> StoredFile:
        """Store one file or link; raises OSError, FileChanged or WalkStopped."""
        mode = git_mode(info)
        assert mode is not None, "only files and links are stored"
        place = os.path.join(os.fsencode(top), path)  # noqa: PTH118  bytes
        if stat.S_ISLNK(info.st_mode):
            target = os.readlink(place)  # noqa: PTH115  bytes
            return StoredFile(mode, self._write(len(target), iter((target,))), len(target))
        with opened(place) as fd:
            size = os.fstat(fd).st_size
            return StoredFile(mode, self._write(size, chunks(fd, size, self._stop)), size)

    def _write(self, size: int, pieces: Iterator[bytes]) -> str:
        self._number += 1
        header = b"blob %d\0" % size
        digest = hashlib.new(self._format, header)
        packer = zlib.compressobj(0)
        partial = self._objects / f"partial-{self._number}"
        with partial.open("wb") as file:
            file.write(packer.compress(header))
            for piece in pieces:
                digest.update(piece)
                file.write(packer.compress(piece))
            file.write(packer.flush())
        oid = digest.hexdigest()
        folder = self._objects / oid[:2]
        folder.mkdir(exist_ok=True)
        partial.rename(folder / oid[2:])
        return oid


def write_archive(
    target: Path, top: Path, files: Mapping[bytes, os.stat_result], stop: threading.Event
) -> None:
    """Write files and links into a tar file, in order of their names, without times and owners."""
    form, errors = tarfile.GNU_FORMAT, "surrogateescape"
    with tarfile.open(target, "w", format=form, encoding="utf-8", errors=errors) as archive:
        for path, info in sorted(files.items()):
            item = tarfile.TarInfo(os.fsdecode(path))
            place = os.path.join(os.fsencode(top), path)  # noqa: PTH118  bytes
            if stat.S_ISLNK(info.st_mode):
                item.type = tarfile.SYMTYPE
                item.linkname = os.fsdecode(os.readlink(place))  # noqa: PTH115  bytes
                archive.addfile(item)
                continue
            item.mode = 0o755 if info.st_mode & stat.S_IXUSR else 0o644
            with opened(place) as fd, os.fdopen(os.dup(fd), "rb") as file:
                item.size = os.fstat(fd).st_size
                if stop.is_set():
                    raise WalkStopped
                archive.addfile(item, file)


@contextlib.contextmanager
def opened(path: bytes) -> Iterator[int]:
    """Open a regular file for reading, whatever its rights; anything else raises FileChanged."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except PermissionError:
        os.chmod(path, _READABLE, follow_symlinks=True)  # noqa: PTH101  it was a file a moment ago
        fd = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FileChanged(os.fsdecode(path))
        yield fd
    finally:
        os.close(fd)


def chunks(fd: int, size: int, stop: threading.Event) -> Iterator[bytes]:
    """Yield exactly ``size`` bytes of a file; raises FileChanged when there are fewer."""
    left = size
    while left:
        if stop.is_set():
            raise WalkStopped
        data = os.read(fd, min(left, _CHUNK_BYTES))
        if not data:
            raise FileChanged
        left -= len(data)
        yield data
