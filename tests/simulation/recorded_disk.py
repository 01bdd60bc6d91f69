"""A disk under SQLite that remembers each write and sync, and what a power cut may leave of them.

:class:`RecordingVfs` is SQLite's own unix file layer with a memory; :class:`RecordedConnection`
is the part of ``sqlite3.Connection`` that storage uses, over apsw, whose SQLite takes a file
layer written in Python. For the same appends it does the same 836 operations in the same order,
folder syncs among them, as the SQLite of Python's ``sqlite3`` (3.54.1 and 3.40.1; measured by
compare_with_strace.py). :class:`CrashDisk` plays the record up to a point and builds images.

What a cut may leave is what POSIX and SQLite's own assumptions allow: bytes that were synced are
there; of the writes since, each sector of each write is there, torn or not; a file that has grown
may hold anything where nothing arrived; a name appears or goes when its folder is synced, or
earlier. Bytes beside those written keep their value (SQLite's "powersafe overwrite").
"""

import sqlite3
import threading
from contextlib import contextmanager
from typing import Literal

import apsw
import attrs
import trio

MODES = ("lost", "kept", "prefix", "operations", "sectors")
SECTORS = (512, 4_096)
# After some passes of trio's loop the tasks whose answer was posted have run, and have posted.
PASSES_UNTIL_HEARD = 4


@attrs.frozen
class Operation:
    """One thing done to a file; ``inode`` tells files apart that had one name in turn.

    ``offset`` is that of a write, or the size of a truncate. ``folder`` says that the folder is
    synced too.
    """

    kind: Literal["create", "write", "truncate", "sync", "delete"]
    name: str
    inode: int
    offset: int = 0
    data: bytes = b""
    folder: bool = False


class Record:
    """The operations in their order, and after how many of them each answer was heard."""

    def __init__(self, start):
        self.start = dict(start)
        self.operations = []
        self.answers = []
        self.inodes = {name: number for number, name in enumerate(sorted(self.start))}
        self.made = len(self.inodes)
        self.newborn = set()
        self.token = None

    def heard(self, seq):
        """Note that a client knows now that the events up to a seq are committed."""
        self.answers.append((len(self.operations), int(seq)))

    def settle(self):
        """Let the clients hear all that the writer has answered: the disk is slower than they."""
        for _ in range(PASSES_UNTIL_HEARD):
            passed = threading.Event()
            self.token.run_sync_soon(passed.set)
            passed.wait()

    def create(self, name):
        inode, self.made = self.made, self.made + 1
        self.inodes[name] = inode
        if name.endswith(("-wal", "-journal")):
            self.newborn.add(inode)
        self.operations.append(Operation("create", name, inode))

    def write(self, name, offset, data):
        self._of_file("write", name, offset, bytes(data))

    def truncate(self, name, size):
        self._of_file("truncate", name, size)

    def sync(self, name):
        # SQLite syncs the folder with the first sync of a journal or a write-ahead log.
        self.settle()
        inode = self.inodes[name]
        self.operations.append(Operation("sync", name, inode, folder=inode in self.newborn))
        self.newborn.discard(inode)

    def delete(self, name, *, folder):
        self.settle()
        self.operations.append(Operation("delete", name, self.inodes.pop(name), folder=folder))

    def _of_file(self, kind, name, offset, data=b""):
        self.operations.append(Operation(kind, name, self.inodes[name], offset, data))


class RecordingVfs(apsw.VFS):
    """SQLite's file layer in which the files of one folder are recorded; use it in a ``with``."""

    def __init__(self, record, folder):
        self.record = record
        self.folder = folder
        self.name = f"recording-{id(self)}"
        super().__init__(self.name, "")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.unregister()

    def recorded_name(self, path):
        """Answer the name of a file in the folder; None for one that is none of ours."""
        return path.removeprefix(f"{self.folder}/") if path.startswith(f"{self.folder}/") else None

    def xOpen(self, name, flags):  # noqa: N802  SQLite's name
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        ours = None if path is None else self.recorded_name(path)
        file = _RecordedFile(name, flags, ours, self.record)
        if ours is not None and ours not in self.record.inodes:
            self.record.create(ours)
        return file

    def xDelete(self, name, syncdir):  # noqa: N802  SQLite's name
        super().xDelete(name, syncdir)
        ours = self.recorded_name(name)
        if ours in self.record.inodes:
            self.record.delete(ours, folder=bool(syncdir))


