"""Captures what a run made: patch, list of files, their contents, commits, raw output.

The tree is walked and read by us, file by file; git only compares trees and writes the patch, in a
repository that we made, without the agent's configuration, attributes, hooks and filters. So the
capture is exact (``git add`` is not) and works whatever the agent did to its ``.git``. Its cost
follows the changes, not the size of the tree, but for one ``lstat`` per file.
"""

import contextlib
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import trio

from actors.agent_commits import AgentHead, lendable_objects, quoted, read_head
from actors.changes import Change, Found, changed_files, files_json
from actors.git import Git, GitFailed
from actors.git_index import GITLINK, IndexEntry, IndexUnreadable, parse_index
from actors.host import CapturedFile
from actors.object_writer import FileChanged, ObjectWriter, StoredFile, write_archive
from actors.process.runner import KeeperLost, SpawnFailed
from actors.process.tool import OutputTooLong
from actors.repository import base_folder
from actors.tree_walk import Tree, WalkStopped, walk_tree
from actors.workspace import RunPlace, delete
from storage import events as e

_CHUNK_BYTES: Final = 1 << 20
_SHA256_HEX: Final = 64
_DIFF_WORDS: Final = (
    "diff-tree",
    "-r",
    "-p",
    "--binary",
    "--full-index",
    "--no-renames",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)
_STREAMS: Final[tuple[e.OutputStream, ...]] = ("stdout", "stderr")
_TROUBLES: Final = (
    GitFailed,
    SpawnFailed,
    KeeperLost,
    OutputTooLong,
    IndexUnreadable,
    FileChanged,
    WalkStopped,
    OSError,
)
T = TypeVar("T")


async def capture_run(
    place: RunPlace, workspace: e.WorkspacePrepared | None, git: Git, *, deadline_ms: int
) -> tuple[tuple[CapturedFile, ...], bool]:
    """Make the artifact files of a run; answer them, and whether they are all there is.

    ``workspace`` None: it was never prepared, only output can be captured. What can not be made
    until the deadline is left out. The processes of the agent must be gone; git's own run in the
    keeper of ``git``. May be repeated.
    """
    files = await _stored([(name, place.output(name)) for name in _STREAMS])
    if workspace is None:
        return tuple(files), True
    capture = _TreeCapture(place, workspace, git)
    complete = False
    with trio.move_on_after(deadline_ms / 1000):
        complete = await capture.run()
    if not complete:
        await trio.to_thread.run_sync(capture.discard_unfinished)
    # Files are hashed after the deadline, too: what was made is worth having.
    made = await _stored([(name, place.captures / name) for name in capture.made])
    return (*files, *made), complete and len(made) == len(capture.made)


