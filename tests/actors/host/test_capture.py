"""What a job made is captured exactly, whatever its agent did to its repository."""

# Paths are bytes here, since names need not be text.
# ruff: noqa: PTH101, PTH103, PTH108, PTH112, PTH113, PTH114, PTH115, PTH116, PTH118, PTH120, PTH123, PTH211, SIM115

import base64
import functools
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.capture import capture_run
from actors.git import Git, GitSetup
from actors.limits import Limits
from actors.local_host import open_local_host
from actors.process.pool import open_keeper_pool
from actors.repository import Repositories
from actors.workspace import DataLayout, RunPlace, prepare_clone
from storage import events as e
from storage.ids import JobId

pytestmark = pytest.mark.acceptance


def listing(done):
    return {file["path"]: (file["status"], file["stored"]) for file in done.listed}


async def test_the_patch_goes_from_the_base_to_the_final_tree(run_job, repo, clone_of):
    """Commits, index and untracked files are all in it, once."""
    repo.commit("more", gone="x\n", mode="x\n", kept="k\n")

    done = await run_job(
        "echo c > committed; echo two >> readme; git add -A; git commit -qm mine;"
        "echo i > indexed; git add indexed; echo u > untracked; echo three >> readme;"
        "rm gone; chmod +x mode; touch kept",
        workspace=clone_of(repo),
    )

    assert listing(done) == {
        "committed": ("A", True),
        "gone": ("D", False),
        "indexed": ("A", True),
        "mode": ("M", True),
        "readme": ("M", True),
        "untracked": ("A", True),
    }
    assert b"+two\n+three\n" in done.files["diff"]
    assert b"old mode 100644\nnew mode 100755" in done.files["diff"]
    assert done.captured.complete


async def test_committed_and_pushed_work_is_still_the_diff(run_job, new_repo, clone_of):
    """The diff counts from the recorded base, not from where the agent's branch stands (SV017)."""
    bare = new_repo("bare", bare=True)
    source = new_repo("source")
    source.commit("one", a="1\n")
    source.git("push", "-q", str(bare.path), "trunk")

    done = await run_job(
        "echo 2 > a; git commit -qam two; git push -q origin trunk", workspace=clone_of(bare)
    )

    assert done.outcome.cause is None
    assert b"-1\n+2\n" in done.files["diff"]


async def test_commits_come_as_a_bundle(run_job, repo, clone_of, tmp_path):
    """All commits beyond the base can be fetched from it, with their branch."""
    done = await run_job(
        "for i in 1 2 3; do echo $i > f$i; git add -A; git commit -qm c$i; done; git gc -q",
        workspace=clone_of(repo),
    )
    (tmp_path / "b").write_bytes(done.files["bundle"])

    repo.git("fetch", "-q", str(tmp_path / "b"), "HEAD:got", "trunk:branch")

    assert repo.git("log", "--format=%s", "trunk..got").split() == ["c3", "c2", "c1"]
    assert repo.git("rev-parse", "got") == repo.git("rev-parse", "branch")


async def test_without_commits_there_is_no_bundle(run_job, repo, clone_of):
    """Uncommitted work, an older HEAD and a branch at the base make none."""
    repo.commit("second")
    for script in ("echo x > a", "git checkout -q HEAD~1", "git checkout -qb other"):
        done = await run_job(script, workspace=clone_of(repo))
        assert "bundle" not in done.files
        assert done.captured.complete


async def test_commits_in_a_scratch_workspace_are_bundled(run_job):
    """A repository that the agent made itself counts as well."""
    done = await run_job("git init -q; echo x > a; git add a; git commit -qm one")

    assert listing(done) == {"a": ("A", True)}
    assert done.files["bundle"].startswith(b"# v")


async def test_exact_names(run_job, repo, clone_of):
    """Blanks, arrows, quotes, newlines, and bytes that are no text, with a stated encoding.

    SV019.
    """
    done = await run_job(
        "echo 1 > 'a -> b.txt'; echo 2 > 'ä ü.txt'; printf x > 'new\nline.txt';"
        "echo 3 > 'quote\".txt'; echo 4 > \"$(printf '\\377.txt')\"; echo 5 > -n; echo 6 > ' '",
        workspace=clone_of(repo),
    )

    names = {
        base64.b64decode(file["path"]) if file["path_encoding"] == "base64" else file["path"]
        for file in done.listed
    }
    assert names == {
        "a -> b.txt",
        "ä ü.txt",
        "new\nline.txt",
        'quote".txt',
        b"\xff.txt",
        "-n",
        " ",
    }
    archived = tarfile.open(fileobj=io.BytesIO(done.files["archive"])).getnames()
    assert len(archived) == 7
    assert os.fsdecode(b"\xff.txt") in archived


