"""``watchkeeper demo``: the whole of it in a few seconds, on a bare machine."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import attrs
import click
import msgspec
import trio

from storage import events as e
from storage.folder import DataFolder
from storage.ids import JobId, job_stream
from web.assembly import crash_lines, open_service
from web.cli_group import fail
from web.config import load
from web.embedded import artifact_bytes, finished_job, follow_job
from web.local import alive
from web.progress import Progress
from web.service import RuntimeApi, SubmitRequest
from web.settings import Settings

# Any: an event as JSON.
Json = dict[str, Any]

EDITS: Final = """\
# change a file and commit it, leave another one uncommitted
echo "reading the greeting"
sed -i.old 's/world/Watchkeeper/' greeting.txt && rm greeting.txt.old
git add greeting.txt && git commit --quiet -m "Greet by name"
printf 'A file that was not committed is kept as well.\\n' > notes.txt
echo "done: one commit, one new file"
"""
FAILS: Final = """\
# fail with an exit code
echo "looking for the tests"
echo "there are no tests in this repository" >&2
exit 3
"""
HANGS: Final = """\
# start daemons that ignore TERM, then hang into the limit
echo "leaving daemons behind"
setsid sh -c 'trap "" TERM; sleep 300' &
nohup sleep 300 > nohup.log 2>&1 &
( setsid sleep 300 & ) &
sleep 300
"""


@attrs.frozen(kw_only=True)
class Script:
    """One job of the demo."""

    title: str
    prompt: str
    timeout_ms: int = 20_000


SCRIPTS: Final = (
    Script(title="edits", prompt=EDITS),
    Script(title="fails", prompt=FAILS),
    Script(title="hangs", prompt=HANGS, timeout_ms=1_000),
)


@click.command()
@click.option("--keep", is_flag=True, help="Keep the data folder, to look around in it.")
def demo(*, keep: bool) -> int:
    """Run three jobs on a small repository: one edits, one fails, one leaves daemons behind.

    Needs git, no key and no network. Everything is in a temporary folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="watchkeeper-demo-"))
    try:
        _make_repository(folder / "repo")
        settings = _settings(folder)
        told = trio.run(_jobs, settings, folder / "repo")
        return _tell(told, settings, keep=keep)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


@attrs.frozen(kw_only=True)
class Told:
    """What the demo saw."""

    jobs: dict[str, JobId]
    statuses: dict[str, str]
    diff: bytes
    reaped: list[e.ProcessReaped]


def _settings(folder: Path) -> Settings:
    options = {
        "server.data": str(folder / "data"),
        "limits.capacity": "3",
        "limits.grace_s": "0.3",
        "log.drain_s": "5",
        "log.low_water_bytes": "0",
    }
    environ = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    return load(None, options, environ=environ, folder=folder)


def _make_repository(repo: Path) -> None:
    repo.mkdir(parents=True)
    (repo / "greeting.txt").write_text("hello world\n")
    (repo / "README.md").write_text("# demo\n")
    for command in (
        ["init", "--quiet", "--initial-branch", "main"],
        ["add", "."],
        ["commit", "--quiet", "-m", "A greeting"],
    ):
        _git(repo, *command)


