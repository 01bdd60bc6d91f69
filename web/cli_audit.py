"""Commands of an auditor: they read the log alone, with the service running or stopped."""

import sys
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import click
import msgspec
import trio

from web.cli_common import log_of, settings_of, with_config, with_json
from web.cli_group import fail
from web.settings import Settings

FOLLOW_S: Final = 0.3
FOUND: Final = 1
TORN: Final = 3
"""The file is not a whole database: usually a copy that was made while the service wrote."""


@click.command()
@click.argument("job")
@click.option("--at", "at_seq", type=click.IntRange(0), help="Only up to this seq of the log.")
@with_json
@with_config
def replay(
    job: str, at_seq: int | None, *, as_json: bool, config: Path | None, data: Path | None
) -> None:
    """Show the history of a job from the log alone: its events, and what they add up to."""
    trio.run(partial(_replay, settings_of(config, data), job, at_seq, as_json=as_json))


async def _replay(settings: Settings, job: str, at_seq: int | None, *, as_json: bool) -> None:
    from storage.ids import JobId
    from storage.replay import replay as replayed
    from web import reads, views
    from web.progress import Progress

    async with log_of(settings) as log:
        await reads.job_state(log, job, at_seq=at_seq)
        found = await replayed(log, JobId(job), at_seq)
        payloads = await log.payloads(views.events_digests(found.events))
        events = [views.event_view(record, payloads) for record in found.events]
        view = await reads.job_view(log, found.state)
        if as_json:
            whole = {"job": msgspec.Raw(view), "digest": found.digest, "events": events}
            print(views.encode(whole).decode())
            return
        progress = Progress(sys.stdout, prefix=lambda event: f"{event['seq']:>6}  ")
        for event in events:
            progress.show(event)
        progress.finish()
        print(f"{found.state.status} at seq {found.state.seq}, state {found.digest[:16]}")
        print(
            f"next: watchkeeper replay {job} --at {events[len(events) // 2]['seq']}",
            file=sys.stderr,
        )


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with what is committed.")
@click.option("--after", type=click.IntRange(0), default=0, help="Only after this seq.")
@with_json
@with_config
def events(
    after: int, *, follow: bool, as_json: bool, config: Path | None, data: Path | None
) -> None:
    """Show the events of the log, in commit order; --json is one object a line."""
    settings = settings_of(config, data)
    trio.run(partial(_events, settings, after, follow=follow, as_json=as_json))


async def _events(settings: Settings, after: int, *, follow: bool, as_json: bool) -> None:
    from web import views

    async with log_of(settings) as log:
        while True:
            records = await log.read_all(after=after, limit=500)
            payloads = await log.payloads(views.events_digests(records))
            for record in records:
                event = views.event_view(record, payloads)
                print(views.encode(event).decode() if as_json else _event_line(event))
                after = int(record.seq)
            sys.stdout.flush()
            if not records and not follow:
                return
            if not records:
                await trio.sleep(FOLLOW_S)


def _event_line(event: dict[str, object]) -> str:
    from web.progress import describe

    text = describe(event) or str(event["type"])
    stream = str(event["stream"]).removeprefix("job/")
    return f"{event['seq']:>6}  {event['recorded_at']}  {stream:<30}  {text}"


@click.command()
@click.option("--root", help="SIZE:HASH noted earlier; the log must still begin with it.")
@with_json
@with_config
def verify(root: str | None, *, as_json: bool, config: Path | None, data: Path | None) -> int:
    """Prove that the log is whole: every hash, every fold, every file beside it.

    Exit code 0: whole; 1: it contradicts itself; 3: the file is torn (a copy made by cp while
    the service wrote: use a backup).
    """
    from storage.folder import DataFolder
    from storage.verify import parse_root
    from storage.verify import verify as checked

    folder = DataFolder(settings_of(config, data).server.data)
    if not folder.log.is_file():
        fail(f"there is no log in {folder.path}; name its folder with --data")
    try:
        noted = None if root is None else parse_root(root)
    except ValueError as error:
        fail(f"--root: {error}", code=2)
    report = checked(folder.log, folder.artifacts, noted)
    code = TORN if report.torn else 0 if report.ok else FOUND
    mark = f"{report.size}:{report.root}"
    if as_json:
        findings = [attrs.asdict(f) for f in report.findings]
        whole = {"ok": report.ok, "torn": report.torn, "root": mark, "findings": findings}
        print(msgspec.json.encode(whole).decode())
        return code
    for finding in report.findings:
        where = "" if finding.seq is None else f" at seq {finding.seq}"
        print(f"{finding.kind}{where}: {finding.what}. {finding.remedy}", file=sys.stderr)
    verdict = "the file is torn" if report.torn else "whole" if report.ok else "NOT whole"
    print(f"{verdict}: {report.size} events")
    print(f"root {mark}")
    if report.ok:
        print(f"next: note the root; later: watchkeeper verify --root {mark}", file=sys.stderr)
    return code
