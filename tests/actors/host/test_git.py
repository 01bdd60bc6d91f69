"""git as we run it: our settings only, exit codes, no hooks."""

import os

import pytest

from actors.git import Git, GitFailed, GitSetup, is_local, without_credentials
from actors.process.pool import open_keeper_pool
from actors.repository import parse_remote

pytestmark = pytest.mark.acceptance


@pytest.fixture
async def git(tmp_path):
    """git in a keeper of its own."""
    async with open_keeper_pool(size=0) as pool:
        yield Git(await pool.acquire(), GitSetup.write(tmp_path / "git"))


async def test_a_failure_has_code_and_words(git, repo):
    """An unexpected exit code raises, with the command and what git said."""
    with pytest.raises(GitFailed) as failed:
        await git.run("rev-parse", "--verify", "nothing", cwd=repo.path)

    assert (failed.value.command, failed.value.code) == ("rev-parse", 128)
    assert "Needed a single revision" in failed.value.message


async def test_an_expected_code_is_an_answer(git, repo):
    """Codes that the caller knows do not raise."""
    result = await git.run("rev-parse", "-q", "--verify", "nothing", cwd=repo.path, ok=(0, 1))

    assert result.code == 1


async def test_words_are_english_and_settings_ours(git, repo, monkeypatch):
    """Locale, user's and system's configuration do not reach git (SV008)."""
    monkeypatch.setenv("LANG", "pt_BR.UTF-8")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'user.name=evil'")

    listed = await git.text("config", "--list", "--show-scope", cwd=repo.path)

    shown = await git.text("-c", "alias.env=!env", "env", cwd=repo.path)

    assert "LC_ALL=C" in shown.split("\n")
    assert "GIT_TERMINAL_PROMPT=0" in shown.split("\n")
    assert "evil" not in listed
    assert "system" not in listed
    assert "command\tsafe.directory=*" in listed
    assert "command\tgc.auto=0" in listed


async def test_hooks_and_monitors_of_a_repository_do_not_run(git, repo, tmp_path):
    """What an agent writes into hooks and core.fsmonitor is not executed by us."""
    trap = tmp_path / "sprung"
    for hook in ("post-checkout", "reference-transaction", "post-index-change"):
        path = repo.path / ".git/hooks" / hook
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\ntouch {trap}\n")
        path.chmod(0o755)
    repo.git("config", "core.fsmonitor", f"touch {trap}; true")
    repo.git("config", "core.hooksPath", str(repo.path / ".git/hooks"))
    trap.unlink(missing_ok=True)

    await git.run("status", "--porcelain", cwd=repo.path)
    await git.run("checkout", "-q", "-b", "other", cwd=repo.path)

    assert not trap.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
async def test_files_of_another_owner_are_no_obstacle(git, repo):
    """Ownership is no reason to refuse a repository, per command (SV029)."""
    commit = repo.head()
    for path in (repo.path, *repo.path.rglob("*")):
        os.chown(path, 12345, 12345)

    remote = await git.run("ls-remote", str(repo.path), cwd=repo.path, remote=True)

    assert await git.text("rev-parse", "HEAD", cwd=repo.path) == commit
    assert parse_remote(remote.stdout).head == commit


async def test_the_users_settings_reach_remote_commands_only(git, repo, tmp_path, monkeypatch):
    """Credentials and rewritten addresses count where a remote is spoken to."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text(f'[url "{repo.path}"]\n\tinsteadOf = short:\n')

    remote = await git.run("ls-remote", "short:", cwd=repo.path, remote=True)

    assert parse_remote(remote.stdout).head == repo.head()
    with pytest.raises(GitFailed):
        await git.run("ls-remote", "short:", cwd=repo.path)


@pytest.mark.parametrize(
    ("name", "local"),
    [("/a/b", True), ("file:///a", True), ("https://x/y", False), ("git@x:y.git", False)],
)
def test_a_local_repository_is_known_by_its_name(name, local):
    """Paths and file URLs are local, hosts are not."""
    assert is_local(name) is local


def test_what_a_remote_says_is_read_exactly():
    """HEAD with its branch, refs, and no peeled tags."""
    refs = parse_remote(
        b"ref: refs/heads/trunk\tHEAD\naa\tHEAD\naa\trefs/heads/trunk\nbb\trefs/tags/v1\n"
        b"cc\trefs/tags/v1^{}\ndd\trefs/pull/1/head\n"
    )

    assert (refs.head, refs.branch) == ("aa", "trunk")
    assert refs.mirrored() == {
        b"aa refs/heads/trunk",
        b"bb refs/tags/v1",
        b"aa refs/watchkeeper/HEAD",
    }
    assert parse_remote(b"").head is None
    assert parse_remote(b"aa\tHEAD\n").branch is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:secret@host/x failed", "https://host/x failed"),
        ("'https://token@host/x': no", "'https://host/x': no"),
        ("git@host:x and a/b@c", "git@host:x and a/b@c"),
    ],
)
def test_credentials_in_an_address_are_not_repeated(text, shown):
    """An error names the host, not who asked it with which password."""
    assert without_credentials(text) == shown