def _git(repo: Path, *arguments: str) -> None:
    who = {
        f"GIT_{role}_{part}": value
        for role in ("AUTHOR", "COMMITTER")
        for part, value in (("NAME", "demo"), ("EMAIL", "demo@example.invalid"))
    }
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        **who,
    }
    try:
        subprocess.run(  # noqa: S603  fixed arguments
            ["git", "-C", str(repo), *arguments],  # noqa: S607  git of PATH
            env=environment,
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        fail("git is not installed; install it, then run the demo again")
    except subprocess.CalledProcessError as error:
        fail(f"git {arguments[0]} failed: {error.stderr.decode('utf-8', 'replace')}")


async def _jobs(settings: Settings, repo: Path) -> Told:
    _title("Three jobs on one repository, each in its own checkout")
    titles: dict[str, str] = {}
    progress = Progress(sys.stdout, prefix=lambda event: f"{titles.get(event['stream'], ''):<7}")

    def crashed(where: str, error: BaseException) -> None:
        progress.say(f"{where}: {crash_lines(error)}")

    async with open_service(settings, crashed) as runtime:
        jobs = {}
        for script in SCRIPTS:
            job = await _submit(runtime, script, repo)
            titles[job_stream(job)] = script.title
            jobs[script.title] = job
        async with trio.open_nursery() as nursery:
            for job in jobs.values():
                nursery.start_soon(follow_job, runtime, job, progress.show)
        progress.finish()
        told = Told(
            jobs=jobs,
            statuses={title: await _status(runtime, job) for title, job in jobs.items()},
            diff=await artifact_bytes(runtime, jobs["edits"], "diff") or b"",
            reaped=await _reaped(runtime, jobs["hangs"]),
        )
        await runtime.drain()
    return told


async def _submit(runtime: RuntimeApi, script: Script, repo: Path) -> JobId:
    request = SubmitRequest(
        prompt=script.prompt,
        agent="shell",
        timeout_ms=script.timeout_ms,
        workspace=e.WorkspaceRequest(repo=str(repo), kind="clone"),
        by="demo",
        request_id=f"demo-{secrets.token_hex(4)}",
        local=True,
    )
    return (await runtime.submit(request)).job_id


async def _status(runtime: RuntimeApi, job: JobId) -> str:
    view: Json = msgspec.json.decode((await finished_job(runtime, job)).view, type=Json)
    return f"{view['status']}" + (f": {view['error']}" if view["error"] else "")


async def _reaped(runtime: RuntimeApi, job: JobId) -> list[e.ProcessReaped]:
    records = await runtime.log.read(job_stream(job))
    return [r.event for r in records if isinstance(r.event, e.ProcessReaped)]


def _tell(told: Told, settings: Settings, *, keep: bool) -> int:
    from storage.verify import verify

    _title("How they ended")
    for title, status in told.statuses.items():
        print(f"  {title:<7} {status}")
    _title("What the first one changed, committed or not")
    print(told.diff.decode("utf-8", "replace").rstrip() or "  (nothing was captured)")
    _title("What the third one left behind, and what became of it")
    _tell_reaped(told.reaped)
    folder = DataFolder(settings.server.data)
    report = verify(folder.log, folder.artifacts)
    _title("The log, checked from its first byte")
    print(f"  {'whole' if report.ok else 'NOT whole'}: {report.size} events")
    print(f"  root {report.size}:{report.root}")
    _title("Next")
    if keep:
        data = f"--data {settings.server.data}"
        print(f"  watchkeeper replay {told.jobs['hangs']} {data}")
        print(f"  watchkeeper diff {told.jobs['edits']} {data}")
    else:
        print(
            "  watchkeeper demo --keep                                  # and look around in its data"
        )
    print(
        "  watchkeeper run --agent shell --repo . 'echo hi > hi.txt'  # the same on your repository"
    )
    print("  watchkeeper serve                                        # the service, on port 8470")
    print("  watchkeeper doctor                                       # what this machine has")
    wanted = ("completed", "failed", "timeout")
    as_meant = all(s.startswith(w) for s, w in zip(told.statuses.values(), wanted, strict=True))
    return 0 if report.ok and as_meant else 1


def _tell_reaped(reaped: list[e.ProcessReaped]) -> None:
    for event in reaped:
        how = ", ".join(f"{p.pid} ({p.how})" for p in event.pids[:6])
        print(f"  {event.seen} processes seen, {event.left} left, {event.duration_ms} ms: {how}")
    pids = {process.pid for event in reaped for process in event.pids}
    living = sorted(pid for pid in pids if alive(pid))
    print(f"  looked again now: {len(living)} of {len(pids)} alive {living or ''}".rstrip())


def _title(text: str) -> None:
    line = f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() else text
    print(f"\n{line}", flush=True)