class _TreeCapture:
    """One capture of one tree; ``made`` grows with the names of finished files."""

    def __init__(self, place: RunPlace, workspace: e.WorkspacePrepared, git: Git) -> None:
        self._place = place
        self._base = workspace.base_commit
        self._repo = workspace.repo
        self._format = "sha256" if len(self._base or "") == _SHA256_HEX else "sha1"
        self._git = git
        self._stop = threading.Event()
        self._folder = place.captures / "repo.git"
        self.made: list[str] = []

    async def run(self) -> bool:
        """Make patch, list, archive and bundle; answer whether nothing had to be left out."""
        try:
            await self._in_thread(lambda: _start_over(self._place))
            await self._in_thread(self._make_repository)
            whole = await self._capture_tree()
        except _TROUBLES:
            whole = False
        try:
            await self._bundle()
        except _TROUBLES:
            return False
        return whole

    async def _capture_tree(self) -> bool:
        index, trusted_before_ns = await self._index()
        links = frozenset(path for path, entry in index.items() if entry.mode == GITLINK)
        tree, found = await self._in_thread(lambda: self._look(index, links, trusted_before_ns))
        ignored = await self._ignored(found.untracked, tree)
        wanted = {path: info for path, info in found.to_read.items() if path not in ignored}
        stored, unread = await self._in_thread(lambda: self._store(wanted))
        changes = await self._in_thread(
            lambda: found.changes(index, stored, ignored=ignored, unread=unread)
        )
        await self._write_patch(changes)
        await self._in_thread(lambda: self._write_file("files", files_json(changes)))
        await self._archive(changes, tree)
        return not (unread or tree.unread)

    def discard_unfinished(self) -> None:
        """Give back the room of what was begun: on a full disk the log needs it for the end."""
        self._stop.set()
        with contextlib.suppress(FileNotFoundError):
            for path in self._place.captures.iterdir():
                if path.name not in self.made:
                    delete(path)

    # --- the tree ------------------------------------------------------------------------------

    def _look(
        self, index: Mapping[bytes, IndexEntry], links: frozenset[bytes], trusted_before_ns: int
    ) -> tuple[Tree, Found]:
        tree = walk_tree(self._place.tree, links, self._stop)
        return tree, changed_files(index, tree, trusted_before_ns=trusted_before_ns)

    def _make_repository(self) -> None:
        # By hand: faster than git init, and nothing of the user's templates gets in.
        (self._folder / "objects" / "info").mkdir(parents=True)
        (self._folder / "refs" / "heads").mkdir(parents=True)
        (self._folder / "HEAD").write_text("ref: refs/heads/none\n")
        (self._folder / "config").write_text(_config(self._format))
        if self._base is not None and self._repo is not None:
            base = base_folder(self._place.layout.bases, self._repo)
            alternates = self._folder / "objects" / "info" / "alternates"
            alternates.write_text(f"{base / 'objects'}\n")
        if self._place.index.exists():
            shutil.copyfile(self._place.index, self._index_file)

    @property
    def _index_file(self) -> Path:
        return self._folder / "index"

    async def _index(self) -> tuple[Mapping[bytes, IndexEntry], int]:
        """Answer the index as it was at the checkout, and the time of its writing."""
        if self._base is None:
            return {}, 0
        if not await self._in_thread(self._index_file.exists):
            # The copy was lost in a crash; without stat data every file is read.
            await self._run("read-tree", self._base)
            return await self._in_thread(self._parse_index), 0
        written_ns = (await self._in_thread(self._place.index.stat)).st_mtime_ns
        return await self._in_thread(self._parse_index), written_ns

    def _parse_index(self) -> Mapping[bytes, IndexEntry]:
        oid_bytes = 32 if self._format == "sha256" else 20
        return parse_index(self._index_file.read_bytes(), oid_bytes=oid_bytes)

    def _store(
        self, wanted: Mapping[bytes, os.stat_result]
    ) -> tuple[dict[bytes, StoredFile], set[bytes]]:
        writer = ObjectWriter(self._folder / "objects", self._format, self._stop)
        stored: dict[bytes, StoredFile] = {}
        unread = set()
        for path, info in wanted.items():
            try:
                stored[path] = writer.store(self._place.tree, path, info)
            except (FileChanged, PermissionError, FileNotFoundError):
                unread.add(path)
        return stored, unread

    async def _ignored(self, untracked: frozenset[bytes], tree: Tree) -> frozenset[bytes]:
        """Answer which untracked files the tree's own ``.gitignore`` files leave out.

        git sees only copies of them in a tree of ours, with nothing else in it.
        """
        rules = [
            path
            for path, info in tree.files.items()
            if path.split(b"/")[-1] == b".gitignore" and stat.S_ISREG(info.st_mode)
        ]
        if not untracked or not rules:
            return frozenset()
        shadow = self._place.captures / "ignore"
        await self._in_thread(lambda: _copy_rules(self._place.tree, shadow, rules, self._stop))
        result = await self._git.run(
            "check-ignore",
            "--no-index",
            "-z",
            "--stdin",
            cwd=shadow,
            env={
                "GIT_DIR": str(self._folder),
                "GIT_WORK_TREE": str(shadow),
                "GIT_INDEX_FILE": str(self._folder / "no-index"),
            },
            stdin=b"".join(path + b"\0" for path in sorted(untracked)),
            ok=(0, 1),
        )
        return frozenset(result.stdout.split(b"\0")) - {b""}

    async def _write_patch(self, changes: list[Change]) -> None:
        target = self._place.captures / "diff"
        entries = [change for change in changes if change.in_patch]
        if not entries:
            await self._in_thread(target.touch)
            self.made.append("diff")
            return
        gone = [change for change in entries if change.stored is None]
        there = [change for change in entries if change.stored is not None]
        # What is gone first: a file may stand where a folder was, and the other way round.
        lines = b"".join(change.index_line() for change in (*gone, *there))
        await self._run("update-index", "-z", "--index-info", stdin=lines)
        after = (await self._run("write-tree")).decode().strip()
        before = f"{self._base}^{{tree}}" if self._base is not None else _empty_tree(self._format)
        fd = await self._in_thread(lambda: os.open(target, os.O_WRONLY | os.O_CREAT, 0o600))
        try:
            await self._run(*_DIFF_WORDS, before, after, stdout_to=fd)
        finally:
            os.close(fd)
        self.made.append("diff")

    async def _archive(self, changes: list[Change], tree: Tree) -> None:
        files = {c.path: tree.files[c.path] for c in changes if c.stored is not None}
        if files:
            target = self._place.captures / "archive"
            top = self._place.tree
            await self._in_thread(lambda: write_archive(target, top, files, self._stop))
            self.made.append("archive")

    def _write_file(self, name: str, data: bytes) -> None:
        (self._place.captures / name).write_bytes(data)
        self.made.append(name)

    # --- the commits ---------------------------------------------------------------------------

    async def _bundle(self) -> None:
        git_folder = self._place.tree / ".git"
        head = await self._in_thread(lambda: read_head(git_folder))
        if head is None or head.commit == self._base:
            return
        objects = await self._in_thread(lambda: lendable_objects(git_folder))
        if objects is None:
            return
        env = {"GIT_ALTERNATE_OBJECT_DIRECTORIES": quoted(objects)}
        beyond = [f"^{self._base}"] if self._base is not None else []
        count = await self._run("rev-list", "--count", head.commit, *beyond, env=env)
        if int(count) > 0:
            await self._write_bundle(head, beyond, env)

    async def _write_bundle(
        self, head: AgentHead, beyond: list[str], env: Mapping[str, str]
    ) -> None:
        await self._run("update-ref", head.branch, head.commit, env=env)
        await self._run("symbolic-ref", "HEAD", head.branch)
        target = self._place.captures / "bundle"
        words = ["bundle", "create", "--quiet", str(target), "HEAD", head.branch]
        await self._run(*words, *beyond, env=env)
        self.made.append("bundle")

    async def _run(
        self,
        *words: str,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        stdout_to: int | None = None,
    ) -> bytes:
        ours = {"GIT_DIR": str(self._folder), "GIT_INDEX_FILE": str(self._index_file)}
        result = await self._git.run(
            *words,
            cwd=self._place.captures,
            env={**ours, **(env or {})},
            stdin=stdin,
            stdout_to=stdout_to,
        )
        return result.stdout

    async def _in_thread(self, work: Callable[[], T]) -> T:
        # Abandoned when the deadline comes; the thread sees ``stop`` at its next file.
        try:
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
        except trio.Cancelled:
            self._stop.set()
            raise


