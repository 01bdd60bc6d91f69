"""The service starts, says where it is, drains at a signal and leaves nothing behind."""

import io
import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from storage.errors import FolderLocked
from tests.web.fake_runtime import FakeRuntime
from web import local
from web.client import Client, ClientError
from web.config import load
from web.server import PortTaken, listen
from web.serving import Journal, journal_for, run_service
from web.settings import Settings

PREFIX = ["line", "shown"]


def settings_for(tmp_path: Path, **env: str) -> Settings:
    options = {"server.data": str(tmp_path / "data"), "server.port": "0"}
    return load(None, options, environ={"HOME": str(tmp_path), **env}, folder=tmp_path)


class Service:
    """A service over a fake runtime, in this process."""

    def __init__(self, runtime: FakeRuntime, settings: Settings) -> None:
        self.runtime = runtime
        self.settings = settings
        self.out = io.StringIO()
        self.url = ""
        self.ended = trio.Event()

    @asynccontextmanager
    async def open(self, *_: object) -> AsyncGenerator[FakeRuntime, None]:
        yield self.runtime

    async def start(self, nursery: trio.Nursery) -> None:
        async def run(task_status: trio.TaskStatus[str]) -> None:
            await run_service(
                self.settings, out=self.out, opener=self.open, task_status=task_status
            )
            self.ended.set()

        self.url = await nursery.start(run)

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.out.getvalue().splitlines()]

    async def ask(self, call, *arguments, **named):
        return await trio.to_thread.run_sync(partial(call, *arguments, **named))

    async def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        with trio.fail_after(5):
            await self.ended.wait()


@pytest.fixture
async def service(runtime: FakeRuntime, tmp_path: Path, nursery: trio.Nursery) -> Service:
    found = Service(runtime, settings_for(tmp_path))
    await found.start(nursery)
    return found


async def test_a_service_says_where_it_is_in_a_private_file(service: Service) -> None:
    """The file has mode 0600, lives as long as the service, and its token is local."""
    data = service.settings.server.data
    found = local.find(data)
    assert found is not None
    assert (data / local.FILE).stat().st_mode & 0o777 == 0o600

    client = Client(url=found.url, token=found.token)
    body = b'{"prompt": "true", "agent": "shell", "workspace": {"repo": "/srv/x"}}'
    reply = await service.ask(client.post, "/execute", body)
    await service.stop()

    assert reply.status == 202
    assert service.runtime.requests[0].local is True
    assert found.url == service.url
    assert local.find(data) is None


async def test_a_token_is_made_once_and_printed_once(
    service: Service, tmp_path: Path, nursery
) -> None:
    """The second start finds it in the folder and does not show it."""
    made = next(line for line in service.lines() if line["event"] == "token_made")
    client = Client(url=service.url, token=made["token"])
    assert (await service.ask(client.get, "/jobs")).status == 200
    await service.stop()

    again = Service(await FakeRuntime(tmp_path / "again").open(), settings_for(tmp_path))
    await again.start(nursery)
    reply = await again.ask(Client(url=again.url, token=made["token"]).get, "/jobs")
    await again.stop()

    assert reply.status == 200
    assert "token_made" not in again.out.getvalue()
    assert made["token"] not in again.out.getvalue()


async def test_a_configured_token_is_the_only_one(
    runtime: FakeRuntime, tmp_path: Path, nursery
) -> None:
    """No file is made, and the token is not written anywhere."""
    service = Service(runtime, settings_for(tmp_path, WATCHKEEPER_TOKEN="given-token"))
    await service.start(nursery)

    good = await service.ask(Client(url=service.url, token="given-token").get, "/jobs")
    with pytest.raises(ClientError, match="WATCHKEEPER_TOKEN") as caught:
        await service.ask(Client(url=service.url, token="other").get, "/jobs")
    await service.stop()

    assert (good.status, caught.value.status) == (200, 401)
    assert not (service.settings.server.data / "token").exists()
    assert "given-token" not in service.out.getvalue()


