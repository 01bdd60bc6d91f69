"""Checkouts from real repositories of every shape, each a job's own."""

import os
import subprocess
import time
import uuid
from pathlib import Path

import pytest
import trio

from actors import repository as repository_module
from actors.host import HostError
from actors.local_host import open_local_host
from actors.repository import base_folder, remove_stale_locks
from actors.workspace import delete, discard
from storage import events as e

pytestmark = pytest.mark.acceptance


async def test_the_default_branch_is_the_remotes(run_job, new_repo, clone_of):
    """A bare origin whose HEAD is ``trunk`` is checked out on trunk, with its real remote.

    SV010.
    """
    source = new_repo("source", branch="trunk")
    source.commit("one", a="1\n")
    source.git("branch", "main")
    bare = new_repo("bare", branch="trunk", bare=True)
    source.git("push", "-q", str(bare.path), "trunk", "main")

    done = await run_job(
        "git rev-parse --abbrev-ref HEAD; git remote get-url origin; "
        "git rev-parse --abbrev-ref @{u}; git status --porcelain",
        workspace=clone_of(bare),
    )

    assert done.text.split() == ["trunk", str(bare.path), "origin/trunk"]
    assert done.prepared.workspace == e.WorkspacePrepared(
        kind="clone",
        strategy="clone",
        repo=str(bare.path),
        ref="refs/heads/trunk",
        base_commit=source.head(),
    )


async def test_a_new_commit_is_seen_by_the_next_job(run_job, new_repo, clone_of):
    """The base advances with the remote, whatever its branch is called (SV011)."""
    repo = new_repo("r", branch="main")
    repo.commit("one")
    await run_job("true", workspace=clone_of(repo))
    repo.commit("two")

    done = await run_job("git log -1 --format=%s", workspace=clone_of(repo))

    assert done.text == "two\n"
    assert not done.prepared.workspace.stale


async def test_an_empty_tree_is_a_checkout(run_job, new_repo, clone_of):
    """A commit without a file gives an empty tree, and work in it is captured (SV013)."""
    repo = new_repo("r")
    repo.commit("empty")

    done = await run_job("ls -A; echo x > new", workspace=clone_of(repo))

    assert done.text == ".git\n"
    assert done.prepared.workspace.base_commit == repo.head()
    assert [file["path"] for file in done.listed] == ["new"]


async def test_a_history_that_starts_empty_has_its_files(run_job, new_repo, clone_of):
    """An empty first commit does not hide the files of the second (SV014)."""
    repo = new_repo("r")
    repo.commit("empty")
    repo.commit("readme", README="hi\n")

    done = await run_job("cat README", workspace=clone_of(repo))

    assert done.text == "hi\n"


async def test_a_repository_without_a_commit_works(run_job, new_repo, clone_of):
    """An unborn HEAD gives an empty checkout, in which the agent can commit."""
    repo = new_repo("r")

    done = await run_job("echo x > a; git add a; git commit -qm one", workspace=clone_of(repo))

    assert (done.outcome.cause, done.prepared.workspace.base_commit) == (None, None)
    assert b"+x" in done.files["diff"]
    assert "bundle" in done.files


async def test_a_detached_checkout_is_taken_as_it_is(run_job, repo, clone_of):
    """``--repo PATH`` means HEAD of that checkout, also when it is on no branch."""
    first = repo.head()
    repo.commit("second")
    repo.git("checkout", "-q", "--detach", first)

    done = await run_job("git rev-parse HEAD; git branch --show-current", workspace=clone_of(repo))

    assert done.text.split() == [first]
    assert done.prepared.workspace.ref == "HEAD"


@pytest.mark.parametrize(
    ("ref", "branch"),
    [
        ("side/one", "side/one"),
        ("refs/heads/side/one", "side/one"),
        ("v1", ""),
        ("refs/special/x", ""),
        ("FULL", ""),
        ("SHORT", ""),
    ],
)
async def test_a_ref_of_any_form_can_be_asked_for(run_job, repo, clone_of, ref, branch):
    """Branches are checked out as such; tags, commits and other refs are detached."""
    repo.git("checkout", "-q", "-b", "side/one")
    wanted = repo.commit("wanted")
    repo.git("tag", "-a", "v1", "-m", "v1")
    repo.git("update-ref", "refs/special/x", wanted)
    repo.git("checkout", "-q", "trunk")
    ref = {"FULL": wanted, "SHORT": wanted[:9]}.get(ref, ref)

    done = await run_job(
        "git rev-parse HEAD; git branch --show-current", workspace=clone_of(repo, ref)
    )

    assert done.text.split() == [wanted, *branch.split()]


@pytest.mark.parametrize("ref", ["nope", "--upload-pack=touch x", "refs/heads/", "0" * 40, "a b"])
async def test_a_ref_that_is_not_there_is_named(host, spec, repo, clone_of, ref):
    """The job fails before its agent starts, and nothing is left."""
    run = host.open_run(spec(workspace=clone_of(repo, ref)))

    with pytest.raises(HostError) as failed:
        await run.offer()

    assert failed.value.cause == "workspace_failed"
    assert ref in str(failed.value)
    assert list(host.layout.workspaces.iterdir()) == []


