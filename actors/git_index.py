"""Reads git's index file: what was checked out, and how each file looked then.

Only the format that our own checkouts write is read (versions 2 and 3, no split index). No agent
ever writes the copy that this is used on.
"""

import os
import stat
import struct
from collections.abc import Mapping
from typing import Final

import attrs

GITLINK: Final = 0o160000
SYMLINK: Final = 0o120000
_HEADER: Final = struct.Struct(">4sII")
_STAT: Final = struct.Struct(">10I")
_FLAGS: Final = struct.Struct(">H")
_EXTENDED: Final = 0x4000
_VERSIONS: Final = (2, 3)
_WORD: Final = 0xFFFF_FFFF
_NS: Final = 1_000_000_000


class IndexUnreadable(Exception):
    """The file is no index of the form that our checkouts write."""


@attrs.frozen(slots=True)
class IndexEntry:
    """One tracked path: its git mode and object, and the file's stat data at the checkout."""

    mode: int
    oid: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    uid: int
    gid: int

    def unchanged(self, now: os.stat_result, *, trusted_before_ns: int) -> bool:
        """Answer whether a file is surely still the one that was checked out.

        ``trusted_before_ns`` is the time of the index itself: a file as young as that may have
        been written again in the same tick of the clock, and has to be read.
        """
        return (
            self.mtime_ns < trusted_before_ns
            and now.st_mtime_ns == self.mtime_ns
            and now.st_ctime_ns == self.ctime_ns
            and now.st_size & _WORD == self.size
            and now.st_ino & _WORD == self.inode
            and (now.st_uid & _WORD, now.st_gid & _WORD) == (self.uid, self.gid)
            and git_mode(now) == self.mode
        )


def git_mode(now: os.stat_result) -> int | None:
    """Answer the mode that git gives a file; None for what it can not hold (fifos, devices)."""
    if stat.S_ISLNK(now.st_mode):
        return SYMLINK
    if stat.S_ISREG(now.st_mode):
        return 0o100755 if now.st_mode & stat.S_IXUSR else 0o100644
    return None


def parse_index(data: bytes, *, oid_bytes: int = 20) -> Mapping[bytes, IndexEntry]:
    """Answer the entries of an index by path, in git's order; raises IndexUnreadable."""
    try:
        return _parse(data, oid_bytes)
    except (struct.error, ValueError) as error:
        raise IndexUnreadable(str(error)) from error


def _parse(data: bytes, oid_bytes: int) -> Mapping[bytes, IndexEntry]:
    magic, version, count = _HEADER.unpack_from(data)
    if magic != b"DIRC" or version not in _VERSIONS:
        raise IndexUnreadable(f"{magic!r} version {version}")
    entries = {}
    at = _HEADER.size
    for _ in range(count):
        start = at
        words = _STAT.unpack_from(data, at)
        at += _STAT.size
        oid = data[at : at + oid_bytes].hex()
        at += oid_bytes
        (flags,) = _FLAGS.unpack_from(data, at)
        at += _FLAGS.size * (2 if flags & _EXTENDED else 1)
        end = data.index(b"\0", at)
        entries[data[at:end]] = IndexEntry(
            mode=words[6],
            oid=oid,
            size=words[9],
            mtime_ns=words[2] * _NS + words[3],
            ctime_ns=words[0] * _NS + words[1],
            inode=words[5],
            uid=words[7],
            gid=words[8],
        )
        # Entries are padded with 1 to 8 zero bytes to a multiple of 8.
        at = start + (end - start) // 8 * 8 + 8
    return entries
