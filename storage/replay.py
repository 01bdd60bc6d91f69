"""Views of a job as of a point in the log, and its replay from the events alone."""

import hashlib
from typing import Any, Final

import attrs
import msgspec

from storage.errors import JobUnknown, PointNotInLog
from storage.event_log import EventLog, Recorded
from storage.ids import JobId, job_stream
from storage.job_state import JobState, fold

_encoder: Final = msgspec.json.Encoder(order="sorted")


@attrs.frozen(kw_only=True)
class Replay:
    """A job rebuilt: its events in order, the state they fold to, and that state's digest."""

    events: tuple[Recorded, ...]
    state: JobState
    digest: str


async def view(
    log: EventLog, job: JobId, at_seq: int | None = None, at_ns: int | None = None
) -> JobState:
    """Answer a job's state as of a seq or a time (UTC nanoseconds); neither: as of the head.

    A time means the last event recorded at or before it. The state's own ``seq`` is the last of
    the job's stream up to that point. Raises PointNotInLog when ``at_seq`` is past the head, and
    JobUnknown when the job had no event yet.
    """
    assert at_seq is None or at_ns is None, "a view is as of a seq or of a time"
    upto = await log.seq_at(at_ns) if at_ns is not None else at_seq
    return (await replay(log, job, upto)).state


async def replay(log: EventLog, job: JobId, upto: int | None = None) -> Replay:
    """Answer a job rebuilt from its events up to a seq, None for all; raises as ``view``."""
    head = int(log.head)
    if upto is not None and upto > head:
        raise PointNotInLog(upto, head)
    history = await log.read(job_stream(job), upto_seq=head if upto is None else upto)
    state = fold(history)
    if state is None:
        raise JobUnknown(job)
    return Replay(events=tuple(history), state=state, digest=state_digest(state))


def state_digest(state: JobState) -> str:
    """Answer SHA-256 in hex over :func:`state_bytes`; equal states have equal digests."""
    return hashlib.sha256(state_bytes(state)).hexdigest()


def state_bytes(state: JobState) -> bytes:
    """Answer canonical JSON of a state: keys sorted, fields at their default left out.

    So a field that a later version adds changes no bytes of a state that does not use it.
    """
    return _encoder.encode(_plain(state))


# Any: a value on its way to JSON.
def _plain(value: Any) -> Any:  # noqa: ANN401
    if attrs.has(type(value)):
        return {
            field.name: _plain(getattr(value, field.name))
            for field in attrs.fields(type(value))
            if getattr(value, field.name) != field.default
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    return value
