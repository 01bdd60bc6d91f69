"""Events as server-sent events: frames, and streams that survive a restart.

``id:`` is the seq of a committed event and nothing else has an id, so ``Last-Event-ID`` means
"after that event" for ever. Events come from the log as the reader takes them: a slow reader is
late, it misses nothing, so durable streams have no gaps to announce.
"""

from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Final

import trio
from quart.wrappers.response import ResponseBody

from storage.errors import LogClosed
from storage.event_log import Recorded
from storage.events import TERMINAL
from storage.ids import JobId, job_stream
from storage.job_state import fold
from web import views
from web.service import ServiceLog

MEDIA_TYPE: Final = "text/event-stream"
KEEP_ALIVE: Final = b": keep-alive\n\n"
HELLO: Final = b"retry: 1000\n\n"
EVENTS_PER_READ: Final = 100


class StreamBody(ResponseBody):
    """A reply that is made while it is sent; its generator is closed when the client leaves.

    It ends where it is when the log is closed: the service stops, the client may resume.
    """

    def __init__(self, open_stream: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        self._open = open_stream
        self._chunks: AsyncGenerator[bytes, None] | None = None

    async def __aenter__(self) -> "StreamBody":
        self._chunks = self._open()
        return self

    def __aiter__(self) -> "StreamBody":
        return self

    async def __anext__(self) -> bytes:
        assert self._chunks is not None, "the body was entered"
        try:
            return await self._chunks.__anext__()
        except LogClosed:
            raise StopAsyncIteration from None

    async def __aexit__(self, exc_type: type, exc_value: BaseException, tb: TracebackType) -> None:
        if self._chunks is not None:
            await self._chunks.aclose()


def frame(data: bytes, *, event: str | None = None, seq: int | None = None) -> bytes:
    """Answer one frame; ``data`` is JSON on one line, never empty."""
    head = b"" if seq is None else b"id: %d\n" % seq
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + name + b"data: " + data + b"\n\n"


def event_frame(record: Recorded, payloads: dict[str, bytes]) -> bytes:
    """Answer the frame of a committed event."""
    return frame(views.encode(views.event_view(record, payloads)), seq=int(record.seq))


def reset_frame(asked: str, head: int) -> bytes:
    """Answer the frame that says: forget what you have, the stream begins again."""
    return frame(views.encode({"asked": asked[:64], "head": head}), event="reset")


def start_of(last_event_id: str | None, head: int) -> tuple[int, bool]:
    """Answer after which seq to begin, and whether the client's id was of another world."""
    if last_event_id is None or last_event_id == "":
        return 0, False
    known = last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 20
    if known and int(last_event_id) <= head:
        return int(last_event_id), False
    return 0, True


async def job_frames(
    log: ServiceLog, job: JobId, *, after: int, reset: bytes | None, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    """Yield a job's events up to the terminal one, then ``event: end``."""
    yield HELLO + (reset or b"")
    history: list[Recorded] = []
    while True:
        fresh = await log.read(job_stream(job), after_version=len(history))
        history.extend(fresh)
        told, ended = upto_terminal(fresh)
        wanted = [record for record in told if record.seq > after]
        for start in range(0, len(wanted), EVENTS_PER_READ):
            yield await _frames(log, wanted[start : start + EVENTS_PER_READ])
        if ended:
            yield _end_frame(history)
            return
        seq = int(history[-1].seq) if history else 0
        while not await _moved(log, seq, job, keep_alive_s):
            yield KEEP_ALIVE


async def log_frames(
    log: ServiceLog, *, after: int, reset: bytes | None, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    """Yield the events of the whole log, for ever."""
    yield HELLO + (reset or b"")
    while True:
        fresh = await log.read_all(after=after, limit=EVENTS_PER_READ)
        if fresh:
            yield await _frames(log, fresh)
            after = int(fresh[-1].seq)
        while not fresh and not await _moved(log, after, None, keep_alive_s):
            yield KEEP_ALIVE


async def _moved(log: ServiceLog, seq: int, job: JobId | None, keep_alive_s: float) -> bool:
    stream = None if job is None else job_stream(job)
    with trio.move_on_after(keep_alive_s):
        await log.wait_past(seq, stream=stream)
        return True
    return False


async def _frames(log: ServiceLog, records: list[Recorded]) -> bytes:
    digests = views.events_digests(records)
    payloads = await log.payloads(digests) if digests else {}
    return b"".join(event_frame(record, payloads) for record in records)


def upto_terminal(records: list[Recorded]) -> tuple[list[Recorded], bool]:
    """Answer the events through the terminal one, and whether it is among them."""
    for index, record in enumerate(records):
        if isinstance(record.event, TERMINAL):
            return records[: index + 1], True
    return records, False


def _end_frame(history: list[Recorded]) -> bytes:
    state = fold(upto_terminal(history)[0])
    assert state is not None, "a terminal event has a history"
    end = {"job_id": state.job_id, "status": state.status, "cause": state.cause, "seq": state.seq}
    return frame(views.encode(end), event="end")
