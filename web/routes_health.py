"""Routes of the service itself: health, readiness, version."""

from quart import Response, g, request

from web import reads, views
from web.auth import Principal
from web.edge import Routes, Web, json_reply
from web.service import RuntimeApi


def add(routes: Routes, web: Web) -> None:
    """Add these routes."""
    runtime = web.runtime

    async def health() -> Response:
        state = runtime.log.service_state
        may_read = isinstance(g.principal, Principal) and g.principal.may("read")
        at_seq = request.args.get("at_seq")
        if at_seq is not None and may_read:
            seq = reads.parse_integer("at_seq", at_seq)
            reads.check_point(runtime.log, seq)
            state = await runtime.log.read_service_state(seq)
        body = views.health_view(state)
        if may_read:
            body |= views.health_more(state)
            body |= {"host": host_block(runtime)} if at_seq is None else {}
        return json_reply(body)

    async def ready() -> Response:
        is_ready = runtime.ready and not runtime.draining
        body: views.Json = {"ready": is_ready, "draining": runtime.draining}
        response = json_reply(body, status=200 if is_ready else 503)
        if not is_ready:
            response.headers["Retry-After"] = "1"
        return response

    async def version() -> Response:
        return json_reply({"name": "watchkeeper", "version": web.version})

    routes.get("/health", health, access="public")
    routes.get("/ready", ready, access="public")
    routes.get("/version", version, access="public")


def host_block(runtime: RuntimeApi) -> views.Json:
    """Answer how the host is now; not part of any fold."""
    info = runtime.host_info()
    return {
        "containment": info.containment,
        "containment_why_not": dict(info.containment_why_not),
        "confined": info.confined,
        "disk_free_bytes": info.disk_free_bytes,
        "inodes_free": info.inodes_free,
        "degraded": list(info.degraded),
        "log_pending": info.log_pending,
    }
