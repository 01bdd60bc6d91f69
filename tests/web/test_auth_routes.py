"""Every route is closed unless it is on the short public list."""

import json

import pytest

from tests.web.conftest import AUTH, LOCAL, READER, TOKEN, Serve
from tests.web.fake_runtime import FakeRuntime
from web.app import WatchkeeperApp
from web.auth import ALL_SCOPES, Principal, TokenBook, authenticate, token_from_file
from web.errors import Problem

PUBLIC = {"/health", "/ready", "/version"}
OLD_HEALTH = {"status", "busy", "active", "queued", "capacity"}


def every_route(app: WatchkeeperApp) -> list[tuple[str, str]]:
    found = []
    for rule in app.url_map.iter_rules():
        path = str(rule).replace("<job_id>", "job_0").replace("<exact:path>", "a/b")
        found += [(method, path) for method in sorted(rule.methods or ())]
    return found


async def test_every_route_but_the_public_ones_wants_a_token(app: WatchkeeperApp, client) -> None:
    """Deny by default, over all that the table of routes holds."""
    routes = every_route(app)
    assert len(routes) > 40

    for method, path in routes:
        reply = await client.open(path, method=method)
        if path in PUBLIC and method in {"GET", "HEAD", "OPTIONS"}:
            assert reply.status_code == 200, path
        else:
            assert reply.status_code == 401, (method, path)
            assert reply.headers["WWW-Authenticate"].startswith("Bearer")
        assert reply.headers["X-Request-Id"]


@pytest.mark.parametrize(
    "path",
    [
        "//v1/x",
        "/V1",
        "/v1/../jobs",
        "/jobs/",
        "/JOBS",
        "//jobs",
        "/",
        "/nothing",
        "/health/",
        "/health/../jobs",
        "/%6aobs",
        "/jobs%2f",
        "/ready/x",
        "/.%2e/jobs",
        "/jobs;x",
        "/static/x",
    ],
)
async def test_no_spelling_of_a_path_opens_a_route(serve_app: Serve, path: str) -> None:
    """SV104: unknown spellings are refused before anything is said about them."""
    served = await serve_app()

    without = await served.get(path)
    with_token = await served.get(path, f"Authorization: Bearer {TOKEN}")

    assert b" 401 " in without.split(b"\r\n")[0]
    assert without.split(b"\r\n")[0] != with_token.split(b"\r\n")[0]


async def test_each_route_states_its_scope(app: WatchkeeperApp) -> None:
    """A route without a stated scope can not be added."""
    endpoints = {rule.endpoint for rule in app.url_map.iter_rules()}

    assert endpoints == set(app.access)
    assert {e for e, access in app.access.items() if access == "public"} == {
        "health",
        "ready",
        "version",
    }


async def test_a_reader_can_not_change_anything(app: WatchkeeperApp, client) -> None:
    """The scope is checked on every route that writes."""
    for method, path in every_route(app):
        reply = await client.open(path, method=method, headers={"X-Api-Key": READER})
        if method == "POST":
            assert reply.status_code == 403
            assert (await reply.get_json())["code"] == "scope_missing"
        elif method == "GET":
            assert reply.status_code not in {401, 403}


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR", "Bearer "])
async def test_the_scheme_may_be_in_any_case(client, scheme: str) -> None:
    """SV101."""
    reply = await client.get("/jobs", headers={"Authorization": f"{scheme} {TOKEN}"})

    assert reply.status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN} x",
        f"Bearer{TOKEN}",
        f"Bearer {TOKEN.upper()}",
        "Bearer t\xf6k",
        "Bearer " + "x" * 9000,
    ],
)
async def test_any_other_credential_is_401(client, value: str) -> None:
    """SV103: other schemes, other bytes, bytes beyond ASCII."""
    reply = await client.get("/jobs", headers={"Authorization": value})

    assert reply.status_code == 401