class _RecordedFile(apsw.VFSFile):
    def __init__(self, name, flags, ours, record):
        super().__init__("", name, flags)
        self.ours = ours
        self.record = record

    def xWrite(self, data, offset):  # noqa: N802  SQLite's name
        super().xWrite(data, offset)
        if self.ours is not None:
            self.record.write(self.ours, offset, data)

    def xTruncate(self, size):  # noqa: N802  SQLite's name
        super().xTruncate(size)
        if self.ours is not None:
            self.record.truncate(self.ours, size)

    def xSync(self, flags):  # noqa: N802  SQLite's name
        # The real file needs no sync: its process does not crash, the record of it does.
        if self.ours is not None:
            self.record.sync(self.ours)


class RecordedConnection:
    """What storage uses of ``sqlite3.Connection``, over apsw.

    ``pragmas`` replaces the values of some PRAGMA statements. ``early`` makes COMMIT return
    before it is done: it is done before the next statement. Both are for tests of the tests.
    """

    isolation_level = None

    def __init__(self, path, vfs, pragmas, *, early):
        self._connection = apsw.Connection(str(path), vfs=vfs.name)
        self._pragmas = pragmas
        self._early = early
        self._owed = False

    def execute(self, sql, parameters=()):
        self._pay()
        if self._early and sql == "COMMIT":
            self._owed = True
            return _Rows([], None, self._connection)
        return self._run(sql, parameters)

    def executemany(self, sql, rows):
        self._pay()
        with _as_sqlite3():
            self._connection.executemany(sql, rows)

    @property
    def in_transaction(self):
        return self._connection.in_transaction and not self._owed

    def close(self):
        self._pay()
        with _as_sqlite3():
            self._connection.close()

    def _pay(self):
        if self._owed:
            self._owed = False
            self._run("COMMIT", ())

    def _run(self, sql, parameters):
        name, _, _ = sql.removeprefix("PRAGMA ").partition("=")
        if sql.startswith("PRAGMA ") and name in self._pragmas:
            sql = f"PRAGMA {name}={self._pragmas[name]}"
        described = []
        with _as_sqlite3():
            cursor = self._connection.cursor()
            cursor.exec_trace = lambda it, *_: described.append(it.get_description()) or True
            rows = cursor.execute(sql, parameters).fetchall()
        return _Rows(rows, described[-1] if described else None, self._connection)


class _Rows:
    """The answer to one statement, as a cursor of ``sqlite3`` gives it."""

    def __init__(self, rows, description, connection):
        self._rows = iter(rows)
        self.description = description or None
        self.rowcount = connection.changes()
        self.lastrowid = connection.last_insert_rowid()

    def __iter__(self):
        return self._rows

    def fetchone(self):
        return next(self._rows, None)

    def fetchall(self):
        return list(self._rows)


@contextmanager
def _as_sqlite3():
    try:
        yield
    except apsw.Error as error:
        told = sqlite3.OperationalError(str(error))
        told.sqlite_errorcode = getattr(error, "extendedresult", sqlite3.SQLITE_ERROR)
        raise told from error


def connections_over(vfs, pragmas, *, early=False):
    """Answer what takes the place of the connection class of a log."""

    def connection(path, **_):
        return RecordedConnection(path, vfs, pragmas, early=early)

    return connection


