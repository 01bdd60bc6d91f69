"""Warm bases: one bare mirror per repository, fetched by one fetch at a time.

A fetch belongs to no job. It runs under a keeper of the repository and goes on when the job that
asked for it is cancelled. A job whose commit is known waits for the remote only for a while.
"""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Final

import attrs
import trio

from actors.git import Git, GitFailed, GitSetup, is_local, without_credentials
from actors.host import HostError
from actors.process.pool import KeeperPool
from actors.process.runner import KeeperLost, KeeperProcess, SpawnFailed
from actors.process.tool import OutputTooLong

FETCH_DEBOUNCE_S: Final = 15.0
FETCH_PATIENCE_S: Final = 5.0
FETCH_LIMIT_S: Final = 600.0
KEEPER_IDLE_S: Final = 60.0
_FULL_SHA: Final = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_SHORT_SHA: Final = re.compile(r"[0-9a-f]{7,64}")
_SHA256_HEX: Final = 64
_HEAD: Final = "refs/watchkeeper/HEAD"
_REFSPECS: Final = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")


@attrs.frozen(kw_only=True)
class Base:
    """A commit in a base, ready to be checked out.

    ``commit`` None: the repository has no commit yet. ``branch`` None: a detached checkout.
    ``ref`` is what was resolved, as the job's record says it.
    """

    folder: Path
    commit: str | None
    branch: str | None
    ref: str | None
    object_format: str = "sha1"
    stale: bool = False
    stale_why: str | None = None


@attrs.frozen(kw_only=True)
class Resolved:
    """What a ref names in the base at this moment."""

    commit: str | None
    branch: str | None
    ref: str | None


class Flight:
    """One fetch, and all who wait for it."""

    def __init__(self) -> None:
        self._done = trio.Event()
        self.error: str | None = None

    async def wait(self) -> None:
        """Wait until it is over, well or badly."""
        await self._done.wait()

    def land(self, error: str | None) -> None:
        """It is over; ``error`` None: the base is as the remote was."""
        self.error = error
        self._done.set()


