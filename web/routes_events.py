"""Routes of events: pages of JSON, and streams that can be resumed."""

from functools import partial

from quart import Response, request

from storage.events import TERMINAL
from storage.ids import job_stream
from web import reads, sse
from web.edge import Routes, Web, json_reply, reply, stream_reply


def add(routes: Routes, web: Web) -> None:
    """Add these routes."""
    log = web.runtime.log

    async def job_events(job_id: str) -> Response:
        state = await reads.job_state(log, job_id)
        if _wants_stream():
            return await _job_stream(web, state.job_id)
        after, limit = _after(), reads.page_limit(request.args.get("limit"))
        records = await log.read(job_stream(state.job_id))
        later = [record for record in records if record.seq > after][: limit + 1]
        return json_reply(await reads.events_page(log, later, after=after, limit=limit))

    async def all_events() -> Response:
        if _wants_stream():
            after, reset = _start(web)
            frames = partial(
                sse.log_frames, log, after=after, reset=reset, keep_alive_s=web.keep_alive_s
            )
            return stream_reply(sse.StreamBody(frames), media=sse.MEDIA_TYPE)
        after, limit = _after(), reads.page_limit(request.args.get("limit"))
        records = await log.read_all(after=after, limit=limit + 1)
        return json_reply(await reads.events_page(log, records, after=after, limit=limit))

    routes.get("/jobs/<job_id>/events", job_events)
    routes.get("/events", all_events)


async def _job_stream(web: Web, job_id: str) -> Response:
    log = web.runtime.log
    state = await reads.job_state(log, job_id)
    after, reset = _start(web)
    if state.terminal and reset is None:
        records = await log.read(job_stream(state.job_id))
        last = next(r.seq for r in records if isinstance(r.event, TERMINAL))
        if after >= last:
            return reply(b"", status=204)
    frames = partial(
        sse.job_frames,
        log,
        state.job_id,
        after=after,
        reset=reset,
        keep_alive_s=web.keep_alive_s,
    )
    return stream_reply(sse.StreamBody(frames), media=sse.MEDIA_TYPE)


def _start(web: Web) -> tuple[int, bytes | None]:
    asked = request.headers.get("Last-Event-ID", request.args.get("after"))
    head = int(web.runtime.log.head)
    after, lost = sse.start_of(asked, head)
    return after, sse.reset_frame(asked or "", head) if lost else None


def _after() -> int:
    return reads.parse_integer("after", request.args.get("after", "0"))


def _wants_stream() -> bool:
    accepted = request.headers.get("Accept", "").lower().split(",")
    return any(item.split(";")[0].strip() == sse.MEDIA_TYPE for item in accepted)
