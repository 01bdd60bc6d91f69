"""Files of artifacts, each named by the SHA-256 of its bytes."""

import hashlib
import os
import secrets
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, TypeVar

import trio

from storage.errors import ArtifactUnavailable
from storage.event_log import StoredArtifact

CHUNK_BYTES: Final = 1024 * 1024
THREADS_MAX: Final = 4
_PARTIAL: Final = "partial"

T = TypeVar("T")


class ArtifactStore:
    """A folder with a file per content, in sub-folders by the first two characters.

    A file has its name only when all its bytes are on disk, so that what a crash leaves behind
    is a nameless partial file. When a ``put`` answers, file and folder are durable: then the
    event may be appended. Equal contents share one file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._limiter = trio.CapacityLimiter(THREADS_MAX)

    async def put_bytes(self, data: bytes, salt: bytes) -> StoredArtifact:
        """Store bytes; answer the row for the event's transaction. Cancelled only before."""
        return await self._in_thread(lambda: self._put(iter((data,)), salt))

    async def put_file(self, source: Path, salt: bytes) -> StoredArtifact:
        """Store a copy of a file as it is now; the source stays. Cancelled only before.

        A symlink is refused: it could lead anywhere. Raises OSError.
        """
        return await self._in_thread(lambda: self._put(_chunks(source), salt))

    async def read(self, stored: StoredArtifact, offset: int = 0, size: int | None = None) -> bytes:
        """Answer at most ``size`` bytes from an offset, None: to the end.

        Past the end there are none. Raises ArtifactUnavailable.
        """

        def read() -> bytes:
            try:
                with self.path(stored).open("rb") as file:
                    file.seek(offset)
                    return file.read() if size is None else file.read(size)
            except FileNotFoundError as error:
                raise ArtifactUnavailable(stored.file, "its file is gone") from error

        return await self._in_thread(read)

    def path(self, stored: StoredArtifact | str) -> Path:
        """Answer where the file of an artifact, or of a plain SHA-256, lies; it may be gone."""
        file = stored if isinstance(stored, str) else stored.file
        assert len(file) == 64, "a SHA-256 in hex has 64 characters"
        assert file.isalnum(), "a name never leads out of the folder"
        return self._folder / file[:2] / file

    async def unlink_unreferenced(
        self, referenced: Collection[str], *, among: Collection[str] | None = None
    ) -> list[str]:
        """Remove files that no row refers to; answer their names.

        ``among`` names the files to look at, for an erasure: others stay. None looks at all and
        removes partial files too; that is for recovery, when nothing is being stored. The
        removal is durable when it answers.
        """
        kept = frozenset(referenced)

        def unlink() -> list[str]:
            candidates = self._names() if among is None else sorted(among)
            gone = [name for name in candidates if name not in kept and self._unlink(name)]
            if among is None:
                for partial in self._folder.glob(f"*.{_PARTIAL}"):
                    partial.unlink(missing_ok=True)
            return gone

        return await self._in_thread(unlink)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._limiter)

    def _put(self, chunks: Iterator[bytes], salt: bytes) -> StoredArtifact:
        self._make_folder(self._folder)
        partial = self._folder / f"{secrets.token_hex(8)}.{_PARTIAL}"
        try:
            stored = _write(partial, chunks, salt)
            target = self.path(stored)
            self._make_folder(target.parent)
            partial.replace(target)
            _sync_folder(target.parent)
        finally:
            partial.unlink(missing_ok=True)
        return stored

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _sync_folder(folder.parent)

    def _names(self) -> list[str]:
        return sorted(path.name for path in self._folder.glob("??/*") if len(path.name) == 64)

    def _unlink(self, name: str) -> bool:
        path = self.path(name)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        _sync_folder(path.parent)
        return True


def _write(target: Path, chunks: Iterator[bytes], salt: bytes) -> StoredArtifact:
    plain, salted, size = hashlib.sha256(), hashlib.sha256(salt), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(target, flags, 0o600), "wb") as file:  # noqa: PTH123  a descriptor
        for chunk in chunks:
            plain.update(chunk)
            salted.update(chunk)
            file.write(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return StoredArtifact(digest=salted.hexdigest(), salt=salt, file=plain.hexdigest(), size=size)


def _chunks(source: Path) -> Iterator[bytes]:
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123  a descriptor
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
