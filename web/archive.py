"""One file out of the tar of changed files, by the exact bytes of its name."""

import posixpath
import tarfile
from pathlib import Path
from typing import Final

import attrs

LINKS_MAX: Final = 8


@attrs.frozen(kw_only=True)
class ArchivedFile:
    """Where the bytes of a file lie inside the archive."""

    offset: int
    size: int


def find(archive: Path, name: bytes) -> ArchivedFile | None:
    """Answer a regular file by its name; None when it is not there.

    A symbolic link is followed inside the archive only: one that leaves the workspace, or whose
    target did not change, is not there.
    """
    with tarfile.open(archive, mode="r:", errors="surrogateescape") as tar:
        members = {_name(member.name): member for member in tar}
    wanted = name
    for _ in range(LINKS_MAX):
        member = members.get(wanted)
        if member is None:
            return None
        if member.isreg():
            return ArchivedFile(offset=member.offset_data, size=member.size)
        if not member.issym():
            return None
        target = _inside(wanted, _bytes(member.linkname))
        if target is None:
            return None
        wanted = target
    return None


def _inside(link: bytes, target: bytes) -> bytes | None:
    """Answer the workspace path that a link means, None when it leaves the workspace."""
    if target.startswith(b"/"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(link), target))
    return None if path == b".." or path.startswith(b"../") else path


def _name(name: str) -> bytes:
    return _bytes(name).removeprefix(b"./")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