async def test_a_folder_that_is_no_repository_is_said_to_be_none(host, spec, tmp_path):
    """The message holds what git says of it."""
    (tmp_path / "plain").mkdir()
    request = e.WorkspaceRequest(kind="clone", repo=str(tmp_path / "plain"))

    with pytest.raises(HostError, match="does not appear to be a git repository") as failed:
        await host.open_run(spec(workspace=request)).offer()

    assert failed.value.cause == "workspace_failed"


async def test_a_remote_that_is_gone_makes_a_job_stale_not_failed(
    run_job, repo, clone_of, tmp_path
):
    """A known ref is checked out though the fetch failed; the job says so and why (SV011)."""
    await run_job("true", workspace=clone_of(repo))
    request = clone_of(repo)
    repo.path.rename(tmp_path / "moved")

    done = await run_job("cat readme", workspace=request)

    assert done.text == "hello\n"
    assert done.prepared.workspace.stale
    assert "ls-remote" in done.prepared.workspace.stale_why


async def test_a_hanging_remote_delays_only_who_needs_it(
    host, spec, run_job, repo, clone_of, monkeypatch
):
    """Known commits need no remote; known branches wait for a while; others go on waiting.

    SV025.
    """
    monkeypatch.setattr(repository_module, "FETCH_PATIENCE_S", 0.1)
    commit = repo.head()
    await run_job("true", workspace=clone_of(repo))
    folder = host.layout.data / "hang"
    folder.mkdir()
    os.mkfifo(folder / "HEAD")  # git opens it, and waits for a writer.
    (folder / "objects").mkdir()
    (folder / "refs").mkdir()
    request = clone_of(repo)
    repo.path.rename(repo.path.with_name("moved"))
    folder.rename(repo.path)

    with trio.fail_after(5):
        by_commit = await run_job("true", workspace=clone_of(repo, commit))
        by_branch = await run_job("true", workspace=request)
    with trio.move_on_after(0.3) as scope:
        await host.open_run(spec(workspace=clone_of(repo, "new"))).offer()

    assert not by_commit.prepared.workspace.stale
    assert "did not answer in time" in by_branch.prepared.workspace.stale_why
    assert scope.cancelled_caught


async def test_four_jobs_with_four_refs_see_each_their_own(run_job, repo, clone_of):
    """Fetches of one base never run at the same time, and none loses a ref (SV023)."""
    await run_job("true", workspace=clone_of(repo))
    commits = {}
    for name in "abcd":
        repo.git("checkout", "-q", "-b", name, "trunk")
        commits[name] = repo.commit(name)
    seen = {}

    async def one(name):
        done = await run_job("git rev-parse HEAD", workspace=clone_of(repo, name))
        seen[name] = done.text.strip()

    async with trio.open_nursery() as nursery:
        for name in "abcd":
            nursery.start_soon(one, name)

    assert seen == commits


async def test_ten_agents_commit_at_once(run_job, repo, clone_of):
    """Each job has its own working tree and its own index (SV020)."""
    done = []

    async def one():
        script = "echo x >> readme; git commit -qam mine && git rev-parse HEAD~1"
        done.append(await run_job(script, workspace=clone_of(repo)))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(one)

    assert {job.outcome.cause for job in done} == {None}
    assert {job.text.strip() for job in done} == {repo.head()}


async def test_an_agent_can_not_reach_the_base_through_its_objects(host, run_job, repo, clone_of):
    """No file of a checkout shares its inode with the base (SV026)."""
    done = await run_job(
        "find .git -type f -links +1; find .git -type f -exec sh -c 'echo evil >> \"$1\"' _ {} \\;",
        workspace=clone_of(repo),
    )
    assert done.text == ""

    base = base_folder(host.layout.bases, str(repo.path))

    checked = subprocess.run(["git", "-C", base, "fsck", "--full"], check=True, capture_output=True)
    assert b"error" not in checked.stderr
    assert (await run_job("cat readme", workspace=clone_of(repo))).text == "hello\n"


async def test_a_collected_base_does_not_break_a_running_job(host, spec, repo, clone_of):
    """A job borrows no object: force-push, gc and prune of the base do not reach it (SV028)."""
    run = host.open_run(spec("git fsck --full && git log -1 --format=%s", workspace=clone_of(repo)))
    await run.offer()
    base = base_folder(host.layout.bases, str(repo.path))
    subprocess.run(["git", "-C", base, "update-ref", "-d", "refs/heads/trunk"], check=True)
    subprocess.run(["git", "-C", base, "update-ref", "-d", "refs/watchkeeper/HEAD"], check=True)
    subprocess.run(["git", "-C", base, "gc", "-q", "--prune=now"], check=True)

    await run.release()

    assert (await run.outcome()).result == b"first\n"
    await run.close()


