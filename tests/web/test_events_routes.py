"""Event streams: what has an id, how they resume, how they end."""

import json

import pytest
import trio

from storage import events as e
from tests.web.conftest import AUTH, TOKEN, Serve, Served
from tests.web.fake_runtime import FakeRuntime

STREAM = {**AUTH, "Accept": "text/event-stream"}


def frames(data: bytes) -> list[dict[str, str]]:
    """Split as a browser does; comments are dropped, fields joined."""
    found = []
    for block in data.decode().split("\n\n"):
        fields: dict[str, str] = {}
        for line in block.split("\n"):
            name, colon, value = line.partition(":")
            if name and colon:
                fields[name] = value.removeprefix(" ")
        if fields:
            found.append(fields)
    return found


def seqs(found: list[dict[str, str]]) -> list[int]:
    return [int(frame["id"]) for frame in found if "id" in frame]


def of_job(runtime: FakeRuntime, job: str) -> list[int]:
    return [int(r.seq) for r in runtime.disk.records if r.stream == f"job/{job}"]


async def test_a_stream_tells_a_job_to_its_end(client, runtime: FakeRuntime, request_of) -> None:
    """All events with their seq, then one end without an id."""
    job = await runtime.run(request_of())

    reply = await client.get(f"/jobs/{job}/events", headers=STREAM)
    found = frames(await reply.get_data())

    assert reply.headers["Content-Type"] == "text/event-stream"
    assert seqs(found) == of_job(runtime, job)
    assert found[-1]["event"] == "end"
    assert "id" not in found[-1]
    assert json.loads(found[-1]["data"])["status"] == "completed"
    assert all(f.get("data") for f in found if "retry" not in f)
    event = json.loads(found[1]["data"])
    assert (event["type"], event["texts"]["prompt"]["text"]) == ("job.submitted", "say hello")


async def test_a_stream_ends_at_the_terminal_event(
    client, runtime: FakeRuntime, request_of
) -> None:
    """What the janitor writes later is on the stream of the log."""
    job = await runtime.run(request_of())
    await runtime.add(job, e.WorkspaceRemoved(), epoch=1)

    found = frames(await (await client.get(f"/jobs/{job}/events", headers=STREAM)).get_data())

    assert seqs(found) == of_job(runtime, job)[:-1]
    assert found[-1]["event"] == "end"


async def test_a_resume_continues_after_the_last_id(
    client, runtime: FakeRuntime, request_of
) -> None:
    """SV076, SV080: nothing skipped, nothing twice, from every id."""
    await runtime.run(request_of())
    job = await runtime.run(request_of())
    own = of_job(runtime, job)

    for last in range(own[-1]):
        headers = {**STREAM, "Last-Event-ID": str(last)}
        found = frames(await (await client.get(f"/jobs/{job}/events", headers=headers)).get_data())
        assert seqs(found) == [seq for seq in own if seq > last]
        assert all(frame.get("event") != "reset" for frame in found)


async def test_a_reconnect_after_the_end_gets_204(client, runtime: FakeRuntime, request_of) -> None:
    """The client stops asking."""
    job = await runtime.run(request_of())
    last = of_job(runtime, job)[-1]
    await runtime.run(request_of())

    for known in (last, last + 1, int(runtime.log.head)):
        headers = {**STREAM, "Last-Event-ID": str(known)}
        reply = await client.get(f"/jobs/{job}/events", headers=headers)
        assert (reply.status_code, await reply.get_data()) == (204, b"")


@pytest.mark.parametrize("known", ["99999", "x", "-1", "1.5", "9" * 400, "0x1", " 1 2", "\u0663"])
async def test_an_id_of_another_world_resets(
    client, runtime: FakeRuntime, request_of, known: str
) -> None:
    """SV077: past the head or malformed: say so, then begin again."""
    job = await runtime.run(request_of())

    headers = {**STREAM, "Last-Event-ID": known}
    found = frames(await (await client.get(f"/jobs/{job}/events", headers=headers)).get_data())

    events = [f for f in found if "data" in f]
    assert events[0]["event"] == "reset"
    assert "id" not in events[0]
    assert seqs(found) == of_job(runtime, job)


async def open_stream(served: Served, path: str, last: int | None = None) -> trio.SocketStream:
    stream = await served.connect()
    resume = "" if last is None else f"Last-Event-ID: {last}\r\n"
    await stream.send_all(
        f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Accept: text/event-stream\r\n{resume}\r\n".encode()
    )
    return stream


async def until(stream: trio.SocketStream, wanted: bytes) -> bytes:
    data = b""
    with trio.fail_after(5):
        while wanted not in data:
            chunk = await stream.receive_some()
            assert chunk, "the stream ended early"
            data += bytes(chunk)
    return data


async def test_events_arrive_as_they_are_committed(
    serve_app: Serve, runtime: FakeRuntime, request_of
) -> None:
    """A live job: each event when it happens, then the end."""
    served = await serve_app()
    job = (await runtime.submit(request_of())).job_id
    stream = await open_stream(served, f"/jobs/{job}/events")
    await until(stream, b"job.submitted")

    await runtime.start(job)
    await until(stream, b"agent.started")
    await runtime.verdict(job)
    await runtime.end(job)

    await until(stream, b"event: end")
    await stream.aclose()


