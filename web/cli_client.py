"""Commands of a client: of a running service, or of the log when none lives."""

import sys
import urllib.parse
from pathlib import Path
from typing import Any

import click
import msgspec
import trio

from web import local
from web.cli_common import log_of, settings_of, with_config, with_json
from web.cli_group import fail
from web.client import Client
from web.settings import Settings

# Any: JSON of a job or of a list.
Json = dict[str, Any]


@click.command()
@click.argument("prompt")
@click.option("--agent", required=True, help="Who does the job.")
@click.option("--model", help="Model, for agents that take one.")
@click.option("--repo", help="Address of a repository, or a path on the service's machine.")
@click.option("--ref", help="Branch, tag or commit.")
@click.option("--key", help="Idempotency key: the same key makes one job.")
@with_json
@with_config
def submit(
    prompt: str,
    agent: str,
    model: str | None,
    repo: str | None,
    ref: str | None,
    key: str | None,
    *,
    as_json: bool,
    config: Path | None,
    data: Path | None,
) -> None:
    """Hand a job to the service: PROMPT, or - for standard input."""
    client = _client(settings_of(config, data))
    body: Json = {"prompt": sys.stdin.read() if prompt == "-" else prompt, "agent": agent}
    body |= {"model": model} if model else {}
    workspace = {name: text for name, text in (("repo", repo), ("ref", ref)) if text}
    body |= {"workspace": workspace} if workspace else {}
    headers = {"Idempotency-Key": key} if key else {}
    answer = client.post("/execute", msgspec.json.encode(body), headers).json()
    job = answer["job_id"]
    if as_json:
        print(msgspec.json.encode(answer).decode())
        return
    print(job)
    _next(f"watchkeeper logs -f {job}")


@click.command()
@click.option("--status", help="Only these, separated by commas.")
@click.option("--agent", help="Only of this agent.")
@click.option("--label", help="Only with this label, KEY:VALUE.")
@click.option("-n", "--limit", type=click.IntRange(1, 200), default=20, show_default=True)
@with_json
@with_config
def jobs(
    status: str | None,
    agent: str | None,
    label: str | None,
    limit: int,
    *,
    as_json: bool,
    config: Path | None,
    data: Path | None,
) -> None:
    """List jobs, newest first."""
    settings = settings_of(config, data)
    given = {"status": status, "agent": agent, "label": label, "limit": str(limit)}
    query = {name: value for name, value in given.items() if value is not None}
    if _service(settings) is not None:
        page = _client(settings).get(f"/jobs?{urllib.parse.urlencode(query)}").json()
    else:
        page = trio.run(_jobs_of_log, settings, {name: [value] for name, value in query.items()})
    if as_json:
        print(msgspec.json.encode(page).decode())
        return
    for job in page["jobs"]:
        prompt = (job["prompt"] or "")[:50]
        print(
            f"{job['job_id']}  {job['status']:<9}  {job['created_at'][:19]}  {job['agent']}: {prompt}"
        )
    if page["jobs"]:
        _next(f"watchkeeper status {page['jobs'][0]['job_id']}")
    else:
        print("no jobs", file=sys.stderr)


@click.command()
@click.argument("job")
@click.option("--at", "at_seq", type=click.IntRange(0), help="As it was at this seq of the log.")
@with_json
@with_config
def status(
    job: str, at_seq: int | None, *, as_json: bool, config: Path | None, data: Path | None
) -> None:
    """Show one job."""
    settings = settings_of(config, data)
    if _service(settings) is not None:
        query = "" if at_seq is None else f"?at_seq={at_seq}"
        view = _client(settings).get(f"/jobs/{_quoted(job)}{query}").body
    else:
        view = trio.run(_view_of_log, settings, job, at_seq)
    if as_json:
        print(view.decode())
        return
    _show(msgspec.json.decode(view, type=Json))


@click.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--stream", type=click.Choice(["stdout", "stderr"]), default="stdout")
@with_config
def logs(job: str, stream: str, *, follow: bool, config: Path | None, data: Path | None) -> None:
    """Show what a job wrote, byte for byte."""
    settings = settings_of(config, data)
    if _service(settings) is None:
        _write(trio.run(_artifact_of_log, settings, job, stream))
        return
    query = urllib.parse.urlencode({"stream": stream, "follow": str(follow).lower()})
    for chunk in _client(settings).chunks(f"/jobs/{_quoted(job)}/output?{query}"):
        _write(chunk)
    if follow:
        _next(f"watchkeeper status {job}")


