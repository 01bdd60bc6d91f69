"""The service: runtime, HTTP, signals, and the file that says where it is."""

import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TextIO

import attrs
import msgspec
import trio

from web import local
from web.app import create_app
from web.assembly import Opener, crash_lines, open_service, workspace_defaults
from web.auth import ALL_SCOPES, Principal, TokenBook, new_token, token_from_file
from web.edge import Web
from web.server import listen, serve, url_of
from web.service import RuntimeApi
from web.settings import Settings
from web.version import VERSION

AsyncSignals = AsyncIterator[int]
TOKEN_FILE: Final = "token"  # noqa: S105  the name of a file


@attrs.frozen(kw_only=True)
class Journal:
    """What the service says of itself: lines of text, or JSON where no person reads."""

    out: TextIO
    as_json: bool

    def say(self, event: str, **fields: object) -> None:
        """Write one line."""
        if self.as_json:
            line = msgspec.json.encode({"event": event, **fields}, enc_hook=str).decode()
        else:
            pairs = " ".join(f"{name}={value}" for name, value in fields.items())
            line = f"{event} {pairs}".strip()
        print(line, file=self.out, flush=True)

    def crash(self, where: str, error: BaseException) -> None:
        """Write where an error came from; its text may hold what is secret."""
        self.say("crashed", where=where, trace=crash_lines(error))


def journal_for(settings: Settings, out: TextIO) -> Journal:
    """Answer a journal in the configured form."""
    form = settings.log.format
    return Journal(out=out, as_json=form == "json" or (form == "auto" and not out.isatty()))


def tokens_for(settings: Settings, local_token: str) -> tuple[TokenBook, str | None]:
    """Answer the tokens of this start, and the one that was made just now, to be printed once."""
    book = TokenBook()
    made: str | None = None
    everything = Principal(name="default", scopes=ALL_SCOPES)
    if settings.token is not None:
        book = book.with_token(settings.token, everything)
    else:
        token, is_new = token_from_file(settings.server.data / TOKEN_FILE)
        book = book.with_token(token, everything)
        made = token if is_new else None
    return book.with_token(
        local_token, Principal(name="local", scopes=ALL_SCOPES, local=True)
    ), made


async def run_service(
    settings: Settings,
    *,
    out: TextIO | None = None,
    opener: Opener = open_service,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until SIGTERM or SIGINT: then drain and stop; a second signal ends the drain.

    Raises FolderLocked, PortTaken, LogTooNew.
    """
    journal = journal_for(settings, out or sys.stderr)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        listeners = await listen(settings.server.host, settings.server.port)
        try:
            async with opener(settings, journal.crash) as runtime:
                local_token = new_token()
                tokens, made = tokens_for(settings, local_token)
                url = url_of(listeners)
                service = local.LocalService(url=url, token=local_token, pid=os.getpid())
                async with _announced(settings, service):
                    _greet(journal, settings, url, made)
                    await _serve(
                        settings, runtime, tokens, listeners, signals, journal, task_status
                    )
        finally:
            with trio.CancelScope(shield=True):
                for listener in listeners:
                    await listener.aclose()


async def _serve(
    settings: Settings,
    runtime: RuntimeApi,
    tokens: TokenBook,
    listeners: list[trio.SocketListener],
    signals: AsyncSignals,
    journal: Journal,
    task_status: trio.TaskStatus[str],
) -> None:
    web = Web(
        runtime=runtime,
        tokens=tokens,
        data=settings.server.data,
        version=VERSION,
        workspace=workspace_defaults(settings),
        report=lambda request_id, error: journal.crash(f"request {request_id}", error),
    )
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        url = url_of(listeners)
        nursery.start_soon(_stop_on_signal, signals, runtime, stop, journal)
        task_status.started(url)
        await serve(
            create_app(web),
            listeners,
            stop=stop,
            report=lambda error: journal.crash("connection", error),
        )
        nursery.cancel_scope.cancel()


async def _stop_on_signal(
    signals: AsyncSignals, runtime: RuntimeApi, stop: trio.Event, journal: Journal
) -> None:
    number = await signals.__anext__()
    journal.say("draining", signal=signal.Signals(number).name, limit_ms=runtime.limits.drain_ms)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_on_signal, signals, nursery.cancel_scope)
        await runtime.drain()
        nursery.cancel_scope.cancel()
    journal.say("stopped")
    stop.set()


async def _cancel_on_signal(signals: AsyncSignals, scope: trio.CancelScope) -> None:
    await signals.__anext__()
    scope.cancel()


@asynccontextmanager
async def _announced(settings: Settings, service: local.LocalService) -> AsyncGenerator[None, None]:
    local.announce(settings.server.data, service)
    try:
        yield
    finally:
        local.withdraw(settings.server.data)


def _greet(journal: Journal, settings: Settings, url: str, made: str | None) -> None:
    journal.say("serving", url=url, version=VERSION, data=settings.server.data, pid=os.getpid())
    if made is not None:
        path = settings.server.data / TOKEN_FILE
        journal.say("token_made", token=made, kept_in=path, note="shown once")
