"""Files of artifacts: named by content, whole or not there."""

import hashlib

import pytest

from storage.artifacts import ArtifactStore
from storage.codec import salted_digest
from storage.errors import ArtifactUnavailable

DATA = b"some bytes\x00" * 1000


@pytest.fixture
def store(tmp_path):
    """A store whose folder does not exist yet."""
    return ArtifactStore(tmp_path / "data" / "artifacts")


async def test_bytes_are_found_under_their_plain_digest(store, tmp_path):
    """The row has the salted digest; the file has the plain one, in a folder of two letters."""
    stored = await store.put_bytes(DATA, b"salt")

    plain = hashlib.sha256(DATA).hexdigest()
    assert stored.file == plain
    assert stored.digest == salted_digest(b"salt", DATA)
    assert stored.size == len(DATA)
    assert store.path(stored) == tmp_path / "data" / "artifacts" / plain[:2] / plain
    assert store.path(plain).read_bytes() == DATA


async def test_a_file_is_copied_and_stays(store, tmp_path):
    """The source may go on changing; what was stored does not."""
    source = tmp_path / "stdout"
    source.write_bytes(DATA)
    stored = await store.put_file(source, b"salt")
    source.write_bytes(b"changed")

    assert await store.read(stored) == DATA
    assert stored == await store.put_bytes(DATA, b"salt")


async def test_equal_contents_share_one_file(store):
    """Two salts, two rows, one file."""
    first = await store.put_bytes(DATA, b"one")
    second = await store.put_bytes(DATA, b"two")

    assert first.digest != second.digest
    assert first.file == second.file


async def test_a_part_is_read(store):
    """From an offset, at most a size; past the end there is nothing; empty files are files."""
    stored = await store.put_bytes(b"0123456789", b"s")
    empty = await store.put_bytes(b"", b"s")

    assert await store.read(stored, 2, 3) == b"234"
    assert await store.read(stored, 8, 10) == b"89"
    assert await store.read(stored, 8) == b"89"
    assert await store.read(stored, 99, 1) == b""
    assert await store.read(empty) == b""


async def test_a_file_that_is_gone_is_unavailable(store):
    """Reading says so with an error of ours."""
    stored = await store.put_bytes(DATA, b"s")
    store.path(stored).unlink()

    with pytest.raises(ArtifactUnavailable):
        await store.read(stored)


async def test_a_symlink_is_not_followed(store, tmp_path):
    """What an agent left as a link is not read through."""
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")

    with pytest.raises(OSError, match="symbolic"):
        await store.put_file(tmp_path / "link", b"s")


async def test_a_failed_copy_leaves_nothing(store, tmp_path):
    """An error half-way removes the partial file; a missing source is an OSError."""
    with pytest.raises(FileNotFoundError):
        await store.put_file(tmp_path / "missing", b"s")

    folder = tmp_path / "data" / "artifacts"
    assert [path for path in folder.rglob("*") if path.is_file()] == []


async def test_unreferenced_and_partial_files_are_removed_at_recovery(store, tmp_path):
    """What a row refers to stays; a partial file of a crash goes."""
    kept = await store.put_bytes(b"kept", b"s")
    gone = await store.put_bytes(b"gone", b"s")
    partial = tmp_path / "data" / "artifacts" / "0123.partial"
    partial.write_bytes(b"half")

    removed = await store.unlink_unreferenced({kept.file})

    assert removed == [gone.file]
    assert store.path(kept).exists()
    assert not store.path(gone).exists()
    assert not partial.exists()


async def test_an_erasure_removes_only_what_it_names(store):
    """Other unreferenced files may be on their way to their event."""
    erased = await store.put_bytes(b"erased", b"s")
    on_its_way = await store.put_bytes(b"new", b"s")
    shared = await store.put_bytes(b"shared", b"s")

    removed = await store.unlink_unreferenced({shared.file}, among=[erased.file, shared.file])
    again = await store.unlink_unreferenced(set(), among=[erased.file])

    assert removed == [erased.file]
    assert again == []
    assert store.path(on_its_way).exists()
    assert store.path(shared).exists()