class Repository:
    """The base of one repository; its tasks run in the nursery that it is given."""

    def __init__(
        self, repo: str, folder: Path, *, nursery: trio.Nursery, pool: KeeperPool, setup: GitSetup
    ) -> None:
        self._repo = repo
        self._folder = folder
        self._nursery = nursery
        self._pool = pool
        self._setup = setup
        self._keeper: KeeperProcess | None = None
        self._current: Flight | None = None
        self._next: Flight | None = None
        self._shown = without_credentials(repo)
        self._local = is_local(repo)
        self._fetching = trio.Lock()
        self._asked = trio.Event()
        self._flying = False
        self._fetched_at = float("-inf")

    async def base(self, ref: str | None, git: Git) -> Base:
        """Answer the commit of a ref (None: the remote's HEAD), fetched as the rules say.

        ``git`` is the job's own, for looking into the base. Raises HostError
        ``workspace_failed`` when the ref is not there and can not be fetched.
        """
        known = await self._look_up(ref, git)
        if known is not None and ref is not None and _FULL_SHA.fullmatch(ref):
            return self._answer(known, None)
        why: str | None = None
        flight = self._flight(wanted=known is None)
        if flight is not None:
            with trio.move_on_after(FETCH_PATIENCE_S if known is not None else FETCH_LIMIT_S):
                await flight.wait()
                why = flight.error
                known = await self._look_up(ref, git) or (known if why else None)
                flight = None
            if flight is not None:
                why = f"{self._shown} did not answer in time; the fetch goes on"
        if known is None and ref is not None:
            known = await self._fetch_exactly(ref, git)
        if known is None:
            raise HostError("workspace_failed", self._not_found(ref, why), detail=ref)
        return self._answer(known, why)

    def _answer(self, known: Resolved, why: str | None) -> Base:
        return Base(
            folder=self._folder,
            commit=known.commit,
            branch=known.branch,
            ref=known.ref,
            object_format="sha256" if len(known.commit or "") == _SHA256_HEX else "sha1",
            stale=why is not None,
            stale_why=why,
        )

    def _not_found(self, ref: str | None, why: str | None) -> str:
        what = f"ref {ref!r}" if ref is not None else "HEAD"
        reason = f" ({why})" if why else ""
        return f"{what} was not found in {self._shown}{reason}; name a branch, tag or commit of it"

    # --- looking -------------------------------------------------------------------------------

    async def _look_up(self, ref: str | None, git: Git) -> Resolved | None:
        if not await trio.to_thread.run_sync((self._folder / "HEAD").exists):
            return None
        if ref is None:
            return await self._look_up_head(git)
        if ref.startswith("-") or "\0" in ref:
            return None
        if branch := await self._commit(f"refs/heads/{ref}", git):
            return Resolved(commit=branch, branch=ref, ref=f"refs/heads/{ref}")
        names = [f"refs/tags/{ref}"]
        if ref.startswith("refs/heads/"):
            if branch := await self._commit(ref, git):
                return Resolved(commit=branch, branch=ref.removeprefix("refs/heads/"), ref=ref)
        elif ref.startswith("refs/"):
            names = [ref, _wanted(ref)]
        elif _SHORT_SHA.fullmatch(ref):
            names.append(ref)
        for name in names:
            if commit := await self._commit(name, git):
                return Resolved(commit=commit, branch=None, ref=ref)
        return None

    async def _look_up_head(self, git: Git) -> Resolved | None:
        if not await trio.to_thread.run_sync((self._folder / "watchkeeper-head").exists):
            return None  # Never fetched.
        # The first line is the branch that the remote's HEAD names, or empty when detached.
        text = await trio.to_thread.run_sync((self._folder / "watchkeeper-head").read_text)
        branch = text.strip() or None
        commit = await self._commit(_HEAD, git)
        ref = f"refs/heads/{branch}" if branch else "HEAD"
        return Resolved(commit=commit, branch=branch, ref=ref)

    async def _commit(self, name: str, git: Git) -> str | None:
        result = await git.run(
            "rev-parse",
            "--verify",
            "--quiet",
            "--end-of-options",
            f"{name}^{{commit}}",
            cwd=self._folder,
            ok=(0, 1, 128),
        )
        # rev-parse prints --end-of-options itself in some versions; the commit is the last line.
        return result.stdout.decode().split("\n")[-2] if result.code == 0 else None

    # --- fetching ------------------------------------------------------------------------------

    def _flight(self, *, wanted: bool) -> Flight | None:
        """Answer the fetch to wait for; None: the last one is young enough.

        A local repository is asked each time: that costs milliseconds, and a commit made a moment
        ago must be seen. A ref that is ``wanted`` is asked for in spite of the debounce.
        """
        age_s = trio.current_time() - self._fetched_at
        if not wanted and not self._local and age_s < FETCH_DEBOUNCE_S:
            return None
        if self._current is not None and not (self._local or wanted):
            return self._current
        if self._next is None:
            self._next = Flight()
            if self._current is None:
                # Taken at once, so that a second caller sees a fetch under way.
                self._current, self._next = self._next, None
                self._asked.set()
                if not self._flying:
                    self._flying = True
                    self._nursery.start_soon(self._fly)
                return self._current
        return self._next

    async def _fly(self) -> None:
        while self._current is not None:
            flight = self._current
            error: str | None = "the service is stopping"
            try:
                with trio.move_on_after(FETCH_LIMIT_S) as scope:
                    error = await self._fetch()
                if scope.cancelled_caught:
                    error = f"{self._shown} did not answer in {FETCH_LIMIT_S:.0f} s"
            finally:
                flight.land(error)
                self._current, self._next = self._next, None
            if self._current is None:
                await self._rest()
        self._flying = False

    async def _rest(self) -> None:
        """Wait for the next fetch for a while; a keeper that nobody wants is closed."""
        self._asked = trio.Event()
        with trio.move_on_after(KEEPER_IDLE_S):
            await self._asked.wait()
        if self._current is None and self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            await keeper.close()

    async def _fetch(self) -> str | None:
        started_at = trio.current_time()
        try:
            git = await self._git()
            await trio.to_thread.run_sync(remove_stale_locks, self._folder)
            await self._make(git)
            async with self._fetching:
                await self._update(git)
        except GitFailed as error:
            return f"git {error.command} failed: {error.message[-300:]}"
        except (SpawnFailed, KeeperLost, OutputTooLong, OSError) as error:
            return f"the fetch could not run: {error!r}"
        self._fetched_at = started_at
        return None

    async def _git(self) -> Git:
        if self._keeper is None or self._keeper.lost:
            self._keeper = await self._pool.acquire()
        return Git(self._keeper, self._setup)

    async def _make(self, git: Git) -> None:
        if await trio.to_thread.run_sync((self._folder / "HEAD").exists):
            return
        # Made beside and renamed: a base is whole or not there.
        new = self._folder.with_suffix(".new")
        await trio.to_thread.run_sync(shutil.rmtree, new, True)
        await git.run("init", "--quiet", "--bare", "--template=", str(new), cwd=Path("/"))
        await git.run("config", "gc.auto", "0", cwd=new)
        await trio.to_thread.run_sync(new.rename, self._folder)

    async def _update(self, git: Git) -> None:
        there = parse_remote(await self._ls_remote(git))
        have = await self._mirrored(git)
        if there.mirrored() != have:
            specs = [*_REFSPECS, f"+HEAD:{_HEAD}"] if there.head else list(_REFSPECS)
            await self._fetch_refs(git, "--prune", "--", self._repo, *specs)
        if not there.head:
            await git.run("update-ref", "-d", _HEAD, cwd=self._folder)
        if there.branch is not None:
            await git.run("symbolic-ref", "HEAD", f"refs/heads/{there.branch}", cwd=self._folder)
        text = f"{there.branch or ''}\n"
        await trio.to_thread.run_sync((self._folder / "watchkeeper-head").write_text, text)

    async def _mirrored(self, git: Git) -> frozenset[bytes]:
        result = await git.run(
            "for-each-ref",
            "--format=%(objectname) %(refname)",
            "refs/heads/",
            "refs/tags/",
            _HEAD,
            cwd=self._folder,
        )
        return frozenset(result.stdout.splitlines())

    async def _ls_remote(self, git: Git) -> bytes:
        result = await git.run(
            "ls-remote", "--symref", "--", self._repo, cwd=self._folder, remote=True
        )
        return result.stdout

    async def _fetch_refs(self, git: Git, *words: str) -> None:
        await git.run(
            "fetch",
            "--quiet",
            "--no-tags",
            "--force",
            "--no-write-fetch-head",
            "--no-auto-maintenance",
            "--update-head-ok",
            *words,
            cwd=self._folder,
            remote=True,
        )

    async def _fetch_exactly(self, ref: str, git: Git) -> Resolved | None:
        """Ask the remote for a ref that the mirror leaves out: refs/pull/7/head, or a commit."""
        if not (ref.startswith("refs/") or _FULL_SHA.fullmatch(ref)):
            return None
        try:
            async with self._fetching:
                await self._fetch_refs(git, "--", self._repo, f"+{ref}:{_wanted(ref)}")
        except GitFailed:
            return None
        return await self._look_up(ref, git)


