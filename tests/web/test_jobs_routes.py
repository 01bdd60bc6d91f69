"""Jobs over HTTP: what is accepted, refused, listed and shown."""

import json

import pytest

from actors.errors import DiskLow, Draining, QueueFull
from storage import events as e
from storage.errors import DiskFull
from storage.ids import IdSource
from tests.web.conftest import AUTH, Serve
from tests.web.fake_runtime import FakeRuntime
from web import views

OLD_REQUEST = {
    "prompt": "fix it",
    "agent": "echo",
    "max_budget_usd": 1.5,
    "timeout_seconds": 60,
    "metadata": {"ticket": 7},
}
VIEW_KEYS = [
    "job_id",
    "status",
    "cause",
    "prompt",
    "agent",
    "model",
    "metadata",
    "created_at",
    "started_at",
    "finished_at",
    "exit_code",
    "result",
    "output",
    "stderr",
    "error",
    "usage",
    "workspace",
    "attempts",
    "owner",
    "seq",
]


async def post(client, body: object, **headers: str):
    return await client.post("/execute", json=body, headers={**AUTH, **headers})


async def body_of(reply) -> dict:
    return json.loads(await reply.get_data())


async def test_an_old_request_is_accepted_unchanged(client, runtime: FakeRuntime) -> None:
    """The fields of the old service mean what they meant."""
    reply = await post(client, OLD_REQUEST)

    body = await body_of(reply)
    request = runtime.requests[0]
    assert reply.status_code == 202
    assert body == {"job_id": body["job_id"], "status": "queued"}
    assert reply.headers["Location"] == f"/jobs/{body['job_id']}"
    assert (request.timeout_ms, request.max_budget_microusd) == (60_000, 1_500_000)
    assert request.by == "all"
    assert request.request_id == reply.headers["X-Request-Id"]


async def test_defaults_are_those_of_the_contract(client, runtime: FakeRuntime) -> None:
    """2700 s, 5 dollars, priority 0, one attempt, scratch without a repository."""
    await post(client, {"prompt": "x", "agent": "echo"})

    request = runtime.requests[0]
    assert (request.timeout_ms, request.max_budget_microusd) == (2_700_000, 5_000_000)
    assert (request.priority, request.max_attempts, request.metadata) == (0, 1, None)
    assert request.workspace == e.WorkspaceRequest(kind="scratch")


async def test_a_repository_means_a_clone(client, runtime: FakeRuntime) -> None:
    """The kind follows the repository unless it is said."""
    await post(client, OLD_REQUEST | {"workspace": {"repo": "https://host/x.git", "ref": "v1"}})

    workspace = runtime.requests[0].workspace
    assert (workspace.kind, workspace.repo, workspace.ref) == ("clone", "https://host/x.git", "v1")


async def test_metadata_comes_back_as_the_text_it_was(client) -> None:
    """SV097: numbers of any length and their spelling survive."""
    text = b'{ "n": ' + b"9" * 400 + b', "f": 1.0, "e": 1e5, "u": "\\u00e9" }'
    sent = b'{"prompt": "x", "agent": "echo", "metadata": ' + text + b"}"

    reply = await client.post(
        "/execute", data=sent, headers={**AUTH, "Content-Type": "application/json"}
    )
    job = (await body_of(reply))["job_id"]
    shown = await (await client.get(f"/jobs/{job}", headers=AUTH)).get_data()

    assert reply.status_code == 202
    assert b'"metadata":' + text in shown


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 1),
        ("prompt", None),
        ("agent", ""),
        ("agent", None),
        ("model", 3),
        ("timeout_seconds", 0),
        ("timeout_seconds", 86_401),
        ("timeout_seconds", "60"),
        ("timeout_seconds", True),
        ("timeout_seconds", 10**400),
        ("max_budget_usd", 0),
        ("max_budget_usd", -1),
        ("max_budget_usd", 10**400),
        ("max_attempts", 0),
        ("max_attempts", 11),
        ("max_attempts", 1.5),
        ("max_attempts", 10**30),
        ("priority", -101),
        ("priority", 101),
        ("metadata", [1]),
        ("metadata", "x"),
        ("metadata", {"x": "y" * 70_000}),
        ("labels", {"a": 1}),
        ("labels", {"": "x"}),
        ("labels", {str(n): "x" for n in range(33)}),
        ("webhook", "ftp://x"),
        ("workspace", 1),
        ("workspace.repo", 1),
        ("workspace.kind", "bare"),
        ("workspace.repo", "--upload-pack=x"),
        ("workspace.repo", "ext::sh -c x"),
        ("workspace.repo", "/etc"),
        ("workspace.repo", "file:///etc"),
        ("workspace.ref", "-x"),
        ("prompt", "x" * (8 * 1024 * 1024 + 1)),
    ],
)
async def test_a_bad_field_is_422_and_named(client, runtime, field: str, value: object) -> None:
    """The reply is bounded and says which field is at fault (SV097)."""
    name, _, inner = field.partition(".")

    reply = await post(client, OLD_REQUEST | {name: {inner: value} if inner else value})

    body = await body_of(reply)
    assert reply.status_code == 422
    assert body["field"].split(".")[0] == name
    assert field.rsplit(".", 1)[-1] in body["detail"]
    assert len(await reply.get_data()) < 4096
    assert runtime.requests == []


