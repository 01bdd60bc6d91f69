"""Decides what changed between a checkout and the tree that an agent left; pure functions."""

import base64
import os
import stat
from collections.abc import Mapping
from typing import Final, Literal

import attrs
import msgspec

from actors.git_index import GITLINK, SYMLINK, IndexEntry, git_mode
from actors.object_writer import StoredFile
from actors.tree_walk import Tree

Status = Literal["A", "M", "D", "T"]
Kind = Literal["file", "symlink", "gitlink", "dir"]
IGNORED_LISTED_MAX: Final = 1_000
_TYPE_MASK: Final = 0o170000


@attrs.frozen(kw_only=True)
class Change:
    """One changed path. ``old`` None: it was not tracked; ``stored`` None: it holds no content.

    ``mode`` is git's, or that of the file system where git has none (a fifo); None: gone.
    """

    path: bytes
    status: Status
    old: IndexEntry | None = None
    stored: StoredFile | None = None
    mode: int | None = None
    size: int = 0
    ignored: bool = False
    kind: Kind = "file"

    @property
    def in_patch(self) -> bool:
        """Whether the patch has this change: content that is there now, or that was tracked."""
        return self.stored is not None or (self.old is not None and not self.ignored)

    def index_line(self) -> bytes:
        """Answer the line that ``git update-index -z --index-info`` takes for it."""
        if self.stored is None:
            assert self.old is not None, "only a tracked path can be taken out"
            return b"0 %s\t%s\0" % (b"0" * len(self.old.oid), self.path)
        return b"%06o %s\t%s\0" % (self.stored.mode, self.stored.oid.encode(), self.path)


@attrs.frozen(kw_only=True)
class Found:
    """What a look at the tree says before any file is read.

    ``to_read`` may have changed (those in ``untracked`` are new); ``deleted`` are gone;
    ``special`` are there, but hold nothing that can be stored.
    """

    to_read: Mapping[bytes, os.stat_result]
    untracked: frozenset[bytes]
    deleted: frozenset[bytes]
    special: Mapping[bytes, os.stat_result]

    def changes(
        self,
        index: Mapping[bytes, IndexEntry],
        stored: Mapping[bytes, StoredFile],
        *,
        ignored: frozenset[bytes],
        unread: set[bytes],
    ) -> list[Change]:
        """Answer all changes in order of their paths, now that the files were read."""
        changes = [_content(path, index.get(path), file) for path, file in stored.items()]
        changes += [_gone(path, index[path]) for path in self.deleted]
        without = {path: self.to_read[path] for path in unread} | dict(self.special)
        changes += [_without_content(path, index.get(path), i) for path, i in without.items()]
        changes += _ignored(ignored & self.to_read.keys(), self.to_read)
        return sorted((c for c in changes if c is not None), key=lambda change: change.path)


def changed_files(
    index: Mapping[bytes, IndexEntry], tree: Tree, *, trusted_before_ns: int
) -> Found:
    """Compare a tree with the index of its checkout by stat data alone."""
    to_read = {}
    special = dict(tree.unstorable)
    for path, info in tree.files.items():
        entry = index.get(path)
        if git_mode(info) is None:
            special[path] = info
        elif entry is None or not entry.unchanged(info, trusted_before_ns=trusted_before_ns):
            to_read[path] = info
    there = tree.files.keys() | tree.links
    return Found(
        to_read=to_read,
        untracked=frozenset(to_read.keys() - index.keys()),
        deleted=frozenset(index.keys() - there),
        special=special,
    )


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the artifact ``files``; modes are octal texts, null where there is no file."""

    path: str
    path_encoding: Literal["utf-8", "base64"]
    status: Status
    mode: str | None
    old_mode: str | None
    size: int
    kind: Kind
    stored: bool
    ignored: bool = False


def files_json(changes: list[Change]) -> bytes:
    """Answer the artifact ``files``: exact names, in base 64 where they are not UTF-8."""
    return msgspec.json.encode([_entry(change) for change in changes])


def _entry(change: Change) -> FileEntry:
    try:
        path, encoding = change.path.decode(), "utf-8"
    except UnicodeDecodeError:
        path, encoding = base64.b64encode(change.path).decode(), "base64"
    return FileEntry(
        path=path,
        path_encoding="utf-8" if encoding == "utf-8" else "base64",
        status=change.status,
        mode=f"{change.mode:06o}" if change.mode is not None else None,
        old_mode=f"{change.old.mode:06o}" if change.old is not None else None,
        size=change.size,
        kind=change.kind,
        stored=change.stored is not None,
        ignored=change.ignored,
    )


def _content(path: bytes, old: IndexEntry | None, new: StoredFile) -> Change | None:
    if old is not None and (old.mode, old.oid) == (new.mode, new.oid):
        return None  # Only touched.
    status: Status = "A"
    if old is not None:
        status = "M" if old.mode & _TYPE_MASK == new.mode & _TYPE_MASK else "T"
    return Change(
        path=path,
        status=status,
        old=old,
        stored=new,
        mode=new.mode,
        size=new.size,
        kind=_kind(new.mode),
    )


def _gone(path: bytes, old: IndexEntry) -> Change:
    return Change(path=path, status="D", old=old, kind=_kind(old.mode))


def _without_content(path: bytes, old: IndexEntry | None, info: os.stat_result) -> Change:
    return Change(
        path=path,
        status="A" if old is None else "T",
        old=old,
        mode=git_mode(info) or info.st_mode,
        size=info.st_size,
        kind="symlink" if stat.S_ISLNK(info.st_mode) else "file",
    )


def _ignored(
    paths: frozenset[bytes] | set[bytes], infos: Mapping[bytes, os.stat_result]
) -> list[Change]:
    if len(paths) > IGNORED_LISTED_MAX:
        return _ignored_folders(paths, infos)
    return [attrs.evolve(_without_content(path, None, infos[path]), ignored=True) for path in paths]


def _ignored_folders(
    paths: frozenset[bytes] | set[bytes], infos: Mapping[bytes, os.stat_result]
) -> list[Change]:
    # A folder of packages has a hundred thousand files: only the first level is worth a line.
    sizes: dict[bytes, int] = {}
    for path in paths:
        top = path.split(b"/")[0]
        sizes[top] = sizes.get(top, 0) + infos[path].st_size
    return [
        Change(
            path=top,
            status="A",
            size=size,
            ignored=True,
            mode=stat.S_IFDIR if top not in paths else infos[top].st_mode,
            kind="dir" if top not in paths else "file",
        )
        for top, size in sizes.items()
    ]


def _kind(mode: int) -> Kind:
    if mode == GITLINK:
        return "gitlink"
    return "symlink" if mode == SYMLINK else "file"