async def test_a_credential_beyond_ascii_is_401_on_the_wire(serve_app: Serve) -> None:
    """SV103: bytes are compared, nothing raises."""
    served = await serve_app()

    for value in ("Bearer t\xf6k\xff", "Bearer \x80"):
        assert b" 401 " in (await served.get("/jobs", f"Authorization: {value}"))[:20]
    assert b" 401 " in (await served.get("/jobs", "X-Api-Key: \xf6"))[:20]


async def test_a_token_of_any_bytes_can_be_used() -> None:
    """A configured token beyond ASCII is compared as bytes."""
    book = TokenBook().with_token("tökén", Principal(name="x", scopes=ALL_SCOPES))

    found = authenticate([(b"authorization", b"Bearer " + "tökén".encode())], book)

    assert found.name == "x"


async def test_two_credential_headers_of_one_name_are_refused(serve_app: Serve) -> None:
    """Servers differ in which of two they take, so neither is taken."""
    served = await serve_app()
    good, bad = f"Authorization: Bearer {TOKEN}", "Authorization: Bearer no"

    for headers in ((good, bad), (bad, good), (good, good)):
        assert b" 401 " in (await served.get("/jobs", *headers))[:20]
    assert b" 401 " in (await served.get("/jobs", good, "X-Api-Key: no"))[:20]
    assert b" 200 " in (await served.get("/jobs", good, f"X-Api-Key: {TOKEN}"))[:20]


async def test_health_shows_a_stranger_the_five_old_fields(client) -> None:
    """The rest needs a token."""
    stranger = await (await client.get("/health")).get_json()
    wrong = await (await client.get("/health", headers={"X-Api-Key": "no"})).get_json()
    known = await (await client.get("/health", headers=AUTH)).get_json()

    assert set(stranger) == set(wrong) == OLD_HEALTH
    assert set(known) > OLD_HEALTH
    assert known["host"]["containment"] == "subreaper"
    assert known["host"]["containment_why_not"] == {"pidns": "unshare: Operation not permitted"}
    assert known["queue_depth"] == 4


async def test_a_request_id_is_echoed_or_made(client) -> None:
    """A usable id comes back, another is replaced."""
    echoed = await client.get("/version", headers={"X-Request-Id": "abc-1.2"})
    made = await client.get("/version", headers={"X-Request-Id": "a b\u00e9"})

    assert echoed.headers["X-Request-Id"] == "abc-1.2"
    assert made.headers["X-Request-Id"].startswith("req_")


async def test_unknown_routes_and_methods_are_problems(client) -> None:
    """404 and 405 come in the one envelope, 405 with Allow."""
    missing = await client.get("/nothing", headers=AUTH)
    method = await client.delete("/jobs", headers=AUTH)

    assert missing.status_code == 404
    assert method.status_code == 405
    assert "GET" in method.headers["Allow"]
    for reply in (missing, method):
        assert reply.headers["Content-Type"] == "application/problem+json"
        body = json.loads(await reply.get_data())
        assert {"type", "title", "status", "detail", "code"} <= set(body)


async def test_shell_and_local_repositories_need_a_local_caller(
    client, runtime: FakeRuntime
) -> None:
    """Only the local token marks its jobs as local."""
    body = {"prompt": "true", "agent": "shell", "workspace": {"repo": "/srv/repo"}}

    remote = await client.post("/execute", json=body, headers=AUTH)
    local = await client.post("/execute", json=body, headers={"X-Api-Key": LOCAL})

    assert remote.status_code == 422
    assert (await remote.get_json())["field"] == "workspace.repo"
    assert local.status_code == 202
    assert [r.local for r in runtime.requests] == [True]


def test_a_token_is_made_once_and_kept_private(tmp_path) -> None:
    """The file has mode 0600 and the token survives a restart."""
    path = tmp_path / "data" / "token"

    token, made = token_from_file(path)
    again, made_again = token_from_file(path)

    assert (made, made_again) == (True, False)
    assert token == again
    assert len(token) > 40
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_missing_credential_names_the_header() -> None:
    """The refusal teaches."""
    with pytest.raises(Problem, match="Authorization: Bearer") as caught:
        authenticate([], TokenBook())

    assert caught.value.status == 401
