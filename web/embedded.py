"""Jobs without a server: the runtime opened for as long as they take."""

import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final

import attrs
import msgspec
import trio

from storage.errors import FolderLocked
from storage.events import TERMINAL
from storage.ids import JobId, job_stream
from web import local, reads, views
from web.assembly import Opener, Report, open_embedded
from web.service import RuntimeApi, SubmitRequest
from web.settings import Settings

LOCK_RETRY_S: Final = 0.5

# Any: an event, or a changed file, as JSON.
Json = dict[str, Any]


@attrs.frozen(kw_only=True)
class Finished:
    """A job that is over: its view, its changed files, and whether somebody asked it to end."""

    view: bytes
    files: list[Json]
    interrupted: bool


class ServiceLives(Exception):
    """A service holds the data folder and takes jobs: hand over to it."""

    def __init__(self, service: local.LocalService) -> None:
        super().__init__(f"a service lives at {service.url}")
        self.service = service


class Interrupted(Exception):
    """The command was asked to end before there was a job."""


class _Run:
    """One embedded job and the signals that may end it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.interrupted = False
        self.waiting = trio.CancelScope()
        self.cancel: Callable[[], None] | None = None

    async def listen(self, signals: AsyncIterator[int]) -> None:
        """Cancel the job at the first signal; tell about patience at later ones."""
        async for _ in signals:
            if self.interrupted:
                self.say("still reaping; the job's processes are ended first")
                continue
            self.interrupted = True
            self.waiting.cancel()
            if self.cancel is not None:
                self.cancel()


async def run_job(
    settings: Settings,
    request: SubmitRequest,
    *,
    show: Callable[[Json], None],
    say: Callable[[str], None],
    report: Report,
    opener: Opener = open_embedded,
) -> Finished:
    """Run one job to its end; Ctrl-C cancels it and waits until it is reaped.

    Raises ServiceLives when a service holds the folder, Interrupted, AdmissionError. Another
    command that holds it is waited for.
    """
    run = _Run(say)
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.listen, signals)
            finished: Finished | None = None
            while finished is None:
                try:
                    async with opener(settings, report) as runtime:
                        finished = await _run_in(runtime, request, run, show)
                except FolderLocked as held:
                    await _wait_for_folder(settings, run, held)
            nursery.cancel_scope.cancel()
    return finished


async def _run_in(
    runtime: RuntimeApi, request: SubmitRequest, run: _Run, show: Callable[[Json], None]
) -> Finished:
    if run.interrupted:
        raise Interrupted
    submitted = await runtime.submit(request)
    async with trio.open_nursery() as nursery:
        ask = partial(runtime.cancel, by=request.by, request_id=None)
        run.cancel = partial(nursery.start_soon, ask, submitted.job_id)
        if run.interrupted:
            run.cancel()
        await follow_job(runtime, submitted.job_id, show)
        run.cancel = None
    finished = await finished_job(runtime, submitted.job_id, interrupted=run.interrupted)
    await runtime.drain()
    return finished


async def follow_job(runtime: RuntimeApi, job: JobId, show: Callable[[Json], None]) -> None:
    """Show each event of a job until its terminal one."""
    async with runtime.log.follow(stream=job_stream(job)) as records:
        async for record in records:
            payloads = await runtime.log.payloads(views.events_digests([record]))
            show(views.event_view(record, payloads))
            if isinstance(record.event, TERMINAL):
                return


async def finished_job(runtime: RuntimeApi, job: JobId, *, interrupted: bool = False) -> Finished:
    """Answer a job that is over."""
    state = await reads.job_state(runtime.log, job)
    view = await reads.job_view(runtime.log, state)
    files = await artifact_bytes(runtime, job, "files")
    found: list[Json] = [] if files is None else msgspec.json.decode(files, type=list[Json])
    return Finished(view=view, files=found, interrupted=interrupted)


async def artifact_bytes(runtime: RuntimeApi, job: JobId, name: str) -> bytes | None:
    """Answer the bytes of a job's artifact; None when there is none."""
    artifact = (await reads.job_state(runtime.log, job)).artifact(name)
    stored = None if artifact is None else await runtime.log.artifact(artifact.digest)
    if stored is None:
        return None
    return await trio.Path(runtime.artifacts.path(stored.file)).read_bytes()


async def _wait_for_folder(settings: Settings, run: _Run, held: FolderLocked) -> None:
    service = local.find(settings.server.data)
    if service is not None:
        raise ServiceLives(service)
    if run.interrupted:
        raise Interrupted
    holder = "another process" if held.pid is None else f"process {held.pid}"
    run.say(f"waiting for {holder}, which holds {held.folder}")
    run.waiting = trio.CancelScope()
    with run.waiting:
        await trio.sleep(LOCK_RETRY_S)
