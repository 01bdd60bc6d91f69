"""A view of the past is what was seen then, and a replay needs the events alone."""

import importlib.util
import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import attrs
import pytest
import trio

from storage import events as e
from storage.errors import JobUnknown, PointNotInLog
from storage.ids import JobId, job_of_stream
from storage.replay import replay, state_bytes, state_digest, view
from storage.sqlite_log import SqliteEventLog

MAKE = Path(__file__).parents[1] / "old_logs" / "make.py"


def load_make():
    spec = importlib.util.spec_from_file_location("old_logs_make", MAKE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_make()


class Witness:
    """A log that looks at every job after each append, as a live reader would."""

    def __init__(self, log):
        self._log = log
        self.seen = {}

    def __getattr__(self, name):
        return getattr(self._log, name)

    async def append(self, request):
        recorded = await self._log.append(request)
        job = job_of_stream(request.stream)
        if job is not None:
            self.seen[int(self._log.head), job] = await view(self._log, job)
        return recorded


def opened(db, **more):
    clock, ids = make.sources()
    return SqliteEventLog.open(db, ids=ids, clock_ns=clock, session="s", die=make.die, **more)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The file of a told story, and what was seen of each job while it was told."""
    folder = tmp_path_factory.mktemp("told")

    async def run():
        _, ids = make.sources()
        async with opened(folder / "log.db") as log:
            witness = Witness(log)
            await make.tell(make.Story(witness, ids, folder / "artifacts"))
            return witness.seen

    return folder / "log.db", trio.run(run)


async def test_every_view_that_was_seen_live_is_seen_again(told):
    """At each seq, from a log that was closed and opened for reading only."""
    db, seen = told
    async with opened(db, read_only=True) as log:
        for (seq, job), state in seen.items():
            assert await view(log, job, at_seq=seq) == state


async def test_views_do_not_need_the_projections(told, tmp_path):
    """All projections dropped: the same states."""
    db, seen = told
    copy = tmp_path / "log.db"
    copy.write_bytes(db.read_bytes())
    with closing(sqlite3.connect(copy)) as connection, connection:
        for table in ("jobs", "job_labels", "idempotency", "service_state", "applied"):
            connection.execute(f"DROP TABLE {table}")

    async with opened(copy, read_only=True) as log:
        for (seq, job), state in list(seen.items())[::5]:
            assert await view(log, job, at_seq=seq) == state


async def test_a_view_names_the_last_event_of_its_own_stream(told):
    """Between two events of a job the view does not change."""
    db, seen = told
    (_, job), *_ = seen
    async with opened(db, read_only=True) as log:
        seqs = [int(r.seq) for r in (await replay(log, job)).events]
        for n in range(seqs[0], int(log.head) + 1):
            assert (await view(log, job, at_seq=n)).seq == max(s for s in seqs if s <= n)


async def test_a_point_past_the_head_is_not_in_the_log(told):
    """One past the head is refused, the head is not; the error names both."""
    db, seen = told
    (_, job), *_ = seen
    async with opened(db, read_only=True) as log:
        head = int(log.head)
        assert await view(log, job, at_seq=head) == await view(log, job)
        with pytest.raises(PointNotInLog) as caught:
            await view(log, job, at_seq=head + 1)

    assert (caught.value.asked, caught.value.head) == (head + 1, head)


@pytest.mark.parametrize("at_seq", [-1, 0, 1])
async def test_a_job_is_unknown_before_its_first_event(told, at_seq):
    """And so is one that never was, at any point."""
    db, seen = told
    (first, job), *_ = seen
    async with opened(db, read_only=True) as log:
        for point in (at_seq, first - 1):
            with pytest.raises(JobUnknown):
                await view(log, job, at_seq=point)
        with pytest.raises(JobUnknown):
            await view(log, JobId("job_x"))


async def test_a_time_means_the_last_event_recorded_by_then(told):
    """The instant of an event counts it; a nanosecond earlier does not; the future is the head."""
    db, seen = told
    (_, job), *_ = seen
    async with opened(db, read_only=True) as log:
        events = (await replay(log, job)).events
        for before, record in pairwise(events):
            at = record.recorded_at_ns
            assert (await view(log, job, at_ns=at)).seq >= record.seq
            if before.recorded_at_ns < at:
                assert (await view(log, job, at_ns=at - 1)).seq == before.seq
        assert await view(log, job, at_ns=2**62) == await view(log, job)
        with pytest.raises(JobUnknown):
            await view(log, job, at_ns=events[0].recorded_at_ns - 1)
        with pytest.raises(JobUnknown):
            await view(log, job, at_ns=0)


async def test_a_replay_is_the_history_with_its_state_and_digest(told):
    """Events up to the point, in order; twice the same digest, another one at another point."""
    db, seen = told
    (_, job), *_ = seen
    async with opened(db, read_only=True) as log:
        whole = await replay(log, job)
        again = await replay(log, job)
        part = await replay(log, job, int(whole.events[3].seq))

    assert whole == again
    assert [r.version for r in whole.events] == list(range(1, len(whole.events) + 1))
    assert part.events == whole.events[:4]
    assert part.state.seq == whole.events[3].seq
    assert len({whole.digest, part.digest}) == 2
    assert whole.digest == state_digest(whole.state)


async def test_what_was_erased_is_gone_at_every_point(told):
    """The view of the past still folds; the bytes are not there any more."""
    db, _ = told
    async with opened(db, read_only=True) as log:
        erasing = [r for r in await log.read_all() if isinstance(r.event, e.PayloadErased)]
        job = job_of_stream(erasing[0].stream)
        state = await view(log, job, at_seq=int(erasing[0].seq) - 1)

        assert state.erased == frozenset()
        assert await log.payload(state.submitted.prompt.digest) is None
        assert (await view(log, job)).erased == {state.submitted.prompt.digest}


async def test_bytes_of_a_state_leave_out_what_is_at_its_default(told):
    """A field that nobody used is not there, so that later versions can add some."""
    _, seen = told
    state = next(iter(seen.values()))

    assert b'"exit"' not in state_bytes(state)
    assert b'"left"' not in state_bytes(state)
    assert b'"left":2' in state_bytes(attrs.evolve(state, left=2))
    assert state_bytes(attrs.evolve(state, erased=frozenset("ba"))).count(b'["a","b"]') == 1
