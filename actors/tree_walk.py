"""Looks at a tree that an agent left, without following a link or opening a file.

Everything in it is hostile until shown otherwise: links lead anywhere, a fifo blocks who opens it,
a folder may refuse its own owner. Nobody lives in the tree any more when this runs.
"""

import os
import stat
import threading
from pathlib import Path
from typing import Final

import attrs

ENTRIES_MAX: Final = 2_000_000
_OWNER: Final = 0o700


class WalkStopped(Exception):
    """The walk was told to stop, or the tree has more entries than anyone will read."""


@attrs.define
class Tree:
    """All files below a folder, by path relative to it, as ``lstat`` saw them.

    Folders are not listed. Whatever is called ``.git`` is left out, with all below it;
    ``unstorable`` are files that git refuses to hold (``.GIT``). ``unread`` folders could not
    be looked into. ``links`` are the folders that were named as git links.
    """

    files: dict[bytes, os.stat_result] = attrs.field(factory=dict)
    unstorable: dict[bytes, os.stat_result] = attrs.field(factory=dict)
    links: set[bytes] = attrs.field(factory=set)
    unread: list[bytes] = attrs.field(factory=list)


def walk_tree(root: Path, gitlinks: frozenset[bytes], stop: threading.Event) -> Tree:
    """Answer what is in a folder; an absent one, or anything else in its place, is empty.

    Blocks; raises WalkStopped soon after ``stop`` is set. A folder that its owner may not read is
    given the rights to be read.
    """
    tree = Tree()
    top = os.fsencode(root)
    waiting = [b""] if _is_folder(top) else []
    count = 0
    while waiting:
        folder = waiting.pop()
        for name, info in _look(top, folder, tree):
            count += 1
            if stop.is_set() or count > ENTRIES_MAX:
                raise WalkStopped
            path = folder + b"/" + name if folder else name
            if name == b".git":
                continue
            if not stat.S_ISDIR(info.st_mode):
                kept = tree.unstorable if _refused(path) else tree.files
                kept[path] = info
            elif path in gitlinks:
                tree.links.add(path)
            else:
                waiting.append(path)
    return tree


def _look(top: bytes, folder: bytes, tree: Tree) -> list[tuple[bytes, os.stat_result]]:
    path = os.path.join(top, folder)  # noqa: PTH118  bytes: names need not be text
    for attempt in range(2):
        try:
            with os.scandir(path) as entries:
                return [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
        except PermissionError:
            if attempt or not _give_rights(path):
                break
        except OSError:
            break
    tree.unread.append(folder)
    return []


def _give_rights(path: bytes) -> bool:
    try:
        os.chmod(path, _OWNER)  # noqa: PTH101  bytes
    except OSError:
        return False
    return True


def _is_folder(path: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _refused(path: bytes) -> bool:
    return b".git" in path.lower().split(b"/")