@click.command()
@click.argument("job")
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait at most.")
@with_json
@with_config
def wait(
    job: str, timeout: float | None, *, as_json: bool, config: Path | None, data: Path | None
) -> int:
    """Wait until a job has ended; the exit code is 0 only if it completed."""
    client = _client(settings_of(config, data))
    left = timeout
    while True:
        step = 20.0 if left is None else min(20.0, left)
        view = client.get(f"/jobs/{_quoted(job)}/wait?timeout={step:g}").body
        shown: Json = msgspec.json.decode(view, type=Json)
        left = None if left is None else left - step
        if shown["finished_at"] is not None or left == 0:
            break
    print(view.decode() if as_json else shown["status"])
    if not as_json:
        _next(f"watchkeeper status {job}")
    return 0 if shown["status"] == "completed" else 1


@click.command()
@click.argument("job")
@with_config
def cancel(job: str, config: Path | None, data: Path | None) -> None:
    """End a job and all its processes; a job that has ended stays as it is."""
    answer = _client(settings_of(config, data)).post(f"/jobs/{_quoted(job)}/cancel")
    print("cancel accepted" if answer.status == 202 else f"already {answer.json()['status']}")
    _next(f"watchkeeper wait {job}")


@click.command()
@click.argument("job")
@with_config
def diff(job: str, config: Path | None, data: Path | None) -> None:
    """Show what a job changed, as a patch that git apply takes."""
    settings = settings_of(config, data)
    if _service(settings) is None:
        patch = trio.run(_artifact_of_log, settings, job, "diff")
    else:
        patch = _client(settings).get(f"/jobs/{_quoted(job)}/diff").body
    _write(patch)
    if sys.stdout.isatty():
        empty = "" if patch else "nothing was changed; "
        _next(f"{empty}watchkeeper diff {job} | git apply")


def _show(view: Json) -> None:
    times = [view[name] for name in ("created_at", "started_at", "finished_at")]
    rows = {
        "job": view["job_id"],
        "status": view["status"] + (f" ({view['cause']})" if view["cause"] else ""),
        "error": view["error"],
        "agent": view["agent"] + (f", {view['model']}" if view["model"] else ""),
        "prompt": view["prompt"],
        "times": " → ".join(time for time in times if time),
        "runs": view["attempts"],
        "base": view["workspace"]["base_commit"],
        "result": view["result"],
        "output": "\n".join(view["output"][-10:]) or None,
        "stderr": view["stderr"][-2_000:] or None,
        "erased": ", ".join(view["erased"]) or None,
    }
    for name, value in rows.items():
        if value is not None:
            indented = str(value).rstrip("\n").replace("\n", "\n          ")
            print(f"{name:<8}  {indented}")
    job = view["job_id"]
    _next(f"watchkeeper {'replay' if view['finished_at'] else 'logs -f'} {job}")


def _service(settings: Settings) -> local.LocalService | None:
    if settings.url_given:
        return local.LocalService(url=settings.url, token=settings.token or "", pid=0)
    return local.find(settings.server.data)


def _client(settings: Settings) -> Client:
    service = _service(settings)
    if service is None and settings.token is not None:
        service = local.LocalService(url=settings.url, token=settings.token, pid=0)
    if service is None:
        fail(
            f"no service lives on {settings.server.data}; start one with: watchkeeper serve, "
            "or set WATCHKEEPER_URL and WATCHKEEPER_TOKEN"
        )
    return Client(url=service.url, token=service.token)


async def _jobs_of_log(settings: Settings, query: dict[str, list[str]]) -> Json:
    from web import reads

    async with log_of(settings) as log:
        return await reads.jobs_page(log, reads.job_query(query))


async def _view_of_log(settings: Settings, job: str, at_seq: int | None) -> bytes:
    from web import reads

    async with log_of(settings) as log:
        return await reads.job_view(log, await reads.job_state(log, job, at_seq=at_seq))


async def _artifact_of_log(settings: Settings, job: str, name: str) -> bytes:
    from storage.artifacts import ArtifactStore
    from storage.folder import DataFolder
    from web import reads

    async with log_of(settings) as log:
        state = await reads.job_state(log, job)
        artifact = state.artifact(name)
        stored = None if artifact is None else await log.artifact(artifact.digest)
        if stored is None:
            fail(f"job {job} is {state.status} and has no {name}")
        store = ArtifactStore(DataFolder(settings.server.data).artifacts)
        return await store.read(stored)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _quoted(job: str) -> str:
    return urllib.parse.quote(job, safe="")


def _next(command: str) -> None:
    if sys.stderr.isatty():
        print(f"next: {command}", file=sys.stderr)
