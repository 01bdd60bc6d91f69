"""The application: all routes behind one door that asks for a token."""

from collections.abc import Callable
from typing import Final

import trio
from hypercorn.typing import ASGISendCallable, ASGISendEvent
from quart import Quart, Request, Response, g, request
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.exceptions import HTTPException, MethodNotAllowed
from werkzeug.routing import BaseConverter

from actors.errors import ActorsError
from storage.errors import StorageError
from web import routes_events, routes_files, routes_health, routes_jobs
from web.auth import authenticate, require
from web.edge import Routes, Web, raw_headers, request_id_of
from web.errors import PROBLEM_TYPE, Problem, from_error, of_status, problem_body
from web.schemas import BODY_BYTES_MAX

BODY_TIMEOUT_S: Final = 60


class ShieldedConnection(TrioASGIHTTPConnection):
    """One request whose last send can not be cut in the middle, and whose errors are heard of.

    Quart-Trio cancels a request when it hears of the disconnect, and hypercorn says
    "disconnect" inside the last send: unshielded, the connection is never recycled nor closed.
    """

    async def handle_request(  # type: ignore[override]  # as TrioASGIHTTPConnection has it
        self, nursery: trio.Nursery, request: Request, send: ASGISendCallable
    ) -> None:
        """Answer one request."""

        async def shielded(message: ASGISendEvent) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            with trio.CancelScope(shield=last):
                await send(message)

        try:
            await super().handle_request(nursery, request, shielded)
        except* Exception as group:
            # Too late for a reply: the connection is cut, so that nobody takes it for whole.
            assert isinstance(self.app, WatchkeeperApp), "it made this connection"
            self.app.report("stream", group)
            raise


class ExactPath(BaseConverter):
    """The rest of a path, whatever is in it: names of files may hold any character."""

    part_isolating = False
    regex = r"[\s\S]+"
    weight = 200


class WatchkeeperApp(QuartTrio):
    """Quart on trio, with the connection above."""

    asgi_http_class = ShieldedConnection
    access: dict[str, str]
    report: Callable[[str, BaseException], None]


def create_app(web: Web) -> WatchkeeperApp:
    """Answer the application; it owns nothing and starts nothing."""
    app = WatchkeeperApp("web", static_folder=None, template_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = BODY_BYTES_MAX
    app.config["BODY_TIMEOUT"] = BODY_TIMEOUT_S
    app.config["PROPAGATE_EXCEPTIONS"] = False
    app.url_map.merge_slashes = False
    app.url_map.converters["exact"] = ExactPath
    routes = Routes(app)
    for part in (routes_jobs, routes_events, routes_files, routes_health):
        part.add(routes, web)
    _guard(app, web, routes)
    _refuse(app, web)
    app.access = {**routes.access}
    app.report = web.report
    return app


def _guard(app: Quart, web: Web, routes: Routes) -> None:
    async def before() -> None:
        g.request_id = request_id_of(request.headers.get("X-Request-Id"))
        g.principal = None
        access = routes.access.get(request.endpoint or "")
        if access == "public":
            try:
                g.principal = authenticate(raw_headers(), web.tokens)
            except Problem:
                g.principal = None
            return
        g.principal = authenticate(raw_headers(), web.tokens)
        require(g.principal, access or "read")

    async def after(response: Response) -> Response:
        response.headers["X-Request-Id"] = g.request_id
        return response

    app.before_request(before)
    app.after_request(after)


def _refuse(app: Quart, web: Web) -> None:
    async def problem(error: Problem) -> Response:
        response = Response(problem_body(error), status=error.status, content_type=PROBLEM_TYPE)
        for name, value in error.headers:
            response.headers[name] = value
        return response

    async def http(error: HTTPException) -> Response:
        found = of_status(error.code or 500, error.description)
        if isinstance(error, MethodNotAllowed):
            allow = ", ".join(sorted(error.valid_methods or ()))
            found.headers = (("Allow", allow),)
            found.detail = f"this route answers {allow}"
        return await problem(found)

    async def expected(error: ActorsError | StorageError) -> Response:
        found = from_error(error)
        if found.status >= 500 and found.code == "internal":
            web.report(g.request_id, error)
        return await problem(found)

    async def crashed(error: Exception) -> Response:
        web.report(g.request_id, error)
        return await problem(of_status(500, f"an internal error; its id is {g.request_id}"))

    app.register_error_handler(Problem, problem)
    app.register_error_handler(HTTPException, http)
    app.register_error_handler(ActorsError, expected)
    app.register_error_handler(StorageError, expected)
    app.register_error_handler(Exception, crashed)
