"""What every route shares: its caller, its request id, its body, its reply."""

import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal

import attrs
from quart import Quart, Response, g, request
from quart.wrappers.response import ResponseBody

from web import views
from web.auth import Principal, Scope, TokenBook
from web.errors import Problem
from web.service import RuntimeApi
from web.submission import WorkspaceDefaults

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
KEEP_ALIVE_S: Final = 15.0

Access = Scope | Literal["public"]
# Any: the arguments of a view are the converted parts of its path.
View = Callable[..., Awaitable[Response]]

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
_JSON_TYPE: Final = re.compile(r"application/(?:[\w.-]+\+)?json", re.ASCII)


@attrs.frozen(kw_only=True)
class Web:
    """What the routes work with; ``data`` is the data folder, for the output of live runs."""

    runtime: RuntimeApi
    tokens: TokenBook
    data: Path
    version: str
    workspace: WorkspaceDefaults = attrs.field(factory=WorkspaceDefaults)
    keep_alive_s: float = KEEP_ALIVE_S
    report: Callable[[str, BaseException], None] = lambda _request_id, _error: None


class Routes:
    """The table of routes: each must say who may use it, so that none is open by mistake."""

    def __init__(self, app: Quart) -> None:
        self._app = app
        self.access: dict[str, Access] = {}

    def add(self, rule: str, view: View, *, access: Access, methods: Iterable[str]) -> None:
        """Add one route; its endpoint is the name of its view."""
        endpoint = view.__name__
        assert endpoint not in self.access, "each view has one route"
        self.access[endpoint] = access
        self._app.add_url_rule(rule, endpoint, view, methods=list(methods))

    def get(self, rule: str, view: View, *, access: Access = "read") -> None:
        """Add a route for GET."""
        self.add(rule, view, access=access, methods=["GET"])

    def post(self, rule: str, view: View, *, access: Access = "run") -> None:
        """Add a route for POST."""
        self.add(rule, view, access=access, methods=["POST"])


def request_id_of(value: str | None) -> str:
    """Answer the caller's request id when it is usable, else a new one."""
    if value is not None and _REQUEST_ID.fullmatch(value):
        return value
    return f"req_{secrets.token_hex(12)}"


def raw_headers() -> list[tuple[bytes, bytes]]:
    """Answer the headers of the current request as they were sent."""
    return list(request.scope["headers"])


def principal() -> Principal:
    """Answer the caller of the current request, which has been authenticated."""
    found = g.principal
    assert isinstance(found, Principal), "a route with a scope has a caller"
    return found


def request_id() -> str:
    """Answer the id of the current request."""
    return str(g.request_id)


async def json_body() -> bytes:
    """Answer the body of the current request; raises Problem 415, and 413 or 408 by Quart."""
    content_type = request.headers.get("Content-Type")
    if content_type is not None:
        media, _, parameters = content_type.partition(";")
        if _JSON_TYPE.fullmatch(media.strip().lower()) is None:
            raise Problem(
                415, "unsupported_media_type", "send the body as Content-Type: application/json"
            )
        charset = re.search(r"charset=\"?([\w-]+)", parameters.lower())
        if charset is not None and charset[1] not in {"utf-8", "utf8", "us-ascii"}:
            raise Problem(415, "unsupported_media_type", "the body must be UTF-8")
    data: Any = await request.get_data(cache=False, as_text=False, parse_form_data=False)
    assert isinstance(data, bytes), "asked for bytes"
    return data


def reply(body: bytes, *, status: int = 200, media: str = JSON) -> Response:
    """Answer bytes; ``nosniff`` because some of them were written by an agent."""
    response = Response(body, status=status, content_type=media)
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Cache-Control"] = "no-store"
    return response


def json_reply(value: views.Json, *, status: int = 200) -> Response:
    """Answer a JSON object."""
    return reply(views.encode(value), status=status)


def stream_reply(body: ResponseBody, *, media: str) -> Response:
    """Answer a stream: without a time limit, and unbuffered by proxies. HEAD has no body."""
    response = Response(b"" if request.method == "HEAD" else body, content_type=media)
    response.timeout = None
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Accel-Buffering"] = "no"
    response.headers.pop("Content-Length", None)
    return response


def flag(name: str) -> bool:
    """Answer a query parameter that is on or off; absent is off. Raises Problem 400."""
    value = request.args.get(name)
    if value in {None, "0", "false", "no"}:
        return False
    if value in {"", "1", "true", "yes"}:
        return True
    raise Problem(400, "bad_parameter", f"{name}: must be true or false", field=name)