def _start_over(place: RunPlace) -> None:
    delete(place.captures)
    place.captures.mkdir(parents=True, mode=0o700)


def _config(object_format: str) -> str:
    if object_format == "sha1":
        return "[core]\n\trepositoryformatversion = 0\n\tbare = true\n\tcommitGraph = false\n"
    return (
        "[core]\n\trepositoryformatversion = 1\n\tbare = true\n\tcommitGraph = false\n"
        f"[extensions]\n\tobjectFormat = {object_format}\n"
    )


def _empty_tree(object_format: str) -> str:
    return hashlib.new(object_format, b"tree 0\0").hexdigest()


def _copy_rules(top: Path, shadow: Path, rules: list[bytes], stop: threading.Event) -> None:
    shadow.mkdir()
    for rule in rules:
        if stop.is_set():
            raise WalkStopped
        source = os.path.join(os.fsencode(top), rule)  # noqa: PTH118  bytes
        target = os.path.join(os.fsencode(shadow), rule)  # noqa: PTH118  bytes
        os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120  bytes
        shutil.copyfile(source, target, follow_symlinks=False)


async def _stored(names: list[tuple[str, Path]]) -> list[CapturedFile]:
    def store() -> list[CapturedFile]:
        made = (_durable(name, path) for name, path in names)
        return [file for file in made if file is not None]

    return await trio.to_thread.run_sync(store)


def _durable(name: str, path: Path) -> CapturedFile | None:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                digest.update(data)
            os.fsync(file.fileno())
            size = file.tell()
    except OSError:
        return None  # Not there, or not to be made durable.
    return CapturedFile(name=name, path=str(path), sha256=digest.hexdigest(), size=size)
