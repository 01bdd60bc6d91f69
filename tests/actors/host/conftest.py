"""Real repositories and a real host, in a temporary folder."""

import os
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from actors.host import AgentOutcome, Captured, HostFact, Prepared, RunSpec
from actors.limits import Limits
from actors.local_host import LocalHost, open_local_host
from storage import events as e
from storage.ids import IdSource, JobId

IDS = IdSource()
GIT_ENV = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}


class Repo:
    """A repository of the user, with git run plainly in it."""

    def __init__(self, path: Path, *, branch: str = "trunk", bare: bool = False) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.git("init", "-q", "-b", branch, *(["--bare"] if bare else []))

    def git(self, *words: str, cwd: Path | None = None, data: bytes | None = None) -> str:
        done = subprocess.run(
            ["git", *words],
            cwd=cwd or self.path,
            input=data,
            capture_output=True,
            env={**os.environ, **GIT_ENV},
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode("utf-8", "surrogateescape").strip()

    def commit(self, message: str = "change", **files: str) -> str:
        """Write files (two underscores stand for a dot) and commit all."""
        for name, text in files.items():
            (self.path / name.replace("__", ".")).write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.head()

    def head(self) -> str:
        return self.git("rev-parse", "HEAD")


@attrs.frozen(kw_only=True)
class Done:
    """All that one run said."""

    prepared: Prepared
    facts: list[HostFact]
    outcome: AgentOutcome
    reaped: e.ProcessReaped
    captured: Captured
    files: dict[str, bytes]

    @property
    def text(self) -> str:
        return (self.outcome.result or b"").decode("utf-8", "replace")

    @property
    def listed(self) -> list[dict[str, Any]]:
        return __import__("json").loads(self.files["files"])


def make_spec(prompt: str = "", **options: Any) -> RunSpec:
    values: dict[str, Any] = {
        "job": IDS.new_job(),
        "epoch": 1,
        "agent": "shell",
        "backend": "shell",
        "prompt": prompt,
        "workspace": e.WorkspaceRequest(),
        "timeout_ms": 20_000,
        "max_budget_microusd": 1_000_000,
        "grace_ms": 500,
        "output_bytes_max": 10_000_000,
    }
    return RunSpec(**(values | options))


async def drive(host: LocalHost, spec: RunSpec, *, grace_ms: int = 0) -> Done:
    """Take a run through all its steps, as a JobActor does."""
    run = host.open_run(spec)
    prepared = await run.offer()
    await run.release()
    facts: list[HostFact] = []
    async with run.facts() as batches:
        async for batch in batches:
            facts += batch
    outcome = await run.outcome()
    reaped = await run.end(grace_ms=grace_ms)
    captured = await run.capture()
    files = {file.name: Path(file.path).read_bytes() for file in captured.files}
    await run.remove()
    await run.close()
    return Done(
        prepared=prepared,
        facts=facts,
        outcome=outcome,
        reaped=reaped,
        captured=captured,
        files=files,
    )


@pytest.fixture
def mechanism() -> str:
    """The strongest that works here; a module can have all of them."""
    return "auto"


@pytest.fixture
async def host(tmp_path: Path, mechanism: str) -> AsyncIterator[LocalHost]:
    """A host on a new data folder, held by the mechanism."""
    limits = Limits(reap_deadline_ms=5_000, capture_deadline_ms=20_000)
    async with open_local_host(
        tmp_path / "data", log_id="log_test", limits=limits, mode=mechanism
    ) as host:
        yield host


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """A repository with one commit on ``trunk``."""
    repo = Repo(tmp_path / "repo")
    repo.commit("first", readme="hello\n")
    return repo


@pytest.fixture
def new_repo(tmp_path: Path) -> Callable[..., Repo]:
    """Makes empty repositories by name."""
    return lambda name, **options: Repo(tmp_path / name, **options)


@pytest.fixture
def spec() -> Callable[..., RunSpec]:
    """Makes the spec of a shell job."""
    return make_spec


@pytest.fixture
def run_job(host: LocalHost) -> Callable[..., Any]:
    """Runs a shell script as a job, from offer to close."""

    async def run(prompt: str = "", *, grace_ms: int = 0, **options: Any) -> Done:
        return await drive(host, make_spec(prompt, **options), grace_ms=grace_ms)

    return run


@pytest.fixture
def clone_of() -> Callable[..., e.WorkspaceRequest]:
    """Asks for a checkout of a repository."""

    def ask(repo: Repo, ref: str | None = None) -> e.WorkspaceRequest:
        return e.WorkspaceRequest(kind="clone", repo=str(repo.path), ref=ref)

    return ask


__all__ = ["Done", "JobId", "Repo", "drive", "make_spec"]
