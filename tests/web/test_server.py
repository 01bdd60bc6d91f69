"""The server keeps its promises on real sockets, where stock hypercorn breaks them."""

import errno
import inspect
import json
import socket
from pathlib import Path

import pytest
import trio
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.tcp_server import TCPServer

from tests.web.conftest import TOKEN, Reports, Serve, read_to_end
from tests.web.fake_runtime import FakeRuntime
from web.server import PortTaken, listen

AUTH = f"Authorization: Bearer {TOKEN}"


def open_sockets() -> int:
    links = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return sum(str(fd.readlink()).startswith("socket:") for fd in links)


def status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


def problem(reply: bytes) -> dict[str, object]:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head
    assert b"x-request-id: " in head.lower()
    found = json.loads(body)
    assert {"type", "title", "status", "detail", "code"} <= set(found)
    assert found["status"] == status(reply)
    return found


async def until(check) -> None:
    with trio.fail_after(5):
        while not check():
            await trio.sleep(0.005)


async def test_a_connection_that_asked_to_be_closed_is_closed(serve_app: Serve) -> None:
    """SV083: Connection: close and HTTP/1.0 end with the reply."""
    served = await serve_app()

    reply = await served.get("/version")
    old = await served.raw(b"GET /version HTTP/1.0\r\n\r\n")

    assert status(reply) == status(old) == 200
    assert reply.endswith(b"}")


