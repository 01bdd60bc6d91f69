"""The application over a fake runtime, and real sockets under it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import attrs
import pytest
import trio
from quart.typing import TestClientProtocol

from tests.web.fake_runtime import FakeRuntime
from web.app import WatchkeeperApp, create_app
from web.auth import ALL_SCOPES, Principal, TokenBook
from web.edge import Web
from web.server import ServerLimits, listen, serve
from web.service import RuntimeApi, SubmitRequest

TOKEN = "t0ken-all"
READER = "t0ken-read"
LOCAL = "t0ken-local"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


def tokens() -> TokenBook:
    book = TokenBook().with_token(TOKEN, Principal(name="all", scopes=ALL_SCOPES))
    book = book.with_token(READER, Principal(name="reader", scopes=frozenset({"read"})))
    local = Principal(name="local", scopes=ALL_SCOPES, local=True)
    return book.with_token(LOCAL, local)


@attrs.define
class Reports:
    seen: list[BaseException] = attrs.field(factory=list)

    def add(self, error: BaseException) -> None:
        self.seen.append(error)


@pytest.fixture
async def runtime(tmp_path: Path) -> FakeRuntime:
    return await FakeRuntime(tmp_path).open()


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
async def app(runtime: FakeRuntime, tmp_path: Path, reports: Reports) -> WatchkeeperApp:
    api: RuntimeApi = runtime
    web = Web(
        runtime=api,
        tokens=tokens(),
        data=tmp_path,
        version="0.1.0",
        keep_alive_s=0.05,
        report=lambda _request_id, error: reports.add(error),
    )
    return create_app(web)


@pytest.fixture
async def client(app: WatchkeeperApp) -> TestClientProtocol:
    return app.test_client()


@pytest.fixture
def request_of() -> Callable[..., SubmitRequest]:
    def make(**changes: object) -> SubmitRequest:
        return attrs.evolve(SubmitRequest(prompt="say hello", agent="echo", by="all"), **changes)

    return make


@attrs.define
class Served:
    """A server on a real port."""

    port: int
    stop: trio.Event
    limits: ServerLimits
    done: trio.Event = attrs.field(factory=trio.Event)

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def raw(self, request: bytes) -> bytes:
        """Send bytes, answer everything until the server closes."""
        stream = await self.connect()
        async with stream:
            await stream.send_all(request)
            return await read_to_end(stream)

    async def get(self, path: str, *headers: str, method: str = "GET") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", *headers]
        return await self.raw("\r\n".join((*lines, "", "")).encode("latin-1"))


async def read_to_end(stream: trio.SocketStream) -> bytes:
    data = b""
    with trio.fail_after(10):
        async for chunk in stream:
            data += chunk
    return data


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve_app(
    app: WatchkeeperApp, reports: Reports, nursery: trio.Nursery
) -> AsyncIterator[Serve]:
    servers: list[Served] = []

    async def start(
        target: object = None, scope: trio.CancelScope | None = None, **limits: float
    ) -> Served:
        listeners = await listen("127.0.0.1", 0)
        port = listeners[0].socket.getsockname()[1]
        served = Served(port=port, stop=trio.Event(), limits=ServerLimits(**limits))
        servers.append(served)

        async def run(task_status: trio.TaskStatus[None]) -> None:
            try:
                with scope or trio.CancelScope():
                    await serve(
                        app if target is None else target,  # type: ignore[arg-type]
                        listeners,
                        stop=served.stop,
                        limits=served.limits,
                        report=reports.add,
                        task_status=task_status,
                    )
            finally:
                served.done.set()

        await nursery.start(run)
        return served

    yield start
    for served in servers:
        served.stop.set()
    with trio.fail_after(10):
        for served in servers:
            await served.done.wait()