@pytest.mark.parametrize("field", ["prompt", "agent"])
async def test_a_missing_field_is_422_and_named(client, field: str) -> None:
    """Required fields are asked for by name."""
    body = dict(OLD_REQUEST)
    del body[field]

    reply = await post(client, body)

    assert reply.status_code == 422
    assert (await body_of(reply))["field"] == field


@pytest.mark.parametrize("field", ["prompt", "agent", "model", "metadata", "labels", "session_id"])
async def test_a_nul_is_400_and_named(client, runtime, field: str) -> None:
    """SV058: before anything is queued."""
    values = {"metadata": {"a": ["x", {"b\x00": 1}]}, "labels": {"a": "\x00"}}

    reply = await post(client, OLD_REQUEST | {field: values.get(field, "a\x00b")})

    assert reply.status_code == 400
    assert (await body_of(reply))["field"] == field
    assert runtime.requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"x"',
        b"1",
        b"true",
        b"null",
        b"{",
        b"{]",
        b"\xff\xfe",
        b"{}}",
        b"nul",
        b"\xef\xbb\xbf{}",
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b"[" * 10_000,
        b"[" * 5_000 + b"]" * 5_000,
        b'{"prompt":' * 10_000,
        rb'{"prompt": "\ud800"}',
        b'{"prompt": "x", "agent": "echo", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
        b'{"prompt": "x", "agent": "echo", "x": ' + b"[" * 200 + b"]" * 200 + b"}",
        rb'{"prompt": "x", "agent": "echo", "metadata": {"a": "\udc00"}}',
        b'{"prompt": "x", "agent": "echo", "metadata": {"a": "\xff"}}',
        b'{"prompt": "x\ny", "agent": "echo"}',
        b"\x00" * 100,
        b" " * 1000,
    ],
)
@pytest.mark.parametrize("path", ["/execute", "/jobs/{job}/messages"])
async def test_what_is_no_json_object_is_400(
    client, runtime, request_of, body: bytes, path: str
) -> None:
    """SV089, SV098: every route that takes a body refuses garbage alike."""
    job = (await runtime.submit(request_of())).job_id

    reply = await client.post(
        path.format(job=job), data=body, headers={**AUTH, "Content-Type": "application/json"}
    )

    assert reply.status_code == 400
    assert reply.headers["Content-Type"] == "application/problem+json"
    assert len(await reply.get_data()) < 4096