async def test_a_stale_lock_in_the_base_is_removed(host, run_job, repo, clone_of):
    """What a killed fetch left does not stop the next one."""
    await run_job("true", workspace=clone_of(repo))
    base = base_folder(host.layout.bases, str(repo.path))
    (base / "packed-refs.lock").touch()
    (base / "refs/heads/trunk.lock").touch()
    (base / "objects/pack").mkdir(exist_ok=True)
    (base / "objects/pack/tmp_pack_x").touch()
    repo.commit("second")

    done = await run_job("git log -1 --format=%s", workspace=clone_of(repo))

    assert done.text == "second\n"
    assert remove_stale_locks(base) == 0


async def test_a_half_made_base_is_made_again(host, run_job, repo, clone_of):
    """A crash while a base was being made leaves nothing in its way."""
    half = base_folder(host.layout.bases, str(repo.path)).with_suffix(".new")
    (half / "objects").mkdir(parents=True)

    done = await run_job("cat readme", workspace=clone_of(repo))

    assert done.text == "hello\n"


async def test_names_of_every_kind_are_checked_out(run_job, repo, clone_of):
    """Blanks, quotes, arrows, newlines and bytes that are no text."""
    names = ["a -> b.txt", "ä ü.txt", "new\nline.txt", 'quote".txt', os.fsdecode(b"\xff.txt")]
    repo.commit("names", **dict.fromkeys(names, "x"))

    done = await run_job("git status --porcelain; ls | wc -l", workspace=clone_of(repo))

    assert done.listed == []
    assert done.captured.complete


async def test_a_scratch_workspace_is_empty_and_no_repository(run_job):
    """Without a repository there is an empty folder, and its files are captured all the same."""
    done = await run_job("ls -A; git rev-parse 2>/dev/null || echo none; echo x > a")

    assert done.text == "none\n"
    assert done.prepared.workspace == e.WorkspacePrepared(kind="scratch", strategy="empty")
    assert [file["path"] for file in done.listed] == ["a"]


async def test_a_fetch_is_debounced_for_remotes_that_are_not_local(run_job, repo, monkeypatch):
    """Within fifteen seconds a remote is asked once, unless a ref is missing (SV118)."""
    monkeypatch.setattr(repository_module, "is_local", lambda _: False)
    request = e.WorkspaceRequest(kind="clone", repo=str(repo.path))
    await run_job("true", workspace=request)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # The wall clock goes back to 1970.
    repo.commit("second")
    repo.git("branch", "fresh")

    again = await run_job("git log -1 --format=%s", workspace=request)
    missing = await run_job(
        "git log -1 --format=%s",
        workspace=e.WorkspaceRequest(kind="clone", repo=str(repo.path), ref="fresh"),
    )

    assert again.text == "first\n"
    assert missing.text == "second\n"


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of its own with few inodes and little room."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    options = "size=3m,nr_inodes=200"
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("kind", ["bytes", "inodes"])
async def test_a_full_disk_is_disk_full(tiny_disk, spec, repo, clone_of, kind):
    """Bytes or inodes: the cause says so, nothing of the job is left, other jobs go on."""
    if kind == "bytes":
        repo.commit("big", **{f"f{n}": os.urandom(200_000).hex() for n in range(5)})
    else:
        repo.commit("many", **{f"f{n}": str(n) for n in range(300)})
    async with open_local_host(tiny_disk / "d", log_id="log_f", pool_size=0) as host:
        with pytest.raises(HostError) as failed:
            await host.open_run(spec(workspace=clone_of(repo))).offer()

        assert failed.value.cause == "disk_full"
        assert list(host.layout.workspaces.iterdir()) == []
        scratch = host.open_run(spec())
        await scratch.offer()
        await scratch.close()


def test_deleting_follows_no_link_and_stops_at_nothing(tmp_path):
    """A link's target stays; folders without rights go."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    doomed = tmp_path / "doomed"
    (doomed / "a" / "b").mkdir(parents=True)
    (doomed / "a" / "b" / "c").touch()
    (doomed / "link").symlink_to(target)
    (doomed / "a" / "b").chmod(0)
    (doomed / "a").chmod(0)
    lone = tmp_path / "lone"
    lone.symlink_to(target)

    delete(doomed)
    delete(lone)
    delete(tmp_path / "absent")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]
    assert (target / "kept").exists()


def test_discarding_moves_at_once_and_never_collides(tmp_path):
    """Two things of one name both find their place in the trash; what is absent is no error."""
    trash = tmp_path / "trash"
    trash.mkdir()
    for _ in range(2):
        (tmp_path / "x").mkdir()
        assert len(discard([tmp_path / "x", tmp_path / uuid.uuid4().hex], trash)) == 1

    assert len(list(trash.iterdir())) == 2
    assert not Path(tmp_path / "x").exists()
