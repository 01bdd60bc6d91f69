"""The HTTP server: listens, serves connections, and lets go of everything when it stops."""

import errno
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

import attrs
import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState
from hypercorn.utils import wrap_app

from web.connection import HEADERS_BYTES_MAX, SEND_DEADLINE_S, Connection, Sends

BACKLOG: Final = 1_024
KEEP_ALIVE_REQUESTS_MAX: Final = 100_000


@attrs.frozen(kw_only=True)
class ServerLimits:
    """Seconds: an idle connection is closed after ``keep_alive_s``, a send that does not
    progress after ``send_deadline_s``; a stop waits ``graceful_s`` for what is under way."""

    keep_alive_s: float = 5.0
    send_deadline_s: float = SEND_DEADLINE_S
    graceful_s: float = 3.0


class PortTaken(Exception):
    """The address can not be listened on."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"can not listen on {host}:{port}: {reason}; use another --port")
        self.host = host
        self.port = port


async def serve(
    app: ASGIFramework,
    listeners: list[trio.SocketListener],
    *,
    stop: trio.Event,
    limits: ServerLimits | None = None,
    report: Callable[[BaseException], None] = lambda _error: None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until ``stop`` is set or the caller is cancelled; the listeners are closed then.

    A stop closes idle connections at once and waits a bounded time for requests under way. An
    error inside a connection ends that connection, never the server; ``report`` hears of it.
    """
    limits = limits or ServerLimits()
    config = server_config(limits)
    context = WorkerContext(None)
    sends = Sends(deadline_s=limits.send_deadline_s)
    wrapped = wrap_app(app, config.wsgi_max_body_size, "asgi")

    async def handle(stream: trio.SocketStream) -> None:
        try:
            await Connection(wrapped, config, context, ConnectionState({}), stream, sends).run()
        except* Exception as group:  # noqa: BLE001  the border of one connection
            report(group)

    async with trio.open_nursery() as handlers:
        try:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(
                    partial(trio.serve_listeners, handle, listeners, handler_nursery=handlers)
                )
                task_status.started()
                await stop.wait()
                accepting.cancel_scope.cancel()
        finally:
            end_at = trio.current_time() + limits.graceful_s
            sends.stop_by(end_at)
            handlers.cancel_scope.deadline = min(handlers.cancel_scope.deadline, end_at)
            await context.terminated.set()


def server_config(limits: ServerLimits) -> Config:
    """Answer hypercorn's settings."""
    config = Config()
    config.keep_alive_timeout = limits.keep_alive_s
    config.keep_alive_max_requests = KEEP_ALIVE_REQUESTS_MAX
    config.h11_max_incomplete_size = HEADERS_BYTES_MAX
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = None
    return config


async def listen(host: str, port: int) -> list[trio.SocketListener]:
    """Answer listeners on an address; port 0 takes a free one. Raises PortTaken."""
    try:
        return list(await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        reason = "another program listens there" if taken else (error.strerror or str(error))
        raise PortTaken(host, port, reason) from error


def url_of(listeners: list[trio.SocketListener]) -> str:
    """Answer the address of the first listener, as a client on this machine reaches it."""
    name = listeners[0].socket.getsockname()
    host, port = str(name[0]), int(name[1])
    if listeners[0].socket.family == socket.AF_INET6:
        host = "::1" if host == "::" else host
        return f"http://[{host}]:{port}"
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"  # noqa: S104