async def test_a_huge_wrong_body_gets_a_small_answer(client) -> None:
    """SV091: the first error only, never an echo of the input."""
    reply = await post(client, OLD_REQUEST | {"labels": [{"x" * 1000: "y" * 1000}] * 2000})

    assert reply.status_code == 422
    assert len(await reply.get_data()) < 1024


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 202),
        ("application/json; charset=UTF-8", 202),
        (None, 202),
        ("application/problem+json", 202),
        ("text/plain", 415),
        ("application/jsonx", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json; charset=utf-16", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
    ],
)
async def test_the_content_type_is_looked_at(
    serve_app: Serve, content_type: str | None, status: int
) -> None:
    """415 for another type, none at all is taken as JSON."""
    served = await serve_app()
    body = json.dumps(OLD_REQUEST)
    kind = "" if content_type is None else f"Content-Type: {content_type}\r\n"
    head = f"POST /execute HTTP/1.1\r\nHost: x\r\nAuthorization: {AUTH['Authorization']}\r\n"

    reply = await served.raw(
        f"{head}{kind}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )

    assert int(reply.split()[1]) == status


async def test_a_key_makes_one_job(client, runtime: FakeRuntime) -> None:
    """SV109: the same key and body give the same id, another body is a conflict."""
    first = await post(client, OLD_REQUEST, **{"Idempotency-Key": "k"})
    spaced = json.dumps(OLD_REQUEST, indent=3).encode()
    headers = {**AUTH, "Idempotency-Key": "k", "Content-Type": "application/json"}
    second = await client.post("/execute", data=spaced, headers=headers)
    other = await post(client, OLD_REQUEST | {"prompt": "else"}, **{"Idempotency-Key": "k"})

    assert await body_of(first) == await body_of(second)
    assert "Idempotent-Replay" not in first.headers
    assert second.headers["Idempotent-Replay"] == "true"
    assert (second.status_code, other.status_code) == (202, 409)
    assert len(runtime.requests) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\u00e9", "a\tb"])
async def test_a_key_that_can_not_be_kept_is_400(client, key: str) -> None:
    """Printable ASCII, 1 to 255."""
    reply = await post(client, OLD_REQUEST, **{"Idempotency-Key": key})

    assert reply.status_code == 400


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFull(7), 429, "queue_full"),
        (Draining(3), 503, "draining"),
        (DiskLow(60), 503, "disk_low"),
        (DiskFull(), 503, "disk_full"),
    ],
)
async def test_a_pause_says_when_to_come_again(
    client, runtime, error: Exception, status: int, code: str
) -> None:
    """Every pause carries Retry-After."""
    runtime.refuse = error

    reply = await post(client, OLD_REQUEST)

    assert reply.status_code == status
    assert (await body_of(reply))["code"] == code
    assert int(reply.headers["Retry-After"]) >= 1


async def test_unknown_names_are_422_with_what_exists(client) -> None:
    """The refusal lists the agents or the models."""
    agent = await body_of(await post(client, OLD_REQUEST | {"agent": "ghost"}))
    model = await body_of(await post(client, OLD_REQUEST | {"model": "no-such-model"}))

    assert (agent["status"], agent["field"], agent["code"]) == (422, "agent", "unknown_agent")
    assert "echo, shell" in agent["detail"]
    assert (model["field"], model["code"]) == ("model", "unknown_model")
    assert "haiku, sonnet" in model["detail"]


async def test_a_finished_job_is_shown_whole(client, runtime: FakeRuntime, request_of) -> None:
    """All fields of the contract, first and in its order."""
    job = await runtime.run(request_of(metadata=b'{"a":1}', labels={"team": "x"}))

    body = await body_of(await client.get(f"/jobs/{job}", headers=AUTH))

    assert list(body)[: len(VIEW_KEYS)] == VIEW_KEYS
    assert body["status"] == "completed"
    assert body["output"] == ["hello", "world"]
    assert (body["stderr"], body["result"], body["exit_code"]) == ("warned\n", "done", 0)
    assert (body["error"], body["cause"], body["attempts"]) == (None, None, 1)
    assert body["metadata"] == {"a": 1}
    assert body["created_at"] == "2026-01-01T00:00:03.123Z"
    assert body["labels"] == {"team": "x"}
    assert body["erased"] == []


async def test_every_view_of_the_past_has_the_bytes_it_had_live(
    client, runtime: FakeRuntime, request_of
) -> None:
    """?at_seq=N equals what was said when N was the head."""
    seen: dict[int, bytes] = {}

    async def look() -> None:
        seen[int(runtime.log.head)] = await (
            await client.get(f"/jobs/{job}", headers=AUTH)
        ).get_data()

    job = (await runtime.submit(request_of(metadata=b'{"n": 1e3}'))).job_id
    await look()
    await runtime.start(job)
    await look()
    await runtime.print(job, b"caf\xc3\xa9 \xff\n", stream="stdout")
    await look()
    await runtime.verdict(job, cause="agent_exit", result=None)
    await look()
    await runtime.end(job, "agent_exit")
    await look()
    await runtime.run(request_of())

    assert len(seen) == 5
    for seq, data in seen.items():
        then = await client.get(f"/jobs/{job}?at_seq={seq}", headers=AUTH)
        assert await then.get_data() == data


