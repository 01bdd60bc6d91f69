"""A thin client of a running service, on the standard library alone."""

import http.client
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import attrs
import msgspec

TIMEOUT_S: Final = 30.0
STREAM_TIMEOUT_S: Final = 60.0
"""The service says every 15 s that a silent stream lives."""
RECONNECTS_MAX: Final = 30

# Any: JSON of a reply, shown or looked into by the commands.
Json = dict[str, Any]


class ClientError(Exception):
    """A request that was not answered as hoped; ``status`` None: the service was not reached."""

    def __init__(self, status: int | None, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@attrs.frozen(kw_only=True)
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Json:
        """Answer the body as a JSON object."""
        found: Json = msgspec.json.decode(self.body, type=dict[str, Any])
        return found


@attrs.frozen(kw_only=True)
class Client:
    """Speaks to one service; holds no connection between requests."""

    url: str
    token: str = attrs.field(repr=False)

    def get(self, path: str) -> Reply:
        """Answer a GET; raises ClientError for anything but 2xx."""
        return self._request("GET", path, None, {})

    def post(
        self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Answer a POST; raises ClientError for anything but 2xx."""
        return self._request("POST", path, body, headers or {})

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield a body as it arrives; raises ClientError."""
        with self._open("GET", path, None, {}, STREAM_TIMEOUT_S) as response:
            while chunk := response.read1(65_536):
                yield chunk

    def events(self, path: str, *, after: int = 0) -> Iterator[Json]:
        """Yield the events of a stream to its end, over reconnects; raises ClientError."""
        lost = 0
        while True:
            headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
            try:
                with self._open("GET", path, None, headers, STREAM_TIMEOUT_S) as response:
                    if response.status == 204:
                        return
                    for event, data in _frames(response):
                        lost = 0
                        if event == "end":
                            return
                        if event == "message":
                            found: Json = msgspec.json.decode(data, type=dict[str, Any])
                            after = found["seq"]
                            yield found
            except ClientError as error:
                if error.status is not None or lost >= RECONNECTS_MAX:
                    raise
            lost += 1
            time.sleep(min(0.1 * lost, 2.0))

    def _request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Reply:
        with self._open(method, path, body, headers, TIMEOUT_S) as response:
            return Reply(
                status=response.status, headers=dict(response.getheaders()), body=response.read()
            )

    @contextmanager
    def _open(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection(timeout_s)
        given = {"Authorization": f"Bearer {self.token}", **headers}
        if body is not None:
            given["Content-Type"] = "application/json"
        try:
            connection.request(method, path, body=body, headers=given)
            response = connection.getresponse()
            if not 200 <= response.status < 300:
                raise _refused(response.status, response.read(65_536))
            yield response
        except (OSError, http.client.HTTPException) as error:
            message = (
                f"the service at {self.url} does not answer ({_reason(error)}); "
                "start it with: watchkeeper serve"
            )
            raise ClientError(None, "unreachable", message) from error
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ClientError(None, "bad_url", f"{self.url} is no http or https address")
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        return kind(parts.hostname, parts.port, timeout=timeout_s)


def _refused(status: int, body: bytes) -> ClientError:
    try:
        problem = msgspec.json.decode(body, type=dict[str, Any])
        code, detail = str(problem["code"]), str(problem["detail"])
    except (msgspec.DecodeError, KeyError):
        return ClientError(status, "http", f"the service answered {status}")
    hint = "; set WATCHKEEPER_TOKEN to a token of this service" if status == 401 else ""
    return ClientError(status, code, detail + hint)


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def _frames(response: http.client.HTTPResponse) -> Iterator[tuple[str, bytes]]:
    event, data = "message", b""
    while line := response.readline():
        line = line.rstrip(b"\r\n")
        name, _, value = line.partition(b":")
        if name == b"event":
            event = value.strip().decode("utf-8", "replace")
        elif name == b"data":
            data += value.removeprefix(b" ")
        elif not line:
            if data:
                yield event, data
            event, data = "message", b""