@pytest.mark.parametrize(
    "attack",
    [
        "rm -rf .git",
        "rm -rf .git; echo 'gitdir: /etc' > .git",
        "rm -rf .git; ln -s /etc .git",
        "rm -rf .git; mkfifo .git",
        "echo junk > .git/index",
        "echo junk > .git/HEAD",
        "rm .git/HEAD; mkfifo .git/HEAD",
        "rm -rf .git/objects; ln -s /etc .git/objects",
        "mkfifo .git/objects/pack/pack-x.idx",
        "rm -rf .git/objects",
        "git commit -qam c; echo /etc > .git/objects/info/alternates",
        "touch .git/index.lock .git/HEAD.lock",
        "find .git/objects -type f -exec sh -c 'chmod +w $1; echo bad > $1' _ {} \\;",
        "git rm -rqf --cached .",
        "git checkout -q --orphan new; git rm -rqf --cached .",
    ],
)
async def test_a_repository_that_was_attacked_changes_nothing(run_job, repo, clone_of, attack):
    """The patch is the same when the agent broke, replaced or deleted its ``.git``."""
    with trio.fail_after(15):
        done = await run_job(
            f"echo two >> readme; echo n > new; {attack}", workspace=clone_of(repo)
        )

    assert listing(done) == {"new": ("A", True), "readme": ("M", True)}
    assert b"+two\n" in done.files["diff"]


async def test_nothing_that_an_agent_configured_runs(run_job, repo, clone_of, tmp_path):
    """Monitors, external diffs, filters, text conversions and hooks are not executed."""
    trap = tmp_path / "sprung"
    done = await run_job(
        f"""
        printf '#!/bin/sh\\ntouch {trap}\\ncat\\n' > ../evil; chmod +x ../evil; evil=$(realpath ../evil)
        for key in core.fsmonitor diff.external diff.x.textconv diff.x.command filter.x.clean \\
            filter.x.smudge filter.x.process core.hooksPath core.pager gpg.program; do
          git config $key $evil; done
        echo '* filter=x diff=x text=auto eol=crlf' > .gitattributes
        for hook in pre-commit post-index-change reference-transaction; do
          mkdir -p .git/hooks; cp ../evil .git/hooks/$hook; done
        printf 'one\\r\\ntwo\\r\\n' > crlf; rm -f {trap}
        """,
        workspace=clone_of(repo),
    )

    assert not trap.exists()
    assert b"+one\r\n+two\r\n" in done.files["diff"]
    assert set(listing(done)) == {".gitattributes", "crlf"}
    assert done.captured.complete


async def test_line_endings_are_what_the_agent_wrote(run_job, repo, clone_of):
    """``text=auto`` does not change a byte of the contents."""
    done = await run_job(
        "echo '* text=auto' > .gitattributes; printf 'a\\r\\nb\\r\\n' > crlf",
        workspace=clone_of(repo),
    )

    archive = tarfile.open(fileobj=io.BytesIO(done.files["archive"]))
    assert archive.extractfile("crlf").read() == b"a\r\nb\r\n"


async def test_files_of_nested_repositories_are_in(run_job, repo, clone_of):
    """A repository inside is files like any other, with or without a commit; not its ``.git``."""
    done = await run_job(
        "git init -q one; echo 1 > one/a; git init -q two; echo 2 > two/b;"
        "(cd two; git add -A; git commit -qm x); mkdir -p x/.GIT; echo 3 > x/.GIT/c",
        workspace=clone_of(repo),
    )

    assert listing(done) == {
        "one/a": ("A", True),
        "two/b": ("A", True),
        "x/.GIT/c": ("A", False),
    }


async def test_ignored_files_are_listed_and_not_stored(run_job, repo, clone_of):
    """They are in the list with ``ignored``; tracked files that match a rule are not ignored."""
    (repo.path / ".gitignore").write_text("*.log\n/build/\n!keep.log\n")
    (repo.path / "tracked.log").write_text("1\n")
    repo.git("add", "-f", "tracked.log")
    repo.commit("rules")

    done = await run_job(
        "echo x > a.log; echo x > keep.log; mkdir -p build/deep sub; echo x > build/deep/o;"
        "echo '*.tmp' > sub/.gitignore; echo x > sub/t.tmp; echo x > t.tmp; echo 2 > tracked.log;"
        "echo '*.evil' > .git/info/exclude; echo x > y.evil",
        workspace=clone_of(repo),
    )

    assert {file["path"] for file in done.listed if file.get("ignored")} == {
        "a.log",
        "build/deep/o",
        "sub/t.tmp",
    }
    assert {path for path, (_, stored) in listing(done).items() if stored} == {
        "keep.log",
        "sub/.gitignore",
        "t.tmp",
        "tracked.log",
        "y.evil",
    }


