"""Routes of jobs: submit, list, show, wait, cancel, speak to, explain."""

from quart import Response, request

from web import reads, views
from web.edge import Routes, Web, json_body, json_reply, principal, reply, request_id
from web.errors import bad_parameter
from web.schemas import parse_execute, parse_message
from web.submission import idempotency_key, submit_request


def add(routes: Routes, web: Web) -> None:
    """Add these routes."""
    runtime = web.runtime
    log = runtime.log

    async def execute() -> Response:
        key = idempotency_key(request.headers.get("Idempotency-Key"))
        body = parse_execute(await json_body())
        submitted = await runtime.submit(
            submit_request(
                body,
                principal(),
                web.workspace,
                request_id=request_id(),
                idempotency_key=key,
            )
        )
        response = json_reply({"job_id": submitted.job_id, "status": "queued"}, status=202)
        response.headers["Location"] = f"/jobs/{submitted.job_id}"
        if submitted.replay:
            response.headers["Idempotent-Replay"] = "true"
        return response

    async def list_jobs() -> Response:
        query = reads.job_query(request.args.to_dict(flat=False))
        return json_reply(await reads.jobs_page(log, query))

    async def show_job(job_id: str) -> Response:
        state = await reads.job_state(log, job_id, at_seq=await _asked_seq(web))
        return reply(await reads.job_view(log, state))

    async def wait_job(job_id: str) -> Response:
        text = request.args.get("timeout", "60")
        timeout_s = reads.parse_seconds("timeout", text, high=reads.WAIT_SECONDS_MAX)
        state = await reads.wait_terminal(log, job_id, timeout_s)
        return reply(await reads.job_view(log, state))

    routes.post("/execute", execute)
    routes.get("/jobs", list_jobs)
    routes.get("/jobs/<job_id>", show_job)
    routes.get("/jobs/<job_id>/wait", wait_job)
    _add_to_one(routes, web)


def _add_to_one(routes: Routes, web: Web) -> None:
    """Add what is said to one job, or asked of its actor."""
    runtime = web.runtime
    log = runtime.log

    async def cancel_job(job_id: str) -> Response:
        before = await reads.job_state(log, job_id)
        answer = await runtime.cancel(before.job_id, by=principal().name, request_id=request_id())
        state = await reads.job_state(log, job_id)
        body: views.Json = {"job_id": state.job_id, "status": state.status}
        return json_reply(body, status=202 if answer == "accepted" else 200)

    async def message_job(job_id: str) -> Response:
        state = await reads.job_state(log, job_id)
        text = parse_message(await json_body())
        await runtime.message(state.job_id, text, by=principal().name, request_id=request_id())
        return json_reply({"job_id": state.job_id, "status": state.status}, status=202)

    async def why_job(job_id: str) -> Response:
        state = await reads.job_state(log, job_id)
        return json_reply(views.why_view(state.job_id, await runtime.why(state.job_id)))

    routes.post("/jobs/<job_id>/cancel", cancel_job)
    routes.post("/jobs/<job_id>/messages", message_job)
    routes.get("/jobs/<job_id>/why", why_job)


async def _asked_seq(web: Web) -> int | None:
    at_seq, at = request.args.get("at_seq"), request.args.get("at")
    if at_seq is not None and at is not None:
        raise bad_parameter("at", "at_seq was given as well; use one of them")
    if at_seq is not None:
        return reads.parse_integer("at_seq", at_seq)
    if at is not None:
        return await web.runtime.log.seq_at(reads.parse_time("at", at))
    return None
