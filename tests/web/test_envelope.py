"""Every refusal, wherever it comes from, has the one envelope."""

import json

import pytest

from tests.web.conftest import LOCAL, READER, TOKEN, Serve
from tests.web.fake_runtime import FakeRuntime

BODY = b'{"prompt": "x", "agent": "echo"}'
HEAD_OF_JSON = b"Content-Type: application/json\r\n"


def request(line: bytes, headers: bytes = b"", body: bytes = b"", token: str = TOKEN) -> bytes:
    auth = f"Authorization: Bearer {token}\r\n".encode() if token else b""
    length = b"Content-Length: %d\r\n" % len(body) if body else b""
    start = line + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return start + auth + headers + length + b"\r\n" + body


REFUSED = {
    400: request(b"POST /execute", HEAD_OF_JSON, b"[]"),
    401: request(b"GET /jobs", token="not-a-token"),
    403: request(b"POST /execute", HEAD_OF_JSON, BODY, token=READER),
    404: request(b"GET /no/such/route"),
    405: request(b"DELETE /jobs"),
    413: request(b"POST /execute", b"Content-Length: 99999999\r\n"),
    415: request(b"POST /execute", b"Content-Type: text/plain\r\n", BODY),
    422: request(b"POST /execute", HEAD_OF_JSON, b"{}"),
    431: request(b"GET /version", b"X-Big: " + b"x" * 40_000 + b"\r\n"),
    500: request(b"GET /health"),
    505: b"GET / HTTP/3.0\r\n\r\n",
}


@pytest.mark.parametrize("status", REFUSED)
async def test_every_refusal_has_one_envelope(
    serve_app: Serve, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """SV092: router, parser, door, body, handler and server refuse in the same form."""
    monkeypatch.setattr(runtime, "host_info", lambda: 1 / 0)
    served = await serve_app()

    reply = await served.raw(REFUSED[status])

    head, _, body = reply.partition(b"\r\n\r\n")
    assert int(head.split(b" ", 2)[1]) == status
    assert b"content-type: application/problem+json" in head.lower()
    assert b"x-request-id: " in head.lower()
    problem = json.loads(body)
    assert {"type", "title", "status", "detail", "code"} <= set(problem)
    assert problem["status"] == status
    assert "\n" not in problem["detail"]
    assert "Traceback" not in body.decode()
    assert len(body) < 4096


async def test_every_token_meets_the_same_door(serve_app: Serve) -> None:
    """SV092: a refusal says nothing that depends on how the token is wrong."""
    served = await serve_app()

    wrong = [await served.raw(request(b"GET /jobs", token=token)) for token in ("x", LOCAL + "x")]

    bodies = [reply.partition(b"\r\n\r\n")[2] for reply in wrong]
    assert bodies[0] == bodies[1]
