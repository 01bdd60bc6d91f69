"""Routes of what a job made: its output, its diff, its files, its commits."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec
import trio
from quart import Response, request

from storage.errors import ArtifactUnavailable
from storage.ids import job_stream
from storage.job_state import JobState
from web import archive, reads
from web.edge import BYTES, Routes, Web, flag, json_reply, reply, stream_reply
from web.errors import Problem, bad_parameter, not_found
from web.service import RuntimeApi
from web.sse import StreamBody

CHUNK_BYTES: Final = 64 * 1024
FOLLOW_S: Final = 0.5
"""How often a followed file is looked at; its bytes are not announced by events."""


def add(routes: Routes, web: Web) -> None:
    """Add these routes."""
    runtime = web.runtime

    async def job_output(job_id: str) -> Response:
        stream = request.args.get("stream", "stdout")
        if stream not in {"stdout", "stderr"}:
            raise bad_parameter("stream", "must be stdout or stderr")
        offset = reads.parse_integer("offset", request.args.get("offset", "0"))
        follow = flag("follow")
        state = await reads.job_state(runtime.log, job_id)
        chunks = partial(output_chunks, web, state, stream, offset, follow=follow)
        return stream_reply(StreamBody(chunks), media=BYTES)

    async def job_diff(job_id: str) -> Response:
        state = await reads.job_state(runtime.log, job_id)
        media = "text/x-diff; charset=utf-8"
        if nothing_ran(state):
            return reply(b"", media=media)
        path = await artifact_path(runtime, state, "diff")
        return stream_reply(StreamBody(partial(file_chunks, path)), media=media)

    async def job_files(job_id: str) -> Response:
        state = await reads.job_state(runtime.log, job_id)
        files = b"[]"
        if not nothing_ran(state):
            files = await trio.Path(await artifact_path(runtime, state, "files")).read_bytes()
        base = None if state.workspace is None else state.workspace.base_commit
        return json_reply(
            {"job_id": state.job_id, "base_commit": base, "files": msgspec.Raw(files)}
        )

    async def job_file(job_id: str, path: str) -> Response:
        del path  # Decoded by the server, which loses bytes that are not UTF-8.
        state = await reads.job_state(runtime.log, job_id)
        tar = await artifact_path(runtime, state, "archive")
        found = await trio.to_thread.run_sync(archive.find, tar, exact_path())
        if found is None:
            raise not_found("no changed file of this name is kept", "no_such_file")
        chunks = partial(file_chunks, tar, offset=found.offset, size=found.size)
        response = stream_reply(StreamBody(chunks), media=BYTES)
        response.headers["Content-Length"] = str(found.size)
        response.headers["Content-Disposition"] = "attachment"
        return response

    async def job_bundle(job_id: str) -> Response:
        state = await reads.job_state(runtime.log, job_id)
        path = await artifact_path(runtime, state, "bundle")
        return stream_reply(StreamBody(partial(file_chunks, path)), media=BYTES)

    routes.get("/jobs/<job_id>/output", job_output)
    routes.get("/jobs/<job_id>/diff", job_diff)
    routes.get("/jobs/<job_id>/files", job_files)
    routes.get("/jobs/<job_id>/files/<exact:path>", job_file)
    routes.get("/jobs/<job_id>/bundle", job_bundle)


def exact_path() -> bytes:
    """Answer the part of the current request's path after ``/files/``, as bytes."""
    raw = request.scope.get("raw_path") or request.path.encode()
    assert isinstance(raw, bytes), "ASGI says so"
    return unquote_to_bytes(raw.split(b"/", 4)[4])


def nothing_ran(state: JobState) -> bool:
    """Answer whether a job ended before there was anything to capture."""
    return state.terminal and not state.artifacts and state.artifact_state == "none"


async def artifact_path(runtime: RuntimeApi, state: JobState, name: str) -> Path:
    """Answer the file of a job's artifact; raises Problem 404 or 409, ArtifactUnavailable."""
    artifact = state.artifact(name)
    if artifact is None and not state.terminal:
        raise Problem(
            409, "not_captured", f"the job is {state.status}; it has no {name} until it has ended"
        )
    if artifact is None:
        raise not_found(f"this job has no {name}", "no_artifact")
    stored = await runtime.log.artifact(artifact.digest)
    if stored is None:
        raise ArtifactUnavailable(name, "it was erased")
    path = runtime.artifacts.path(stored.file)
    if not await trio.Path(path).is_file():
        raise ArtifactUnavailable(name, "its file is gone")
    return path


async def file_chunks(
    path: Path, *, offset: int = 0, size: int | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a file from an offset; ``size`` None is to its end."""
    async with await trio.open_file(path, "rb") as file:
        await file.seek(offset)
        while size is None or size > 0:
            chunk = await file.read(CHUNK_BYTES if size is None else min(CHUNK_BYTES, size))
            if not chunk:
                return
            size = None if size is None else size - len(chunk)
            yield chunk


async def output_chunks(
    web: Web, state: JobState, stream: str, offset: int, *, follow: bool
) -> AsyncGenerator[bytes, None]:
    """Yield raw output from an offset; when followed, until the job (or this run) is over."""
    log, epoch = web.runtime.log, state.epoch
    while True:
        path = await _output_path(web, state, stream)
        if path is not None:
            async with aclosing(file_chunks(path, offset=offset)) as chunks:
                async for chunk in chunks:
                    offset += len(chunk)
                    yield chunk
        if not follow or state.terminal or (state.epoch != epoch and epoch != 0):
            return
        epoch = state.epoch
        with trio.move_on_after(FOLLOW_S):
            await log.wait_past(state.seq, stream=job_stream(state.job_id))
        state = await reads.job_state(log, state.job_id)


async def _output_path(web: Web, state: JobState, stream: str) -> Path | None:
    if state.artifact(stream) is not None:
        return await artifact_path(web.runtime, state, stream)
    live = web.data / "output" / f"{state.job_id}.{state.epoch}.{stream}"
    return live if await trio.Path(live).is_file() else None
