"""The data folder belongs to one process."""

import os
import stat
import subprocess
import sys

import pytest

from storage.errors import FolderLocked
from storage.folder import DataFolder


def test_a_second_opener_is_refused_with_the_holders_pid(tmp_path):
    """The lock is exclusive, also against the same process, and free afterwards."""
    path = tmp_path / "data"
    with DataFolder.lock(path) as folder:
        assert folder.holder() == os.getpid()
        with pytest.raises(FolderLocked) as caught, DataFolder.lock(path):
            pass
        assert caught.value.pid == os.getpid()
        assert str(path) in str(caught.value)

    assert folder.holder() is None
    with DataFolder.lock(path) as again:
        assert again.path == path


def test_the_folder_is_for_its_owner_alone(tmp_path):
    """It is made with its parents, mode 0700; so is one that was there with another mode."""
    path = tmp_path / "a" / "data"
    path.mkdir(parents=True, mode=0o755)
    with DataFolder.lock(path) as folder:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.lock_file.stat().st_mode) == 0o600
        assert folder.log.parent == folder.artifacts.parent == path


@pytest.mark.slow
def test_a_child_that_was_executed_does_not_keep_the_lock(tmp_path):
    """A child that lives on has no descriptor of the lock, even when it inherits all it can."""
    path = tmp_path / "data"
    code = "print('up', flush=True); input()"
    with DataFolder.lock(path) as folder:
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=False,
        )
        assert child.stdout.readline() == b"up\n"

    held_by = folder.holder()
    child.communicate(b"\n")
    assert held_by is None


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_free(tmp_path):
    """Its pid stays in the file, and means nothing."""
    path = tmp_path / "data"
    code = (
        "import sys, pathlib; from storage.folder import DataFolder\n"
        "with DataFolder.lock(pathlib.Path(sys.argv[1])): print('held', flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
    )
    assert child.stdout.readline() == b"held\n"
    assert DataFolder(path).holder() == child.pid
    child.kill()
    child.communicate()

    with DataFolder.lock(path) as folder:
        assert folder.holder() == os.getpid()


def test_a_folder_without_a_lock_has_no_holder(tmp_path):
    """Asking makes no file."""
    assert DataFolder(tmp_path).holder() is None
    assert list(tmp_path.iterdir()) == []