async def test_a_thousand_ignored_files_become_one_line(run_job):
    """Beyond the bound only the first level is listed, with its size."""
    done = await run_job(
        "echo 'packages/' > .gitignore; mkdir packages; cd packages; "
        "for i in $(seq 1001); do echo x > f$i; done"
    )

    (folder,) = [file for file in done.listed if file.get("ignored")]
    assert (folder["path"], folder["kind"], folder["size"]) == ("packages", "dir", 2002)


async def test_what_holds_no_content_is_listed_only(run_job, repo, clone_of):
    """Fifos and sockets are seen and never opened; links are kept as links, never followed."""
    with trio.fail_after(10):
        done = await run_job(
            "mkfifo pipe .gitignore; python3 -c \"import socket;socket.socket(1).bind('sock')\";"
            "ln -s /etc/passwd link; ln -s . loop; ln -s /etc folder; rm readme; mkfifo readme",
            workspace=clone_of(repo),
        )

    assert listing(done) == {
        ".gitignore": ("A", False),
        "folder": ("A", True),
        "link": ("A", True),
        "loop": ("A", True),
        "pipe": ("A", False),
        "readme": ("T", False),
        "sock": ("A", False),
    }
    assert b"+/etc/passwd" in done.files["diff"]
    assert b"root:" not in done.files["diff"]


@pytest.mark.parametrize("instead", ["", "ln -s /etc tree", "echo x > tree", "mkfifo tree"])
async def test_a_tree_that_is_gone_is_empty(run_job, repo, clone_of, instead):
    """An agent that deletes its own folder has deleted every file, and nothing else is read."""
    done = await run_job(f"cd ..; rm -rf tree; {instead}", workspace=clone_of(repo))

    assert listing(done) == {"readme": ("D", False)}
    assert done.captured.complete


async def test_folders_and_files_swap(run_job, repo, clone_of):
    """A folder where a file was, a file where a folder was, a link over a file."""
    (repo.path / "dir").mkdir()
    (repo.path / "dir/a").write_text("a\n")
    repo.commit("dir", link="l\n")

    done = await run_job(
        "rm readme; mkdir readme; echo x > readme/in; rm -r dir; echo y > dir;"
        "rm link; ln -s dir link",
        workspace=clone_of(repo),
    )

    assert listing(done) == {
        "dir": ("A", True),
        "dir/a": ("D", False),
        "link": ("T", True),
        "readme": ("D", False),
        "readme/in": ("A", True),
    }


async def test_a_file_rewritten_in_the_same_moment_is_seen(run_job, repo, clone_of):
    """Same size, same time: the content decides (racy git)."""
    done = await run_job(
        "touch -r readme ../stamp; printf 'HELLO\\n' > readme; touch -r ../stamp readme",
        workspace=clone_of(repo),
    )

    assert listing(done) == {"readme": ("M", True)}


async def test_capture_keeps_what_it_can_at_its_deadline(tmp_path, spec, repo, clone_of):
    """Out of time, the output is there, and the capture says that it is not complete."""
    limits = Limits(capture_deadline_ms=0)
    async with open_local_host(tmp_path / "d", log_id="log_d", limits=limits) as host:
        run = host.open_run(spec("echo out; echo x > new", workspace=clone_of(repo)))
        await run.offer()
        await run.release()
        await run.outcome()
        await run.end(grace_ms=0)

        captured = await run.capture()

        assert not captured.complete
        assert {"stdout", "stderr"} <= {file.name for file in captured.files}
        await run.close()


async def test_capture_can_be_repeated(host, spec, repo, clone_of):
    """A second capture of the same run answers the same files."""
    run = host.open_run(
        spec("echo x > new; git add -A; git commit -qm c", workspace=clone_of(repo))
    )
    await run.offer()
    await run.release()
    await run.outcome()
    await run.end(grace_ms=0)

    first, second = await run.capture(), await run.capture()

    assert {f.name: f.sha256 for f in first.files} == {f.name: f.sha256 for f in second.files}
    assert first.reaped.phase == "capture"
    assert first.reaped.left == 0
    await run.close()


async def test_a_lost_index_is_made_again(host, spec, repo, clone_of):
    """Without the copy of the index every file is read; the answer is the same."""
    run = host.open_run(spec("echo x > new", workspace=clone_of(repo)))
    await run.offer()
    await run.release()
    await run.outcome()
    await run.end(grace_ms=0)
    for index in host.layout.runs.glob("*/index"):
        index.unlink()

    captured = await run.capture()

    files = {file.name: Path(file.path).read_bytes() for file in captured.files}
    assert [file["path"] for file in json.loads(files["files"])] == ["new"]
    assert captured.complete
    await run.close()


