"""``watchkeeper run``: one job, here and now."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import trio

from web import local
from web.assembly import crash_lines, workspace_defaults
from web.auth import ALL_SCOPES, Principal
from web.cli_common import settings_of, with_config, with_json
from web.cli_group import INTERRUPTED, CommandFailed, fail
from web.client import Client
from web.embedded import Finished, Interrupted, ServiceLives, run_job
from web.errors import Problem
from web.progress import Progress
from web.schemas import ExecuteBody, parse_execute
from web.settings import Settings
from web.submission import submit_request
from web.text import sole

# Any: JSON of a request or of a job.
Json = dict[str, Any]


@click.command()
@click.argument("prompt")
@click.option("--agent", help="Who does the job (default: the first one in the agents folder).")
@click.option("--model", help="Model, for agents that take one.")
@click.option("--repo", help="Repository: a path (its HEAD) or an address.")
@click.option("--ref", help="Branch, tag or commit of the repository.")
@click.option("--timeout", "timeout_seconds", type=float, help="Seconds that the agent may run.")
@click.option("--budget", "max_budget_usd", type=float, help="Dollars that the agent may spend.")
@with_json
@with_config
def run(
    prompt: str,
    agent: str | None,
    model: str | None,
    repo: str | None,
    ref: str | None,
    timeout_seconds: float | None,
    max_budget_usd: float | None,
    *,
    as_json: bool,
    config: Path | None,
    data: Path | None,
) -> int:
    """Run one job without a server: PROMPT, or - for standard input.

    Progress goes to stderr, the result and the changed files to stdout. The exit code is 0 only
    if the job completed. Ctrl-C cancels it and waits until its processes are gone.
    """
    settings = settings_of(config, data)
    progress = Progress(sys.stderr)
    text = sys.stdin.read() if prompt == "-" else prompt
    body: Json = {"prompt": text, "agent": agent or _first_agent(settings)}
    body |= {"model": model} if model else {}
    body |= {"timeout_seconds": timeout_seconds} if timeout_seconds is not None else {}
    body |= {"max_budget_usd": max_budget_usd} if max_budget_usd is not None else {}
    if repo is not None:
        body["workspace"] = {"repo": _repository(repo, progress), "kind": "clone"}
        body["workspace"] |= {"ref": ref} if ref else {}
    elif ref is not None:
        fail("--ref needs --repo")
    finished = _run(settings, msgspec.json.encode(body), progress)
    progress.finish()
    return _tell(finished, as_json=as_json, progress=progress)


def _run(settings: Settings, body: bytes, progress: Progress) -> Finished:
    principal = Principal(name="cli", scopes=ALL_SCOPES, local=True)
    request = submit_request(_parsed(body), principal, workspace_defaults(settings))
    job = partial(
        run_job,
        settings,
        request,
        show=progress.show,
        say=progress.say,
        report=lambda where, error: progress.say(f"crashed: {where}: {crash_lines(error)}"),
    )
    try:
        return trio.run(job)
    except (ServiceLives, Interrupted, BaseExceptionGroup) as error:
        found = sole(error)
        if isinstance(found, ServiceLives):
            return _hand_over(found.service, body, progress)
        if isinstance(found, Interrupted):
            raise CommandFailed(code=INTERRUPTED) from None
        raise


def _first_agent(settings: Settings) -> str:
    files = [file for folder in settings.agents.folder for file in sorted(folder.glob("*.md"))]
    if files:
        return files[0].stem
    return fail(
        "no agent is defined; define one in ./agents/NAME.md, or use --agent shell, "
        "for which PROMPT is a script"
    )


def _parsed(body: bytes) -> ExecuteBody:
    try:
        return parse_execute(body)
    except Problem as problem:
        fail(problem.detail, code=2)


def _hand_over(service: local.LocalService, body: bytes, progress: Progress) -> Finished:
    client = Client(url=service.url, token=service.token)
    job = str(client.post("/execute", body).json()["job_id"])
    interrupted = False
    seen = 0
    while True:
        try:
            for event in client.events(f"/jobs/{job}/events", after=seen):
                seen = event["seq"]
                progress.show(event)
            break
        except KeyboardInterrupt:
            if interrupted:
                progress.say("still reaping; the job's processes are ended first")
            interrupted = True
            client.post(f"/jobs/{job}/cancel")
    view = client.get(f"/jobs/{job}").body
    files = client.get(f"/jobs/{job}/files").json()["files"]
    return Finished(view=view, files=files, interrupted=interrupted)


def _repository(repo: str, progress: Progress) -> str:
    path = Path(repo).expanduser()
    if not path.exists():
        return repo
    found = _git(path, "status", "--porcelain", "--no-renames")
    if found is None:
        fail(f"{path} is no git repository")
    if found:
        changed = len(found.splitlines())
        progress.say(
            f"warning: {changed} uncommitted change(s) in {path} are not part of the job; "
            "it starts from HEAD"
        )
    return str(path.absolute())


def _git(path: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(path), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    except FileNotFoundError:
        fail("git is not installed; install it, then run this again")
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def _tell(finished: Finished, *, as_json: bool, progress: Progress) -> int:
    view: Json = msgspec.json.decode(finished.view, type=Json)
    if as_json:
        whole = finished.view[:-1] + b',"files":' + msgspec.json.encode(finished.files) + b"}"
        print(whole.decode())
    else:
        _tell_people(view, finished.files, progress)
    if finished.interrupted:
        return INTERRUPTED
    return 0 if view["status"] == "completed" else 1


def _tell_people(view: Json, files: list[Json], progress: Progress) -> None:
    if view["result"]:
        print(view["result"].rstrip("\n"))
    elif view["output"]:
        print("\n".join(view["output"]))
    for file in files:
        print(f"{file['status']} {file['path']}")
    sys.stdout.flush()
    usage = view["usage"]
    cost = f", ${usage['cost_usd']:.2f}" if usage["cost_usd"] else ""
    error = view["error"] or ""
    ending = error if error.startswith(view["status"]) else f"{view['status']}: {error}"
    progress.say(f"{ending.removesuffix(': ')}{cost}")
    follow = (
        f"watchkeeper diff {view['job_id']}" if files else f"watchkeeper replay {view['job_id']}"
    )
    progress.say(f"next: {follow}")