async def test_a_time_means_the_last_seq_before_it(
    client, runtime: FakeRuntime, request_of
) -> None:
    """?at=T is the state at that time."""
    job = await runtime.run(request_of())

    body = await body_of(await client.get(f"/jobs/{job}?at=2026-01-01T00:00:03.2Z", headers=AUTH))

    assert body["status"] == "queued"
    assert body["seq"] == 3


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("at_seq=999", 400),
        ("at_seq=1", 404),
        ("at_seq=0", 404),
        ("at_seq=-1", 400),
        ("at_seq=x", 400),
        ("at_seq=" + "9" * 400, 400),
        ("at_seq=9223372036854775808", 400),
        ("at=yesterday", 400),
        ("at=2026-01-01T00:00:00", 400),
        ("at=2020-01-01T00:00:00Z", 404),
        ("at_seq=3&at=2026-01-01T00:00:00Z", 400),
        ("at_seq=%D9%A3", 400),
    ],
)
async def test_points_outside_of_a_job_are_refused(
    client, runtime, request_of, query: str, status: int
) -> None:
    """Past the head 400, before the job's first event 404."""
    job = await runtime.run(request_of())

    reply = await client.get(f"/jobs/{job}?{query}", headers=AUTH)

    assert reply.status_code == status


async def test_an_erased_payload_shows_as_erased_at_every_seq(
    client, runtime: FakeRuntime, request_of
) -> None:
    """The field is null and named, then as now."""
    job = await runtime.run(request_of(metadata=b"{}"))
    state = runtime.state(job)
    for ref in (state.submitted.prompt, state.submitted.metadata, state.result):
        del runtime.disk.payloads[ref.digest]

    now = await body_of(await client.get(f"/jobs/{job}", headers=AUTH))
    then = await body_of(
        await client.get(f"/jobs/{job}?at_seq={state.submitted_seq}", headers=AUTH)
    )

    assert (now["prompt"], now["metadata"], now["result"]) == (None, None, None)
    assert now["erased"] == ["prompt", "metadata", "result"]
    assert then["erased"] == ["prompt", "metadata"]


@pytest.mark.parametrize("job", ["x", "job_0", "..", "job_" + "0" * 26, "%00", "job_" + "0" * 5000])
@pytest.mark.parametrize(
    "rest", ["", "/wait", "/events", "/output", "/diff", "/files", "/bundle", "/why"]
)
async def test_an_unknown_job_is_404_on_every_route(client, job: str, rest: str) -> None:
    """Whatever its id looks like."""
    reply = await client.get(f"/jobs/{job}{rest}", headers=AUTH)

    assert reply.status_code == 404


async def test_jobs_are_listed_newest_first_in_pages(
    client, runtime: FakeRuntime, request_of
) -> None:
    """The cursor neither skips nor repeats."""
    made = [(await runtime.submit(request_of())).job_id for _ in range(5)]

    seen, cursor = [], ""
    while cursor is not None:
        more = f"&cursor={cursor}" if cursor else ""
        page = await body_of(await client.get(f"/jobs?limit=2{more}", headers=AUTH))
        seen += [job["job_id"] for job in page["jobs"]]
        cursor = page["next_cursor"]

    assert seen == made[::-1]


async def test_jobs_are_filtered(client, runtime: FakeRuntime, request_of) -> None:
    """By status, agent, label, owner and time."""
    done = await runtime.run(request_of(labels={"team": "a"}))
    queued = (await runtime.submit(request_of(agent="shell"))).job_id
    created = views.timestamp(runtime.state(queued).created_at_ns).replace(".123", ".100")

    async def ids(query: str) -> list[str]:
        page = await body_of(await client.get(f"/jobs?{query}", headers=AUTH))
        return [job["job_id"] for job in page["jobs"]]

    assert await ids("status=completed") == [done]
    assert (
        await ids("status=queued,running") == await ids("status=queued&status=running") == [queued]
    )
    assert await ids("agent=shell") == [queued]
    assert await ids("label=team:a") == [done]
    assert await ids("owner=") == [queued, done]
    assert await ids(f"since={created}") == [queued]
    assert await ids(f"until={created}") == [done]