# --- any edit at all ------------------------------------------------------------------------------

NAMES = [b"a", b"b", b"d/a", b"d/e/f", b"d", b'q"\t', b"\xff\xfe", b"n\nl", b" ", "ä".encode()]
EDITS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(NAMES), st.binary(max_size=30)),
        st.tuples(st.just("link"), st.sampled_from(NAMES), st.sampled_from([b"a", b"x/../y"])),
        st.tuples(st.just("delete"), st.sampled_from(NAMES), st.just(b"")),
        st.tuples(st.just("mode"), st.sampled_from(NAMES), st.just(b"")),
    ),
    max_size=10,
)


def edit(top: bytes, edits) -> None:
    for kind, name, data in edits:
        path = os.path.join(top, name)
        if kind == "mode":
            if os.path.isfile(path) and not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode ^ 0o111)
            continue
        remove(path)
        if kind == "delete":
            continue
        parents = name.split(b"/")[:-1]
        for depth in range(len(parents)):
            parent = os.path.join(top, *parents[: depth + 1])
            if os.path.islink(parent) or os.path.isfile(parent):
                os.unlink(parent)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if kind == "write":
            with open(path, "wb") as file:
                file.write(data)
        else:
            os.symlink(data, path)


def remove(path: bytes) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def contents(top: bytes) -> dict[bytes, tuple[int, bytes]]:
    """Every file as git sees it: mode and bytes."""
    found = {}
    for folder, folders, names in os.walk(top):
        if b".git" in folders:
            folders.remove(b".git")
        for name in [*names, *(f for f in folders if os.path.islink(os.path.join(folder, f)))]:
            path = os.path.join(folder, name)
            key = os.path.relpath(path, top)
            if os.path.islink(path):
                found[key] = (0o120000, os.readlink(path))
            else:
                mode = 0o100755 if os.stat(path).st_mode & stat.S_IXUSR else 0o100644
                with open(path, "rb") as file:
                    found[key] = (mode, file.read())
    return found


def name_of(entry) -> bytes:
    path = entry["path"]
    return base64.b64decode(path) if entry["path_encoding"] == "base64" else path.encode()


def git(folder: Path, *words: str) -> None:
    names = {
        f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    env = {**os.environ, **names, "GIT_CONFIG_GLOBAL": "/dev/null"}
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, env=env)


async def capture_edits(folder: Path, before, after):
    source = folder / "source"
    source.mkdir()
    git(source, "init", "-q")
    edit(os.fsencode(source), before)
    git(source, "add", "-A")
    git(source, "commit", "-q", "--allow-empty", "-m", "base")
    layout = DataLayout.make(folder / "data")
    place = RunPlace(layout, JobId("job_p"), 1)
    async with open_keeper_pool(size=0) as pool, trio.open_nursery() as nursery:
        setup = GitSetup.write(layout.git)
        jobs_git = Git(await pool.acquire(), setup)
        repositories = Repositories(layout.bases, nursery, pool, setup)
        request = e.WorkspaceRequest(kind="clone", repo=str(source))
        repository = repositories.get(request.repo)
        prepared = await prepare_clone(place, request, repository, jobs_git)
        edit(os.fsencode(place.tree), after)
        files, complete = await capture_run(place, prepared, jobs_git, deadline_ms=20_000)
        nursery.cancel_scope.cancel()
    assert complete
    return source, place, {file.name: Path(file.path).read_bytes() for file in files}


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
@given(EDITS, EDITS)
def test_any_edit_is_captured_exactly(before, after):
    """The patch makes the final tree from the base; the list and the archive say the same."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        work = functools.partial(capture_edits, folder, before, after)
        source, place, files = trio.run(work)

        old, new = contents(os.fsencode(source)), contents(os.fsencode(place.tree))
        changed = {path for path in old.keys() | new.keys() if old.get(path) != new.get(path)}
        assert {name_of(entry) for entry in json.loads(files["files"])} == changed
        if changed:
            (folder / "patch").write_bytes(files["diff"])
            git(source, "apply", "--binary", "--whitespace=nowarn", str(folder / "patch"))
        else:
            assert files["diff"] == b""
        assert contents(os.fsencode(source)) == new
        held = changed & new.keys()
        if held:
            archive = tarfile.open(fileobj=io.BytesIO(files["archive"]))
            assert {os.fsencode(member.name) for member in archive} == held
            for member in archive:
                mode, data = new[os.fsencode(member.name)]
                if member.issym():
                    assert (mode, os.fsencode(member.linkname)) == (0o120000, data)
                else:
                    assert archive.extractfile(member).read() == data
