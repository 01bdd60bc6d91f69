"""A service that kills itself with SIGKILL in a chosen window: the seams of the real one, wrapped.

Run as ``python killable_service.py DATA PORT_FILE WINDOW NTH``.
"""

import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from actors.limits import Limits  # noqa: E402
from actors.local_host import open_local_host  # noqa: E402
from actors.runtime import RuntimeConfig, Seams, open_runtime  # noqa: E402
from storage import events as e  # noqa: E402
from storage.folder import DataFolder  # noqa: E402
from storage.ids import IdSource  # noqa: E402
from storage.sqlite_log import SqliteEventLog  # noqa: E402
from web.app import create_app  # noqa: E402
from web.auth import ALL_SCOPES, Principal, TokenBook  # noqa: E402
from web.edge import Web  # noqa: E402
from web.server import listen, serve, url_of  # noqa: E402
from web.submission import WorkspaceDefaults  # noqa: E402

WINDOWS = (
    "commit_before_202",
    "started_before_spawn",
    "spawn_before_spawned",
    "inside_capture",
    "inside_recovery",
)
TOKEN = "campaign"


def kill_now():
    os.kill(os.getpid(), signal.SIGKILL)


@attrs.define
class Trigger:
    """Counts the passages of the chosen window; the nth one kills."""

    window: str
    nth: int

    def pass_by(self, window):
        if window == self.window:
            self.nth -= 1
            if self.nth == 0:
                kill_now()


class Wrapped:
    """Everything of another object, but for what a subclass overrides."""

    def __init__(self, inner, trigger):
        self._inner = inner
        self._trigger = trigger

    def __getattr__(self, name):
        return getattr(self._inner, name)


class KillableLog(Wrapped):
    async def append(self, request):
        committed = await self._inner.append(request)
        for record in committed:
            if isinstance(record.event, e.JobSubmitted):
                self._trigger.pass_by("commit_before_202")
            if isinstance(record.event, e.JobStarted):
                self._trigger.pass_by("started_before_spawn")
            if isinstance(record.event, (e.RunInterrupted, e.JobRequeued, e.ServiceStarted)):
                self._trigger.pass_by("inside_recovery")
        return committed


class KillableRun(Wrapped):
    async def offer(self):
        prepared = await self._inner.offer()
        self._trigger.pass_by("spawn_before_spawned")
        return prepared

    async def capture(self):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._kill_midway)
            captured = await self._inner.capture()
            nursery.cancel_scope.cancel()
        self._trigger.pass_by("inside_capture")
        return captured

    async def _kill_midway(self):
        await trio.sleep(0.01)
        self._trigger.pass_by("inside_capture")


class KillableHost(Wrapped):
    def open_run(self, spec):
        return KillableRun(self._inner.open_run(spec), self._trigger)

    def adopt_run(self, spec, workspace):
        return KillableRun(self._inner.adopt_run(spec, workspace), self._trigger)

    async def sweep(self, keep):
        self._trigger.pass_by("inside_recovery")
        found = await self._inner.sweep(keep)
        self._trigger.pass_by("inside_recovery")
        return found

    async def reap(self, job, epoch, keeper):
        reaped = await self._inner.reap(job, epoch, keeper)
        self._trigger.pass_by("inside_recovery")
        return reaped


async def main(data, port_file, window, nth):
    trigger = Trigger(window, nth)
    limits = Limits(capacity=4, queue_depth=10_000, grace_ms=200, drain_ms=5_000)
    config = RuntimeConfig(data=data, version="0.1.0", limits=limits, allow_shell=True)
    ids = IdSource()
    folder = DataFolder(data)

    @asynccontextmanager
    async def open_log(session):
        async with SqliteEventLog.open(
            folder.log, ids=ids, clock_ns=__import__("time").time_ns, session=session, die=die
        ) as log:
            yield KillableLog(log, trigger)

    @asynccontextmanager
    async def open_host(log_id):
        async with open_local_host(data, log_id=log_id, limits=limits) as host:
            yield KillableHost(host, trigger)

    def die(reason):
        print(reason, file=sys.stderr)
        kill_now()

    def crashed(where, error):
        import traceback

        print("CRASH", where, file=sys.stderr)
        traceback.print_exception(error)

    tokens = TokenBook().with_token(
        TOKEN, Principal(name="campaign", scopes=ALL_SCOPES, local=True)
    )
    listeners = await listen("127.0.0.1", 0)
    seams = Seams(ids=ids, open_log=open_log, open_host=open_host, on_crash=crashed)
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with open_runtime(config, seams) as runtime:
            web = Web(
                runtime=runtime,
                tokens=tokens,
                data=data,
                version="0.1.0",
                workspace=WorkspaceDefaults(local_repositories=True),
                report=crashed,
            )
            stop = trio.Event()

            async def on_signal():
                await signals.__anext__()
                await runtime.drain()
                stop.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(on_signal)
                temporary = port_file.with_suffix(".tmp")
                temporary.write_text(url_of(listeners))
                temporary.rename(port_file)
                await serve(create_app(web), listeners, stop=stop)
                nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
