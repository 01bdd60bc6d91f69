"""The index of a checkout is read as git reads it."""

import os

import pytest

from actors.git_index import IndexUnreadable, git_mode, parse_index

pytestmark = pytest.mark.acceptance


def test_the_entries_are_those_that_git_lists(repo):
    """Mode, object and path of every entry, for names of all lengths and kinds."""
    for length in range(1, 40):
        (repo.path / ("n" * length)).write_text("x" * length)
    (repo.path / "sub").mkdir()
    (repo.path / "sub" / 'ä\n"q').write_text("y")
    (repo.path / "run").write_text("#!/bin/sh\n")
    (repo.path / "run").chmod(0o755)
    (repo.path / "link").symlink_to("nowhere")
    repo.commit("many")

    index = parse_index((repo.path / ".git/index").read_bytes())

    listed = repo.git("ls-files", "-z", "--stage").rstrip("\0").split("\0")
    ours = [f"{entry.mode:06o} {entry.oid} 0\t{os.fsdecode(path)}" for path, entry in index.items()]
    assert ours == listed


def test_a_fresh_checkout_is_unchanged_and_a_touched_file_is_not(repo):
    """Stat data alone tells, and a file as young as the index is never trusted."""
    path = repo.path / "readme"
    entry = parse_index((repo.path / ".git/index").read_bytes())[b"readme"]
    later_ns = entry.mtime_ns + 1

    assert entry.unchanged(path.lstat(), trusted_before_ns=later_ns)
    assert not entry.unchanged(path.lstat(), trusted_before_ns=entry.mtime_ns)
    path.chmod(0o755)
    assert not entry.unchanged(path.lstat(), trusted_before_ns=later_ns)


def test_an_index_with_sha256_names_is_read(tmp_path, new_repo):
    """Repositories of the other object format have longer names."""
    repo = new_repo("other")
    (repo.path / ".git").rename(tmp_path / "gone")
    repo.git("init", "-q", "--object-format=sha256")
    repo.commit("one", a="1", bb="2")

    index = parse_index((repo.path / ".git/index").read_bytes(), oid_bytes=32)

    assert list(index) == [b"a", b"bb"]
    assert index[b"a"].oid == repo.git("rev-parse", "HEAD:a")


@pytest.mark.parametrize(
    "data",
    [b"", b"DIRC", b"DIRC\0\0\0\4\0\0\0\0", b"JUNK\0\0\0\2\0\0\0\1", b"DIRC\0\0\0\2\0\0\0\1"],
)
def test_anything_else_is_refused(data):
    """Other versions, cut files and junk raise, and are never half read."""
    with pytest.raises(IndexUnreadable):
        parse_index(data)


def test_only_files_and_links_have_a_mode(tmp_path):
    """What git can not hold has none."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("x")
    (tmp_path / "file").touch(mode=0o600)
    (tmp_path / "run").touch(mode=0o700)

    modes = {name: git_mode((tmp_path / name).lstat()) for name in ("pipe", "link", "file", "run")}

    assert modes == {"pipe": None, "link": 0o120000, "file": 0o100644, "run": 0o100755}
    assert git_mode(tmp_path.lstat()) is None