async def test_a_signal_drains_while_the_service_still_answers(
    service: Service, monkeypatch
) -> None:
    """503 with Retry-After during the drain, then the end."""
    from actors.errors import Draining

    go_on = trio.Event()

    async def drain() -> None:
        service.runtime.draining = True
        service.runtime.refuse = Draining(3)
        await go_on.wait()

    monkeypatch.setattr(service.runtime, "drain", drain)
    token = json.loads((service.settings.server.data / local.FILE).read_bytes())["token"]
    client = Client(url=service.url, token=token)

    os.kill(os.getpid(), signal.SIGTERM)
    with trio.fail_after(5):
        while not service.runtime.draining:
            await trio.sleep(0.005)
    with pytest.raises(ClientError) as caught:
        await service.ask(client.post, "/execute", b'{"prompt": "x", "agent": "echo"}')
    go_on.set()
    with trio.fail_after(5):
        await service.ended.wait()

    assert (caught.value.status, caught.value.code) == (503, "draining")
    assert [line["event"] for line in service.lines()][-2:] == ["draining", "stopped"]


async def test_a_second_signal_ends_the_drain(service: Service, monkeypatch) -> None:
    """Nobody has to wait for the limit."""
    draining = trio.Event()

    async def drain() -> None:
        draining.set()
        await trio.sleep_forever()

    monkeypatch.setattr(service.runtime, "drain", drain)

    os.kill(os.getpid(), signal.SIGINT)
    with trio.fail_after(5):
        await draining.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await service.ended.wait()


async def test_a_taken_port_or_folder_ends_the_start(runtime: FakeRuntime, tmp_path: Path) -> None:
    """Both errors leave no listener and no file."""
    listeners = await listen("127.0.0.1", 0)
    port = listeners[0].socket.getsockname()[1]
    options = {"server.data": str(tmp_path / "data"), "server.port": str(port)}
    settings = load(None, options, environ={"HOME": "/"}, folder=tmp_path)

    with pytest.raises(PortTaken):
        await run_service(settings, out=io.StringIO())
    await listeners[0].aclose()

    @asynccontextmanager
    async def locked(*_: object) -> AsyncGenerator[FakeRuntime, None]:
        raise FolderLocked("x", 7)
        yield runtime

    with pytest.raises(FolderLocked, match="process 7"):
        await run_service(settings, out=io.StringIO(), opener=locked)

    assert not (tmp_path / "data" / local.FILE).exists()
    again = await listen("127.0.0.1", port)
    await again[0].aclose()


async def test_a_client_reads_a_stream_over_reconnects(service: Service, request_of) -> None:
    """Events are seen once, in order, to the end."""
    token = json.loads((service.settings.server.data / local.FILE).read_bytes())["token"]
    client = Client(url=service.url, token=token)
    job = await service.runtime.run(request_of())

    events = await service.ask(lambda: list(client.events(f"/jobs/{job}/events")))
    later = await service.ask(
        lambda: list(client.events(f"/jobs/{job}/events", after=events[3]["seq"]))
    )
    chunks = await service.ask(lambda: b"".join(client.chunks(f"/jobs/{job}/output")))
    await service.stop()

    assert [event["type"] for event in events][:2] == ["job.submitted", "job.started"]
    assert events[-1]["type"] == "job.completed"
    assert later == events[4:]
    assert chunks == b""


def test_a_service_that_is_not_there_is_said_in_one_line() -> None:
    """With what to do."""
    with pytest.raises(ClientError, match="watchkeeper serve") as caught:
        Client(url="http://127.0.0.1:1", token="x").get("/jobs")

    assert caught.value.status is None
    with pytest.raises(ClientError, match="no http"):
        Client(url="ftp://x", token="x").get("/jobs")


def test_a_file_of_a_dead_service_is_not_believed(tmp_path: Path) -> None:
    """After kill -9 the file stays; its process does not."""
    local.announce(tmp_path, local.LocalService(url="http://x", token="t", pid=2**30))

    assert local.find(tmp_path) is None
    (tmp_path / local.FILE).write_bytes(b"{")
    assert local.find(tmp_path) is None


def test_the_journal_never_holds_the_text_of_an_error(tmp_path: Path) -> None:
    """It could be a prompt: where it came from is enough."""
    journal = journal_for(settings_for(tmp_path), io.StringIO())

    try:
        raise ValueError("the secret prompt")
    except ValueError as error:
        journal.crash("job", error)

    assert "secret" not in journal.out.getvalue()
    assert "test_serving.py" in journal.out.getvalue()
    text = Journal(out=io.StringIO(), as_json=False)
    text.say("serving", url="u")
    assert text.out.getvalue() == "serving url=u\n"
