"""What a job made: output, diff, files by their exact names, and nothing of the host."""

import io
import json
import tarfile
from pathlib import Path

import pytest
import trio

from tests.web.conftest import AUTH, TOKEN, Serve
from tests.web.fake_runtime import FakeRuntime

NAMES = [
    b"plain.txt",
    b"a -> b.txt",
    "ä ü.txt".encode(),
    b"new\nline.txt",
    b'quote".txt',
    b"dir/in side/x",
    b"not-utf8-\xff\xfe",
    b"100%25.txt",
    b"a+b",
    b"trailing ",
    b"q?x#y",
]


def tar_of(files: dict[bytes, bytes], links: dict[bytes, bytes] | None = None) -> bytes:
    data = io.BytesIO()
    with tarfile.open(
        fileobj=data, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape"
    ) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
            member.type = tarfile.SYMTYPE
            member.linkname = target.decode("utf-8", "surrogateescape")
            tar.addfile(member)
    return data.getvalue()


def percent(name: bytes) -> str:
    return "".join(
        chr(b) if chr(b) in "/.-_" or (chr(b).isascii() and chr(b).isalnum()) else f"%{b:02X}"
        for b in name
    )


async def captured(runtime: FakeRuntime, request_of, **artifacts: bytes):
    job = (await runtime.submit(request_of())).job_id
    await runtime.start(job, base="c0ffee")
    await runtime.verdict(job)
    for name, data in artifacts.items():
        await runtime.store(job, name, data)
    await runtime.end(job)
    return job


@pytest.mark.parametrize("name", NAMES)
async def test_a_file_is_served_by_its_exact_name(
    serve_app: Serve, runtime, request_of, name: bytes
) -> None:
    """SV019: any bytes, percent-encoded."""
    served = await serve_app()
    content = b"<script>" + name
    job = await captured(runtime, request_of, archive=tar_of({name: content, b"other": b"x"}))

    reply = await served.get(f"/jobs/{job}/files/{percent(name)}", f"Authorization: Bearer {TOKEN}")

    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == content
    assert b"application/octet-stream" in head
    assert b"nosniff" in head


@pytest.mark.parametrize(
    "path",
    [
        "leak",
        "root/etc/passwd",
        "up",
        "up2",
        "loop",
        "missing",
        "../secret",
        "..%2f..%2fsecret",
        "%2fetc/passwd",
        "dangling",
        "plain.txt/",
        "./plain.txt",
        "dir",
        "",
        "plain.txt%00",
    ],
)
async def test_nothing_outside_of_the_workspace_is_served(
    serve_app: Serve, runtime, request_of, path: str
) -> None:
    """SV037: links that leave, climbing paths, folders: 404."""
    served = await serve_app()
    links = {
        b"leak": b"/etc/passwd",
        b"root": b"/",
        b"up": b"../../etc/passwd",
        b"loop": b"loop",
        b"up2": b"dir/../../secret",
        b"dangling": b"nothing",
    }
    tar = tar_of({b"plain.txt": b"x", b"dir/x": b"y"}, links)
    job = await captured(runtime, request_of, archive=tar)

    reply = await served.get(f"/jobs/{job}/files/{path}", f"Authorization: Bearer {TOKEN}")

    assert reply.startswith(b"HTTP/1.1 404")
    assert b"root:" not in reply


async def test_a_link_inside_of_the_workspace_is_followed(client, runtime, request_of) -> None:
    """To a changed file, through folders."""
    links = {b"dir/link": b"../plain.txt", b"second": b"dir/link"}
    job = await captured(runtime, request_of, archive=tar_of({b"plain.txt": b"x"}, links))

    reply = await client.get(f"/jobs/{job}/files/second", headers=AUTH)

    assert await reply.get_data() == b"x"


async def test_diff_files_and_bundle_are_served_as_stored(client, runtime, request_of) -> None:
    """Byte for byte."""
    listed = b'[{"path":"a","path_encoding":"utf-8","status":"A"}]'
    job = await captured(
        runtime, request_of, diff=b"GIT \xff binary", files=listed, bundle=b"# v2 git bundle"
    )

    diff = await client.get(f"/jobs/{job}/diff", headers=AUTH)
    files = json.loads(await (await client.get(f"/jobs/{job}/files", headers=AUTH)).get_data())
    bundle = await client.get(f"/jobs/{job}/bundle", headers=AUTH)

    assert await diff.get_data() == b"GIT \xff binary"
    assert files["files"] == json.loads(listed)
    assert files["base_commit"] == "c0ffee"
    assert await bundle.get_data() == b"# v2 git bundle"