class Repositories:
    """The repositories of a host, each made when it is first asked for."""

    def __init__(
        self, bases: Path, nursery: trio.Nursery, pool: KeeperPool, setup: GitSetup
    ) -> None:
        self._bases = bases
        self._nursery = nursery
        self._pool = pool
        self._setup = setup
        self._known: dict[str, Repository] = {}

    def get(self, repo: str) -> Repository:
        """Answer the one repository of a name; never waits."""
        if repo not in self._known:
            self._known[repo] = Repository(
                repo,
                base_folder(self._bases, repo),
                nursery=self._nursery,
                pool=self._pool,
                setup=self._setup,
            )
        return self._known[repo]


@attrs.frozen(kw_only=True)
class RemoteRefs:
    """What a remote has: its HEAD's commit and branch (None: detached or none), and all refs."""

    head: str | None
    branch: str | None
    refs: tuple[tuple[str, str], ...]

    def mirrored(self) -> frozenset[bytes]:
        """Answer what a base that is up to date lists, as ``SHA REF`` lines."""
        kept = [
            (sha, name) for sha, name in self.refs if name.startswith(("refs/heads/", "refs/tags/"))
        ]
        if self.head:
            kept.append((self.head, _HEAD))
        return frozenset(
            f"{sha} {name}".encode("utf-8", "surrogateescape")
            for sha, name in kept
            if not name.endswith("^{}")
        )


def parse_remote(output: bytes) -> RemoteRefs:
    """Answer what ``git ls-remote --symref`` said."""
    head = branch = None
    refs = []
    for line in output.decode("utf-8", "surrogateescape").splitlines():
        value, _, name = line.partition("\t")
        if value.startswith("ref: ") and name == "HEAD":
            branch = value.removeprefix("ref: ").removeprefix("refs/heads/")
        elif name == "HEAD":
            head = value
        elif not value.startswith("ref: "):
            refs.append((value, name))
    return RemoteRefs(head=head, branch=branch, refs=tuple(refs))


def remove_stale_locks(folder: Path) -> int:
    """Remove what a killed git left in a base, and answer how many files; nothing may run in it."""
    found = [
        path
        for pattern in ("*.lock", "refs/**/*.lock", "objects/**/*.lock", "objects/**/tmp_*")
        for path in folder.glob(pattern)
    ]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def base_folder(bases: Path, repo: str) -> Path:
    """Answer where the base of a repository lies."""
    name = hashlib.sha256(repo.encode("utf-8", "surrogateescape")).hexdigest()
    return bases / f"{name}.git"


def _wanted(ref: str) -> str:
    return f"refs/watchkeeper/wanted/{hashlib.sha256(ref.encode()).hexdigest()}"