async def test_an_idle_connection_is_closed_at_the_keep_alive_limit(serve_app: Serve) -> None:
    """SV083: idle clients leak no descriptors."""
    served = await serve_app(keep_alive_s=0.1)
    before = open_sockets()

    streams = [await served.connect() for _ in range(10)]
    for stream in streams:
        await stream.send_all(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    replies = [await read_to_end(stream) for stream in streams]
    for stream in streams:
        await stream.aclose()

    assert all(status(reply) == 200 for reply in replies)
    await until(lambda: open_sockets() <= before)


async def test_a_connection_is_reused(serve_app: Serve) -> None:
    """Two requests on one connection are both answered."""
    served = await serve_app()
    async with await served.connect() as stream:
        for _ in range(2):
            await stream.send_all(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            data = b""
            while not data.endswith(b"}"):
                data += bytes(await stream.receive_some())
            assert status(data) == 200


async def test_the_descriptor_of_a_client_that_left_is_free_at_once(serve_app: Serve) -> None:
    """The end of the client's stream frees the socket, not the keep-alive limit."""
    served = await serve_app(keep_alive_s=60)
    before = open_sockets()

    for _ in range(20):
        async with await served.connect() as stream:
            await stream.send_all(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            await stream.receive_some()

    await until(lambda: open_sockets() <= before)


async def test_half_a_request_is_closed_at_the_keep_alive_limit(serve_app: Serve) -> None:
    """A client that sends half a head does not keep its connection."""
    served = await serve_app(keep_alive_s=0.1)

    reply = await served.raw(b"GET /version HTT")

    assert reply == b""


@pytest.mark.parametrize("length", [b"99999999999999999999999999", b"-5", b"x"])
async def test_an_absurd_content_length_is_refused(serve_app: Serve, length: bytes) -> None:
    """SV086: refused at once, not awaited."""
    served = await serve_app()
    head = b"POST /execute HTTP/1.1\r\nHost: x\r\n" + AUTH.encode()

    reply = await served.raw(head + b"\r\nContent-Length: " + length + b"\r\n\r\n")

    assert status(reply) in {400, 413}
    problem(reply)


async def test_a_body_above_the_limit_is_413(serve_app: Serve) -> None:
    """SV086: the declared length is enough to refuse."""
    served = await serve_app()
    head = f"POST /execute HTTP/1.1\r\nHost: x\r\n{AUTH}\r\nContent-Length: 99999999\r\n\r\n"

    reply = await served.raw(head.encode())

    assert problem(reply)["code"] == "body_too_large"


async def test_a_chunked_body_above_the_limit_is_413(serve_app: Serve, app) -> None:
    """The limit counts what comes, not only what was declared."""
    app.config["MAX_CONTENT_LENGTH"] = 1000
    served = await serve_app()
    head = f"POST /execute HTTP/1.1\r\nHost: x\r\n{AUTH}\r\nTransfer-Encoding: chunked\r\n\r\n"

    reply = await served.raw(head.encode() + b"7d0\r\n" + b"x" * 2000 + b"\r\n")

    assert problem(reply)["status"] == 413


async def test_a_stalled_body_is_408(serve_app: Serve, app) -> None:
    """SV086: a body that never comes ends the request."""
    app.config["BODY_TIMEOUT"] = 0.05
    served = await serve_app()
    head = f"POST /execute HTTP/1.1\r\nHost: x\r\n{AUTH}\r\nContent-Length: 10\r\n\r\n"

    reply = await served.raw(head.encode() + b"{")

    assert problem(reply)["status"] == 408


async def test_large_headers_are_431(serve_app: Serve) -> None:
    """Header bytes are bounded, whether they come in one read or in many."""
    served = await serve_app()

    reply = await served.get("/version", "X-Big: " + "x" * 40_000)

    assert status(reply) == 431
    problem(reply)


async def test_many_headers_are_431(serve_app: Serve) -> None:
    """The number of headers is bounded."""
    served = await serve_app()

    reply = await served.get("/version", *(f"X-{n}: 1" for n in range(150)))

    assert problem(reply)["status"] == 431


async def test_garbage_is_400(serve_app: Serve) -> None:
    """What is not HTTP is refused in the same envelope."""
    served = await serve_app()

    assert problem(await served.raw(b"\x00\x01 garbage\r\n\r\n"))["status"] == 400
    assert problem(await served.raw(b"GET /version HTTP/1.1\r\n\r\n"))["status"] == 400


async def test_contradicting_lengths_are_refused(serve_app: Serve) -> None:
    """Content-Length beside Transfer-Encoding is how requests are smuggled."""
    served = await serve_app()

    reply = await served.get("/version", "Content-Length: 3", "Transfer-Encoding: chunked")

    assert problem(reply)["status"] == 400


async def test_http2_by_prior_knowledge_is_refused(serve_app: Serve) -> None:
    """Hypercorn's HTTP/2 can be killed by any client, so it is not spoken."""
    served = await serve_app()

    reply = await served.raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))

    assert status(reply) in {400, 505}
    assert status(await served.get("/version")) == 200


async def test_an_upgrade_to_http2_is_ignored(serve_app: Serve) -> None:
    """The request is answered as HTTP/1.1."""
    served = await serve_app()
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")

    reply = await served.raw(
        "\r\n".join(
            ("GET /version HTTP/1.1", "Host: x", *upgrade, "Connection: close", "", "")
        ).encode()
    )

    assert reply.startswith(b"HTTP/1.1 200")


async def test_an_upgrade_to_a_websocket_is_ignored(serve_app: Serve) -> None:
    """No route speaks WebSocket; the request is answered as plain HTTP."""
    served = await serve_app()

    reply = await served.get("/version", "Connection: Upgrade", "Upgrade: websocket")

    assert reply.startswith(b"HTTP/1.1 200")


async def test_an_error_in_an_application_ends_only_its_request(
    serve_app: Serve, runtime: FakeRuntime, reports: Reports
) -> None:
    """A crash is a 500 with the request's id, and the next request is served."""
    served = await serve_app()
    runtime.refuse = RuntimeError("a bug with a secret")
    body = b'{"prompt": "x", "agent": "echo"}'
    head = f"POST /execute HTTP/1.1\r\nHost: x\r\n{AUTH}\r\nConnection: close\r\n"

    reply = await served.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    assert problem(reply)["status"] == 500
    assert b"secret" not in reply
    assert len(reports.seen) == 1
    assert status(await served.get("/version")) == 200


async def test_an_error_in_a_connection_ends_only_that_connection(
    serve_app: Serve, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash inside the connection's own code never ends the server."""
    served = await serve_app()
    original = HTTPStream.handle

    async def crash(self, event) -> None:
        if getattr(event, "raw_path", b"") == b"/crash":
            raise KeyError("boom")
        await original(self, event)

    monkeypatch.setattr(HTTPStream, "handle", crash)

    reply = await served.get("/crash")

    assert reply == b""
    await until(lambda: len(reports.seen) == 1)
    assert status(await served.get("/version")) == 200


async def test_a_client_that_does_not_read_can_not_hang_a_stop(
    serve_app: Serve, runtime: FakeRuntime, request_of
) -> None:
    """A send has a deadline, and a stop shortens it."""
    served = await serve_app(send_deadline_s=60, graceful_s=0.2)
    job = (await runtime.submit(request_of())).job_id
    await runtime.start(job)
    await runtime.verdict(job)
    await runtime.store(job, "stdout", b"x" * 30_000_000)
    await runtime.end(job)
    stream = await served.connect()
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await stream.send_all(f"GET /jobs/{job}/output HTTP/1.1\r\nHost: x\r\n{AUTH}\r\n\r\n".encode())
    await stream.receive_some(10)
    await trio.sleep(0.1)

    served.stop.set()
    with trio.fail_after(3):
        await served.done.wait()

    await stream.aclose()


async def test_a_client_that_does_not_read_is_let_go_at_the_send_deadline(
    serve_app: Serve, runtime: FakeRuntime, request_of
) -> None:
    """The descriptor of a reader that does not read is freed."""
    served = await serve_app(send_deadline_s=0.1)
    before = open_sockets()
    job = (await runtime.submit(request_of())).job_id
    await runtime.start(job)
    await runtime.verdict(job)
    await runtime.store(job, "stdout", b"x" * 30_000_000)
    await runtime.end(job)
    stream = await served.connect()
    await stream.send_all(f"GET /jobs/{job}/output HTTP/1.1\r\nHost: x\r\n{AUTH}\r\n\r\n".encode())

    await until(lambda: open_sockets() <= before + 1)

    await stream.aclose()


async def test_a_cancelled_server_frees_its_port_and_its_clients(serve_app: Serve) -> None:
    """SV088: the port can be bound again, clients see the end."""
    scope = trio.CancelScope()
    served = await serve_app(scope=scope)
    stream = await served.connect()
    await stream.send_all(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    await stream.receive_some()

    scope.cancel()
    with trio.fail_after(5):
        await served.done.wait()

    assert (await read_to_end(stream)).endswith((b"", b"}"))
    await stream.aclose()
    again = await listen("127.0.0.1", served.port)
    await again[0].aclose()


async def test_a_stop_closes_idle_connections_at_once(serve_app: Serve) -> None:
    """A graceful stop does not wait for the keep-alive limit."""
    served = await serve_app(keep_alive_s=60, graceful_s=60)
    stream = await served.connect()
    await stream.send_all(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    await stream.receive_some()

    served.stop.set()
    with trio.fail_after(5):
        await served.done.wait()

    await stream.aclose()


async def test_a_stop_lets_a_request_under_way_finish(
    serve_app: Serve, runtime: FakeRuntime, request_of
) -> None:
    """A request that was taken is answered when the server stops."""
    served = await serve_app(graceful_s=5)
    job = (await runtime.submit(request_of())).job_id
    stream = await served.connect()
    await stream.send_all(f"GET /jobs/{job}/wait HTTP/1.1\r\nHost: x\r\n{AUTH}\r\n\r\n".encode())
    await until(lambda: runtime.log.waiting == 1)

    served.stop.set()
    await runtime.cancel(job, by="x", request_id=None)
    reply = await read_to_end(stream)

    assert status(reply) == 200
    await stream.aclose()


@pytest.mark.parametrize("kind", ["stream", "wait"])
async def test_a_client_that_leaves_ends_its_request(
    serve_app: Serve, runtime: FakeRuntime, request_of, kind: str
) -> None:
    """SV085: a stream and a silent wait are cancelled when the client goes away."""
    served = await serve_app()
    job = (await runtime.submit(request_of())).job_id
    path = f"/jobs/{job}/wait" if kind == "wait" else f"/jobs/{job}/events"
    stream = await served.connect()
    lines = (f"GET {path} HTTP/1.1", "Host: x", AUTH, "Accept: text/event-stream", "", "")
    await stream.send_all("\r\n".join(lines).encode())
    await until(lambda: runtime.log.waiting == 1)

    await stream.aclose()

    await until(lambda: runtime.log.waiting == 0)
    await trio.sleep(0.12)
    assert runtime.log.waiting == 0


async def test_a_client_that_leaves_in_its_body_ends_its_request(
    serve_app: Serve, runtime: FakeRuntime
) -> None:
    """SV085: a POST that never completes leaves nothing behind."""
    served = await serve_app()
    before = open_sockets()
    stream = await served.connect()
    head = f"POST /execute HTTP/1.1\r\nHost: x\r\n{AUTH}\r\nContent-Length: 100\r\n\r\n"
    await stream.send_all(head.encode() + b'{"prompt"')
    await trio.sleep(0.05)

    await stream.aclose()

    await until(lambda: open_sockets() <= before)
    assert runtime.requests == []


async def test_a_large_unread_body_does_not_hold_the_connection(serve_app: Serve) -> None:
    """An early refusal ends the connection though the client is still sending."""
    served = await serve_app()
    before = open_sockets()
    stream = await served.connect()
    head = b"POST /execute HTTP/1.1\r\nHost: x\r\nContent-Length: 20000000\r\n\r\n"
    await stream.send_all(head)

    async def send_for_ever() -> None:
        while True:
            await stream.send_all(b"x" * 65_536)

    with trio.fail_after(5):
        with pytest.raises(trio.BrokenResourceError):
            await send_for_ever()
    await stream.aclose()

    await until(lambda: open_sockets() <= before)


async def test_a_taken_port_says_what_to_do() -> None:
    """The error names the address and the way out."""
    listeners = await listen("127.0.0.1", 0)
    port = listeners[0].socket.getsockname()[1]

    with pytest.raises(PortTaken, match=f"127.0.0.1:{port}.*--port") as caught:
        await listen("127.0.0.1", port)

    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EADDRINUSE
    await listeners[0].aclose()


def test_the_private_seams_of_hypercorn_are_as_we_know_them() -> None:
    """A new hypercorn that moved them must be read before it is used."""
    seams = {
        TCPServer.__init__: ["self", "app", "config", "context", "state", "stream"],
        TCPServer.protocol_send: ["self", "event"],
        TCPServer._read_data: ["self"],
        TCPServer._close: ["self"],
        TCPServer._idle_timeout: ["self"],
        TCPServer._initiate_server_close: ["self"],
        H11Protocol._check_protocol: ["self", "event"],
        H11Protocol._create_stream: ["self", "request"],
        H11Protocol._send_error_response: ["self", "status_code"],
        H11Protocol._send_h11_event: ["self", "event"],
        HTTPStream.__init__: [
            "self",
            "app",
            "config",
            "context",
            "task_group",
            "ssl",
            "client",
            "server",
            "send",
            "stream_id",
        ],
    }
    for function, names in seams.items():
        assert list(inspect.signature(function).parameters) == names, function