async def test_a_silent_stream_says_that_it_lives(
    serve_app: Serve, runtime: FakeRuntime, request_of
) -> None:
    """SV070, SV071: comments only, which begin with a colon."""
    served = await serve_app()
    job = (await runtime.submit(request_of())).job_id
    stream = await open_stream(served, f"/jobs/{job}/events")

    data = await until(stream, b": keep-alive\n\n")

    assert b"data: \n" not in data
    await stream.aclose()


async def test_dropped_connections_lose_nothing(
    serve_app: Serve, runtime: FakeRuntime, request_of
) -> None:
    """SV079: a client that is cut after each event still reads the log."""
    served = await serve_app()
    job = (await runtime.submit(request_of())).job_id
    await runtime.start(job)
    for n in range(20):
        await runtime.print(job, b"line %d\n" % n, stream="stdout")
    await runtime.verdict(job)
    await runtime.end(job)
    seen: list[int] = []

    while len(seen) < len(of_job(runtime, job)):
        last = seen[-1] if seen else None
        stream = await open_stream(served, f"/jobs/{job}/events", last)
        data = await until(stream, b"\nid: ")
        data += await until(stream, b"\n\n") if not data.endswith(b"\n\n") else b""
        await stream.aclose()
        block = data[data.index(b"\nid: ") + 1 :].split(b"\n\n")[0]
        seen += seqs(frames(block + b"\n\n"))[:1]

    assert seen == of_job(runtime, job)


async def test_the_stream_of_the_log_never_ends(
    serve_app: Serve, runtime: FakeRuntime, request_of
) -> None:
    """All streams in commit order, resumable, past the ends of jobs."""
    served = await serve_app()
    await runtime.run(request_of())
    stream = await open_stream(served, "/events", 2)

    data = await until(stream, b"job.completed")
    job = (await runtime.submit(request_of())).job_id
    data += await until(stream, job.encode())

    assert seqs(frames(data))[0] == 3
    assert b"event: end" not in data
    await stream.aclose()


async def test_pages_of_events_are_json(client, runtime: FakeRuntime, request_of) -> None:
    """The same events in pages, by ?after."""
    job = await runtime.run(request_of())
    for path, all_seqs in (
        (f"/jobs/{job}/events", of_job(runtime, job)),
        ("/events", [int(r.seq) for r in runtime.disk.records]),
    ):
        seen, after, more = [], 0, True
        while more:
            reply = await client.get(f"{path}?limit=3&after={after}", headers=AUTH)
            page = json.loads(await reply.get_data())
            seen += [event["seq"] for event in page["events"]]
            after, more = page["next_after"], page["more"]
        assert seen == all_seqs
        empty = json.loads(
            await (await client.get(f"{path}?after={after}", headers=AUTH)).get_data()
        )
        assert (empty["events"], empty["next_after"]) == ([], after)


@pytest.mark.parametrize("query", ["after=-1", "after=x", "limit=0", "limit=1000", "limit=x"])
async def test_a_bad_page_is_400(client, runtime, request_of, query: str) -> None:
    """And names the parameter."""
    job = await runtime.run(request_of())
    for path in (f"/jobs/{job}/events", "/events"):
        assert (await client.get(f"{path}?{query}", headers=AUTH)).status_code == 400


async def test_an_erased_text_says_so(client, runtime: FakeRuntime, request_of) -> None:
    """The event stays, its text is gone; a long text is cut."""
    job = (await runtime.submit(request_of(prompt="x" * 20_000))).job_id

    reply = await client.get(f"/jobs/{job}/events", headers=AUTH)
    text = json.loads(await reply.get_data())["events"][0]["texts"]["prompt"]
    runtime.disk.payloads.clear()
    reply = await client.get(f"/jobs/{job}/events", headers=AUTH)
    erased = json.loads(await reply.get_data())["events"][0]["texts"]["prompt"]

    assert (len(text["text"]), text["truncated"]) == (16 * 1024, True)
    assert erased == {"erased": True}


async def test_a_head_request_does_not_stream(client, runtime: FakeRuntime, request_of) -> None:
    """HEAD on an endless stream returns."""
    job = (await runtime.submit(request_of())).job_id

    with trio.fail_after(2):
        reply = await client.head(f"/jobs/{job}/events", headers=STREAM)

    assert reply.status_code == 200


@pytest.mark.parametrize("path", ["/events", "/jobs/{job}/events", "/jobs/{job}/output?follow=1"])
async def test_streams_end_when_the_log_is_closed(
    serve_app: Serve, runtime: FakeRuntime, request_of, path: str
) -> None:
    """A stop of the service is an end of the stream, not an error."""
    served = await serve_app()
    job = (await runtime.submit(request_of())).job_id
    stream = await open_stream(served, path.format(job=job))
    with trio.fail_after(5):
        while runtime.log.waiting == 0:
            await trio.sleep(0.005)

    await runtime.log.aclose()

    await until(stream, b"0\r\n\r\n")
    await stream.aclose()


async def test_an_error_in_a_stream_cuts_it_and_is_reported(
    serve_app: Serve, runtime: FakeRuntime, request_of, reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that can not go on is not ended as if it were whole."""
    served = await serve_app()
    job = (await runtime.submit(request_of())).job_id

    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(runtime.log, "wait_past", broken)
    stream = await open_stream(served, f"/jobs/{job}/events")
    data = b""
    with trio.fail_after(3):
        async for chunk in stream:
            data += bytes(chunk)

    assert b"job.submitted" in data
    assert not data.endswith(b"0\r\n\r\n")
    assert len(reports.seen) == 1
    await stream.aclose()
