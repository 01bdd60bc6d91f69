"""Makes and removes the workspace of one run: the checkout, its home and its temporary folder.

``DATA/workspaces/JOB.EPOCH`` holds ``tree`` (what the agent works in), ``home`` and ``tmp``;
``DATA/runs/JOB.EPOCH`` holds what capture needs and no agent should see. Each checkout has its own
``.git`` and shares no file with the base: an agent may write into any object.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import attrs
import trio

from actors.git import Git, GitFailed, without_credentials
from actors.host import HostError
from actors.process.runner import KeeperLost, SpawnFailed
from actors.process.tool import OutputTooLong
from actors.repository import Base, Repository
from storage import events as e
from storage.ids import JobId

_PRIVATE: Final = 0o700
# An agent that commits needs a name, and its home is new: without one git refuses.
_AGENT_GIT_CONFIG: Final = """\
[user]
\tname = Watchkeeper agent
\temail = agent@watchkeeper.invalid
[safe]
\tdirectory = *
[init]
\tdefaultBranch = main
"""
DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_INODES_LOW: Final = 16
_BYTES_LOW: Final = 4 * 1024 * 1024


@attrs.frozen
class DataLayout:
    """Where the host keeps what, inside the data folder."""

    data: Path

    @property
    def bases(self) -> Path:
        """Bare mirrors, one per repository."""
        return self.data / "bases"

    @property
    def workspaces(self) -> Path:
        """Workspaces of runs."""
        return self.data / "workspaces"

    @property
    def runs(self) -> Path:
        """Private notes about runs."""
        return self.data / "runs"

    @property
    def output(self) -> Path:
        """Raw output of agents, growing."""
        return self.data / "output"

    @property
    def captures(self) -> Path:
        """Artifact files of runs until they are stored."""
        return self.data / "captures"

    @property
    def trash(self) -> Path:
        """What only waits to be deleted."""
        return self.data / "trash"

    @property
    def git(self) -> Path:
        """Configuration files of git children."""
        return self.data / "git"

    @classmethod
    def make(cls, data: Path) -> "DataLayout":
        """Make all folders, readable for the owner alone, and answer them; blocks shortly."""
        layout = cls(data.resolve())
        for folder in (
            layout.bases,
            layout.workspaces,
            layout.runs,
            layout.output,
            layout.captures,
            layout.trash,
            layout.git,
        ):
            folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        return layout


@attrs.frozen
class RunPlace:
    """The folders and files of one run."""

    layout: DataLayout
    job: JobId
    epoch: int

    @property
    def name(self) -> str:
        """``JOB.EPOCH``."""
        return f"{self.job}.{self.epoch}"

    @property
    def workspace(self) -> Path:
        """The folder of tree, home and tmp."""
        return self.layout.workspaces / self.name

    @property
    def tree(self) -> Path:
        """The agent's working directory."""
        return self.workspace / "tree"

    @property
    def home(self) -> Path:
        """HOME of the agent."""
        return self.workspace / "home"

    @property
    def tmp(self) -> Path:
        """TMPDIR of the agent."""
        return self.workspace / "tmp"

    @property
    def private(self) -> Path:
        """What we keep about the run and the agent has no business with."""
        return self.layout.runs / self.name

    @property
    def index(self) -> Path:
        """A copy of the index as it was right after the checkout."""
        return self.private / "index"

    @property
    def captures(self) -> Path:
        """Artifact files of the run."""
        return self.layout.captures / self.name

    def output(self, stream: e.OutputStream) -> Path:
        """Raw bytes of one output stream."""
        return self.layout.output / f"{self.name}.{stream}"

    def leftovers(self) -> tuple[Path, ...]:
        """Answer all that is to be removed when the run is over and stored."""
        outputs = (self.output("stdout"), self.output("stderr"))
        return (self.workspace, self.private, self.captures, *outputs)


async def prepare_scratch(place: RunPlace) -> e.WorkspacePrepared:
    """Make an empty workspace; raises HostError."""
    await _prepare_folders(place, place.tree)
    return e.WorkspacePrepared(kind="scratch", strategy="empty")


async def prepare_clone(
    place: RunPlace, request: e.WorkspaceRequest, repository: Repository, git: Git
) -> e.WorkspacePrepared:
    """Make a checkout of the wanted commit from the base; raises HostError."""
    assert request.repo is not None, "a clone has a repository"
    await _prepare_folders(place)
    try:
        base = await repository.base(request.ref, git)
        await _clone(place, base, git)
        await _check_out(place, base, request.repo, git)
    except GitFailed as error:
        raise _failure_of_git(error, request.repo, place.layout.data) from error
    except OSError as error:
        raise host_error_of(error) from error
    except SpawnFailed as error:
        raise HostError("workspace_failed", f"git can not be run: {error}") from error
    except (KeeperLost, OutputTooLong) as error:
        raise HostError("workspace_failed", "the checkout was interrupted") from error
    return e.WorkspacePrepared(
        kind="clone",
        strategy="clone",
        repo=request.repo,
        ref=base.ref,
        base_commit=base.commit,
        stale=base.stale,
        stale_why=base.stale_why,
    )