@pytest.mark.parametrize(
    "query",
    [
        "status=done",
        "limit=0",
        "limit=201",
        "limit=x",
        "cursor=!!",
        "cursor=abc",
        "label=x",
        "since=now",
        "until=99999-01-01T00:00:00Z",
        "colour=red",
        "cursor=%00",
        "status=",
    ],
)
async def test_a_bad_filter_is_400_and_named(client, query: str) -> None:
    """Also one that is misspelt."""
    reply = await client.get(f"/jobs?{query}", headers=AUTH)

    assert reply.status_code == 400
    assert (await body_of(reply))["field"] == query.split("=")[0]


async def test_cancel_is_accepted_once_and_quiet_afterwards(
    client, runtime: FakeRuntime, request_of
) -> None:
    """SV082: 202, then 200 without effect."""
    job = (await runtime.submit(request_of())).job_id

    first = await client.post(f"/jobs/{job}/cancel", headers=AUTH)
    head = runtime.log.head
    second = await client.post(f"/jobs/{job}/cancel", headers=AUTH)

    assert (first.status_code, second.status_code) == (202, 200)
    assert await body_of(second) == {"job_id": job, "status": "cancelled"}
    assert runtime.log.head == head
    assert runtime.cancels[0][1] == "all"
    unknown = f"/jobs/{IdSource().new_job()}/cancel"
    assert (await client.post(unknown, headers=AUTH)).status_code == 404


async def test_a_message_needs_a_running_agent(client, runtime: FakeRuntime, request_of) -> None:
    """409 where nobody can hear it."""
    job = (await runtime.submit(request_of())).job_id

    early = await client.post(f"/jobs/{job}/messages", json={"text": "hi"}, headers=AUTH)
    await runtime.start(job)
    heard = await client.post(f"/jobs/{job}/messages", json={"text": "hi"}, headers=AUTH)
    empty = await client.post(f"/jobs/{job}/messages", json={"text": ""}, headers=AUTH)

    assert (early.status_code, heard.status_code, empty.status_code) == (409, 202, 422)
    assert runtime.messages == [(job, "hi")]


async def test_waiting_returns_at_the_end_or_at_the_limit(
    client, runtime: FakeRuntime, request_of, nursery
) -> None:
    """The job as it is then."""
    job = (await runtime.submit(request_of())).job_id

    early = await body_of(await client.get(f"/jobs/{job}/wait?timeout=0.01", headers=AUTH))

    async def finish() -> None:
        await runtime.start(job)
        await runtime.verdict(job, cause="agent_exit", result=None)
        await runtime.end(job, "agent_exit")

    nursery.start_soon(finish)
    late = await body_of(await client.get(f"/jobs/{job}/wait?timeout=5", headers=AUTH))

    assert early["status"] == "queued"
    assert (late["status"], late["cause"], late["exit_code"]) == ("failed", "agent_exit", 3)
    assert late["error"] == "the agent ended with exit code 3"
    bad = await client.get(f"/jobs/{job}/wait?timeout=-1", headers=AUTH)
    assert bad.status_code == 400


async def test_why_and_readiness_are_told(client, runtime: FakeRuntime, request_of) -> None:
    """Why a job waits; whether the service takes jobs."""
    job = (await runtime.submit(request_of())).job_id

    why = await body_of(await client.get(f"/jobs/{job}/why", headers=AUTH))
    ready = await client.get("/ready")
    runtime.draining = True
    draining = await client.get("/ready")

    assert (why["position"], why["waits_for"]) == (0, "a free slot")
    assert (ready.status_code, draining.status_code) == (200, 503)


async def test_health_of_the_past_is_a_fold(client, runtime: FakeRuntime, request_of) -> None:
    """?at_seq=N shows the service as it was."""
    job = (await runtime.submit(request_of())).job_id
    await runtime.start(job)

    now = await body_of(await client.get("/health", headers=AUTH))
    then = await body_of(await client.get("/health?at_seq=3", headers=AUTH))

    assert (now["active"], now["queued"], now["capacity"]) == (1, 0, 2)
    assert (then["active"], then["queued"]) == (0, 1)
    assert "host" not in then
    assert (await client.get("/health?at_seq=99", headers=AUTH)).status_code == 400
