"""Bundles the commits that an agent made, read from its own ``.git`` without trusting it.

The agent's configuration, hooks and refs are never given to git. Its HEAD is read here, as a file;
its objects are lent to a repository that we made, and only when they are plain files.
"""

import os
import re
import stat
from pathlib import Path
from typing import Final

import attrs

_OID: Final = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_BRANCH: Final = re.compile(r"refs/heads/[A-Za-z0-9][A-Za-z0-9._/@+-]*")
_REF_BYTES_MAX: Final = 4_096
_PACKED_BYTES_MAX: Final = 64 * 1024 * 1024
_ENTRIES_MAX: Final = 1_000_000
DEFAULT_BRANCH: Final = "refs/heads/agent"


@attrs.frozen
class AgentHead:
    """Where the agent's HEAD is: a commit, and the branch that it is on (ours when detached)."""

    commit: str
    branch: str


def read_head(git_folder: Path) -> AgentHead | None:
    """Answer the agent's HEAD; None when there is none that is plainly to be read. Blocks."""
    if not _is_folder(git_folder):
        return None  # Deleted, or a file that points somewhere else.
    text = _read(git_folder / "HEAD", _REF_BYTES_MAX)
    if text is None:
        return None
    if _OID.fullmatch(text):
        return AgentHead(text, DEFAULT_BRANCH)
    branch = text.removeprefix("ref:").strip()
    if not _BRANCH.fullmatch(branch) or ".." in branch or branch.endswith((".lock", "/")):
        return None
    commit = _read_ref(git_folder, branch)
    return AgentHead(commit, branch) if commit is not None else None


def lendable_objects(git_folder: Path) -> Path | None:
    """Answer the agent's folder of objects when git can be let at it; blocks.

    It holds only folders and regular files: a fifo would block git, a link or an alternate would
    lead it out of the workspace.
    """
    objects = git_folder / "objects"
    if not _is_folder(git_folder) or not _is_folder(objects):
        return None
    if os.path.lexists(objects / "info" / "alternates"):
        return None
    waiting, count = [objects], 0
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                count += 1
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    waiting.append(Path(entry.path))
                elif not stat.S_ISREG(mode) or count > _ENTRIES_MAX:
                    return None
    return objects


def quoted(path: Path) -> str:
    """Answer a path for GIT_ALTERNATE_OBJECT_DIRECTORIES, where a colon would end it."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _read_ref(git_folder: Path, branch: str) -> str | None:
    loose = _read(git_folder / branch, _REF_BYTES_MAX)
    if loose is not None:
        return loose if _OID.fullmatch(loose) else None
    packed = _read(git_folder / "packed-refs", _PACKED_BYTES_MAX) or ""
    for line in packed.splitlines():
        oid, _, name = line.partition(" ")
        if name == branch and _OID.fullmatch(oid):
            return oid
    return None


def _read(path: Path, bytes_max: int) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return file.read(bytes_max).decode("utf-8", "replace").strip()


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False