async def _prepare_folders(place: RunPlace, *more: Path) -> None:
    def make() -> None:
        # An earlier start of the same epoch may have been cut off half-way.
        discard([place.workspace, place.private], place.layout.trash)
        for folder in (place.workspace, place.home, place.tmp, place.private, *more):
            folder.mkdir(mode=_PRIVATE)
        (place.home / ".gitconfig").write_text(_AGENT_GIT_CONFIG)

    await _blocking(make)


async def _clone(place: RunPlace, base: Base, git: Git) -> None:
    words = ["clone", "--quiet", "--no-checkout", "--no-hardlinks", "--template="]
    ends = ["--", str(base.folder), str(place.tree)]
    try:
        await git.run(*words, *ends, cwd=place.private)
    except GitFailed:
        # The copy of the objects races with a fetch, whose temporary files vanish under it. The
        # transport sees only whole packs.
        await trio.to_thread.run_sync(shutil.rmtree, place.tree, True)
        await git.run(*words, "--no-local", *ends, cwd=place.private)


async def _check_out(place: RunPlace, base: Base, repo: str, git: Git) -> None:
    await git.run("remote", "set-url", "origin", "--", repo, cwd=place.tree)
    if base.commit is None:
        return
    if base.branch is None:
        await git.run("checkout", "--quiet", "--detach", base.commit, cwd=place.tree)
    else:
        await git.run("checkout", "--quiet", "-B", base.branch, base.commit, cwd=place.tree)
        # Exit code 128: the branch has left the base since; the checkout stands all the same.
        await git.run(
            "branch",
            "--quiet",
            f"--set-upstream-to=origin/{base.branch}",
            base.branch,
            cwd=place.tree,
            ok=(0, 1, 128),
        )
    await _blocking(lambda: _keep_index(place))


def _keep_index(place: RunPlace) -> None:
    # copy2 keeps the time of the index: entries as young as it are not trusted (racy git).
    if (place.tree / ".git/index").exists():
        shutil.copy2(place.tree / ".git/index", place.index)


async def _blocking(work: Callable[[], None]) -> None:
    try:
        await trio.to_thread.run_sync(work)
    except OSError as error:
        raise host_error_of(error) from error


def host_error_of(error: OSError) -> HostError:
    """Answer what an error of the file system means for a workspace."""
    if error.errno in DISK_FULL_ERRNOS:
        return HostError("disk_full", f"no room for the workspace: {error.strerror}")
    return HostError("workspace_failed", f"the workspace could not be made: {error}")


def _failure_of_git(error: GitFailed, repo: str, folder: Path) -> HostError:
    """Answer ``disk_full`` when that is why git failed, which its exit code does not tell.

    git removes what it made before it ends, so that the disk may look free again: what the
    operating system said (in the C locale, always) counts, too.
    """
    shown = without_credentials(repo)
    free = os.statvfs(folder)
    inodes = free.f_files > 0 and free.f_favail < _INODES_LOW
    said = any(os.strerror(number) in error.message for number in DISK_FULL_ERRNOS)
    if said or inodes or free.f_bavail * free.f_frsize < _BYTES_LOW:
        what = "inodes" if inodes else "bytes"
        message = f"no {what} left for the checkout of {shown}"
        return HostError("disk_full", message, detail=what)
    return HostError("workspace_failed", f"the checkout of {shown} failed: {error}", detail="git")


# --- removal --------------------------------------------------------------------------------------


def discard(paths: Iterable[Path], trash: Path) -> list[Path]:
    """Move paths out of their places, at once, and answer where they are now; blocks shortly.

    What is not there, or can not be moved, stays: a sweep finds it again.
    """
    moved = []
    for path in paths:
        target = trash / f"{path.name}.{os.urandom(6).hex()}"
        with contextlib.suppress(OSError):
            path.rename(target)
            moved.append(target)
    return moved


def delete(path: Path) -> None:
    """Delete a file or a whole folder, also one that an agent took its own rights from; blocks.

    Links are removed, never followed. What can not be deleted stays for the next try.
    """
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            _give_rights(path)
            shutil.rmtree(path, ignore_errors=True)


def _give_rights(folder: Path) -> None:
    # Top down: a folder has to be readable before what is in it can be seen.
    for parent, folders, _ in _walk_giving_rights(folder):
        for name in folders:
            path = Path(parent, name)
            if not path.is_symlink():
                path.chmod(stat.S_IRWXU)


def _walk_giving_rights(folder: Path) -> Iterable[tuple[str, list[str], list[str]]]:
    folder.chmod(stat.S_IRWXU)
    return os.walk(folder, topdown=True, followlinks=False)
