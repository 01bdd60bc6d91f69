"""One HTTP/1.1 connection: hypercorn's, with its measured faults mended.

Each override names the fault. What is overridden is private to hypercorn, so the version is
pinned and a test compares the signatures that this file leans on.
"""

from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Final

import attrs
import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.events import Request
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import parse_socket_addr

from web.edge import request_id_of
from web.errors import PROBLEM_TYPE, Problem, of_status, problem_body

HEADERS_BYTES_MAX: Final = 32 * 1024
HEADERS_MAX: Final = 100
SEND_DEADLINE_S: Final = 30.0

_GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError)


@attrs.define(kw_only=True, eq=False)
class Sends:
    """The sends that are under way, so that a stop can shorten their deadlines.

    ``deadline_s`` is how long one send may take: a reader that does not read is let go then.
    """

    deadline_s: float = SEND_DEADLINE_S
    end_at: float = float("inf")
    scopes: set[trio.CancelScope] = attrs.field(factory=set)

    def open(self) -> trio.CancelScope:
        """Answer the shielded scope for one send."""
        deadline = min(trio.current_time() + self.deadline_s, self.end_at)
        return trio.CancelScope(shield=True, deadline=deadline)

    def stop_by(self, at: float) -> None:
        """Let no send go on beyond a time."""
        self.end_at = min(self.end_at, at)
        for scope in self.scopes:
            scope.deadline = min(scope.deadline, self.end_at)


class Http1(H11Protocol):
    """HTTP/1.1 and nothing else: no HTTP/2, no WebSocket, every refusal in our envelope."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """Take no upgrade: in hypercorn's HTTP/2 a client that vanishes ends the process."""

    async def _create_stream(self, request: h11.Request) -> None:
        problem = refusal(request)
        if problem is not None:
            await self._send_problem(problem)
            await self.send(Closed())
            return
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1
        await self.context.mark_request()

    async def _send_error_response(self, status_code: int) -> None:
        await self._send_problem(
            of_status(status_code, "the request is not HTTP/1.1 as we read it")
        )

    async def _send_problem(self, problem: Problem) -> None:
        body = problem_body(problem)
        headers = [
            (b"content-type", PROBLEM_TYPE.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            (b"x-request-id", request_id_of(None).encode()),
        ]
        await self._send_h11_event(
            h11.Response(
                status_code=problem.status,
                headers=list(chain(headers, self.config.response_headers("h11"))),
            )
        )
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


class Wrapper(ProtocolWrapper):
    """Hypercorn's choice of a protocol, which is made: HTTP/1.1."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        task_group: TaskGroup,
        state: ConnectionState,
        ssl: bool,
        client: tuple[str, int] | None,
        server: tuple[str, int] | None,
        send: Callable[[Event], Awaitable[None]],
        alpn_protocol: str | None = None,
    ) -> None:
        del alpn_protocol
        super().__init__(
            app,
            config,
            context,
            task_group,
            state,
            ssl,
            client,
            server,
            send,
            "http/1.1",
        )
        self.protocol = Http1(
            app,
            config,
            context,
            task_group,
            state,
            ssl,
            client,
            server,
            send,
        )


class Connection(TCPServer):
    """One connection, from accept to close."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        state: ConnectionState,
        stream: trio.SocketStream,
        sends: Sends,
    ) -> None:
        super().__init__(app, config, context, state, stream)  # type: ignore[arg-type]
        self._sends = sends
        self._reading = trio.CancelScope()

    async def run(self) -> None:
        """Serve the connection until it ends; whatever happens, its socket is closed."""
        socket = self.stream.socket
        try:
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
            async with TaskGroup() as task_group:
                self._task_group = task_group
                self.protocol = Wrapper(
                    self.app,
                    self.config,
                    self.context,
                    task_group,
                    ConnectionState(self.state),
                    False,
                    client,
                    server,
                    self.protocol_send,
                )
                await self.protocol.initiate()
                await self.idle_task.restart(self._task_group, self._idle_timeout)
                with self._reading:
                    await self._read_data()
                # Fault: the idle task kept the socket of a client that had gone.
                await self.idle_task.stop()
        except OSError:
            pass
        finally:
            await trio.aclose_forcefully(self.stream)

    async def protocol_send(self, event: Event) -> None:
        """Send, or do what an event says; a send has a deadline (fault: it had none)."""
        if isinstance(event, RawData):
            await self._send(event.data)
        elif isinstance(event, Closed):
            await self._close()
            await self.protocol.handle(Closed())
            # Fault: a reader that waits for an application which has ended waits for ever.
            self._reading.cancel()
        else:
            await super().protocol_send(event)

    async def _send(self, data: bytes) -> None:
        broken = False
        async with self.send_lock:
            with self._sends.open() as scope:
                self._sends.scopes.add(scope)
                try:
                    await self.stream.send_all(data)
                except _GONE:
                    broken = True
                finally:
                    self._sends.scopes.discard(scope)
        if broken or scope.cancelled_caught:
            await trio.aclose_forcefully(self.stream)
            await self.protocol.handle(Closed())
            self._reading.cancel()

    async def _read_data(self) -> None:
        while True:
            try:
                data = await self.stream.receive_some(MAX_RECV)
            except _GONE:
                break
            await self.protocol.handle(RawData(bytes(data)))
            if data == b"":
                break
        await self.protocol.handle(Closed())

    async def _initiate_server_close(self) -> None:
        await super()._initiate_server_close()
        self._reading.cancel()


def refusal(request: h11.Request) -> Problem | None:
    """Answer why a request is refused before any of our code sees it; None: it is not."""
    if request.method == b"PRI" or request.http_version not in {b"1.0", b"1.1"}:
        return of_status(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
    size = sum(len(name) + len(value) for name, value in request.headers)
    if size > HEADERS_BYTES_MAX or len(list(request.headers)) > HEADERS_MAX:
        return of_status(431, f"headers may have {HEADERS_BYTES_MAX} bytes in {HEADERS_MAX} lines")
    names = {name.lower() for name, _ in request.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        return of_status(400, "Content-Length and Transfer-Encoding contradict each other")
    if not request.target.startswith(b"/"):
        return of_status(400, "the request target must be a path")
    return None