async def test_what_is_not_there_has_a_clear_code(client, runtime: FakeRuntime, request_of) -> None:
    """SV016: 409 before the end, 404 after it, 410 when erased; never 500."""
    job = (await runtime.submit(request_of())).job_id
    codes = []
    codes.append((await client.get(f"/jobs/{job}/diff", headers=AUTH)).status_code)
    await runtime.start(job)
    codes.append((await client.get(f"/jobs/{job}/files", headers=AUTH)).status_code)
    await runtime.verdict(job)
    await runtime.store(job, "diff", b"x")
    await runtime.end(job)
    codes.append((await client.get(f"/jobs/{job}/bundle", headers=AUTH)).status_code)
    runtime.disk.artifacts.clear()
    codes.append((await client.get(f"/jobs/{job}/diff", headers=AUTH)).status_code)

    assert codes == [409, 409, 404, 410]


async def test_a_job_that_never_ran_has_an_empty_diff(
    client, runtime: FakeRuntime, request_of
) -> None:
    """SV016: 200 with nothing in it."""
    job = (await runtime.submit(request_of())).job_id
    await runtime.cancel(job, by="x", request_id=None)

    diff = await client.get(f"/jobs/{job}/diff", headers=AUTH)
    files = await client.get(f"/jobs/{job}/files", headers=AUTH)

    assert (diff.status_code, await diff.get_data()) == (200, b"")
    assert json.loads(await files.get_data())["files"] == []


async def test_raw_output_is_served_while_it_grows_and_afterwards(
    client, runtime: FakeRuntime, request_of, tmp_path: Path
) -> None:
    """From the file of the run, then from the artifact, at any offset."""
    job = (await runtime.submit(request_of())).job_id
    url = f"/jobs/{job}/output"
    assert await (await client.get(url, headers=AUTH)).get_data() == b""
    await runtime.start(job)
    live = tmp_path / "output" / f"{job}.1.stdout"
    live.parent.mkdir()
    live.write_bytes(b"abc\xff")
    assert await (await client.get(url, headers=AUTH)).get_data() == b"abc\xff"
    assert await (await client.get(f"{url}?offset=3", headers=AUTH)).get_data() == b"\xff"
    assert await (await client.get(f"{url}?stream=stderr", headers=AUTH)).get_data() == b""
    await runtime.verdict(job)
    await runtime.store(job, "stdout", b"abc\xffdef")
    live.unlink()
    await runtime.end(job)

    assert await (await client.get(f"{url}?offset=2", headers=AUTH)).get_data() == b"c\xffdef"
    assert await (await client.get(f"{url}?offset=99", headers=AUTH)).get_data() == b""


async def test_followed_output_ends_with_the_job(
    client, runtime: FakeRuntime, request_of, tmp_path: Path, nursery: trio.Nursery
) -> None:
    """Each byte once, over the change from the file to the artifact."""
    job = (await runtime.submit(request_of())).job_id
    await runtime.start(job)
    live = tmp_path / "output" / f"{job}.1.stdout"
    live.parent.mkdir()
    live.write_bytes(b"one ")

    async def go_on() -> None:
        while runtime.log.waiting == 0:
            await trio.sleep(0.005)
        live.write_bytes(b"one two ")
        await runtime.verdict(job)
        await runtime.store(job, "stdout", b"one two three")
        live.unlink()
        await runtime.end(job)

    nursery.start_soon(go_on)
    reply = await client.get(f"/jobs/{job}/output?follow=true", headers=AUTH)

    assert await reply.get_data() == b"one two three"


@pytest.mark.parametrize("query", ["stream=both", "offset=-1", "offset=x", "follow=maybe"])
async def test_a_bad_output_query_is_400(client, runtime, request_of, query: str) -> None:
    """And names the parameter."""
    job = await runtime.run(request_of())

    reply = await client.get(f"/jobs/{job}/output?{query}", headers=AUTH)

    assert reply.status_code == 400
    assert json.loads(await reply.get_data())["field"] == query.split("=")[0]