class CrashDisk:
    """The disk after the first operations of a record; ``play`` goes on, never back."""

    def __init__(self, record):
        self._record = record
        self.played = 0
        self._synced = {i: bytearray(record.start[name]) for name, i in _numbered(record)}
        self._since = {inode: [] for inode in self._synced}
        self._names = {name: [inode] for name, inode in _numbered(record)}

    def play(self, upto):
        """Do the operations before this index."""
        assert upto >= self.played, "a disk does not go back"
        for operation in self._record.operations[self.played : upto]:
            self._do(operation)
        self.played = upto

    @property
    def unsynced(self):
        """How many operations a cut may lose or tear now."""
        return sum(map(len, self._since.values())) + sum(
            len(states) - 1 for states in self._names.values()
        )

    def image(self, mode, chance):
        """Answer the files, name to bytes, that a cut now may leave, drawn by ``chance``."""
        files = {}
        cut = _Cut(mode, chance)
        for name, states in sorted(self._names.items()):
            inode = cut.one_of(states)
            if inode is not None:
                files[name] = cut.content(self._synced[inode], self._since[inode])
        return files

    def _do(self, operation):
        inode, states = operation.inode, self._names.setdefault(operation.name, [None])
        if operation.kind == "create":
            self._synced[inode], self._since[inode] = bytearray(), []
            states.append(inode)
        elif operation.kind == "delete":
            states.append(None)
        elif operation.kind == "sync":
            for earlier in self._since[inode]:
                _apply(self._synced[inode], earlier.kind, earlier.offset, earlier.data)
            self._since[inode].clear()
        else:
            self._since[inode].append(operation)
        if operation.folder:
            self._names = {name: states[-1:] for name, states in self._names.items()}
            named = {inode for (inode,) in self._names.values()}
            self._since = {inode: ops for inode, ops in self._since.items() if inode in named}


class _Cut:
    """The dice of one power cut.

    ``lost`` and ``kept``: nothing, or all, of what was not synced. ``prefix``: the first writes
    of each file, and a part of the next. ``operations``: any of them. ``sectors``: any sectors
    of any of them, some torn.
    """

    def __init__(self, mode, chance):
        self.mode = mode
        self.chance = chance
        self.sector = chance.choice(SECTORS)
        self.share = chance.choice((0.1, 0.5, 0.9))
        self.garbage = chance.random() < 0.3

    def one_of(self, states):
        if self.mode in {"lost", "kept"}:
            return states[0 if self.mode == "lost" else -1]
        return self.chance.choice(states)

    def content(self, synced, operations):
        data = bytearray(synced)
        if self.mode == "prefix" and operations:
            operations = operations[: self.chance.randint(1, len(operations))]
        for operation in operations if self.mode != "lost" else ():
            last = self.mode == "prefix" and operation is operations[-1]
            for offset, part in self._surviving(operation, last=last):
                filler = self.chance.randbytes if self.garbage else bytes
                _apply(data, operation.kind, offset, part, filler)
        return bytes(data)

    def _surviving(self, operation, *, last):
        whole = [(operation.offset, operation.data)]
        if self.mode == "kept" or (self.mode == "prefix" and not last):
            return whole
        if self.mode == "prefix" and operation.kind == "write":
            return [(operation.offset, self._torn(operation.data))]
        if self.mode == "sectors" and operation.kind == "write":
            parts = [p for p in self._sectors(operation) if self._happens()]
            return [(o, self._torn(p) if self.chance.random() < 0.1 else p) for o, p in parts]
        return whole if self._happens() else []

    def _happens(self):
        return self.chance.random() < self.share

    def _torn(self, data):
        return data[: self.chance.randint(0, len(data))]

    def _sectors(self, operation):
        start, end = operation.offset, operation.offset + len(operation.data)
        while start < end:
            stop = min(end, (start // self.sector + 1) * self.sector)
            yield start, operation.data[start - operation.offset : stop - operation.offset]
            start = stop


def _numbered(record):
    return [(name, number) for number, name in enumerate(sorted(record.start))]


def _apply(content, kind, offset, data, filler=bytes):
    if kind == "truncate":
        del content[offset:]
    if offset > len(content):
        content += filler(offset - len(content))
    content[offset : offset + len(data)] = data


def hears(record):
    """Let a record know the running loop, whose tasks are the clients."""
    record.token = trio.lowlevel.current_trio_token()
