"""What only a file can keep or break: full disks, failing commits, damage, schemas."""

import sqlite3
from contextlib import closing

import pytest
import trio

from storage import events as e
from storage.codec import decode_envelope, leaf_hash, payload
from storage.errors import DiskFull, LogReadOnly, LogTooNew, OutcomeUnknown, VersionConflict
from storage.event_log import Append, Fact, JobQuery
from storage.ids import JobId, job_stream
from storage.projection_store import rebuild_projections
from storage.schema import PROJECTION_TABLES, SCHEMA, connect_writer
from storage.testing import submitted

JOB = JobId("job_00000000000000000000000001")
STREAM = job_stream(JOB)
TURN = e.AgentTurnFinished(turn=1)


def append(version, *events, stream=STREAM):
    facts = tuple(event if isinstance(event, Fact) else Fact(event=event) for event in events)
    return Append(stream=stream, expected_version=version, facts=facts)


def big(number, size=200_000):
    text = payload(b"x" * size, b"%d" % number)
    stream = job_stream(JobId(f"job_{number:026d}"))
    fact = Fact(event=submitted(prompt=text.ref), payloads=(text,))
    return append(0, fact, stream=stream)


def failing(code, name="test", unless=lambda: False):
    """A connection class whose commits fail while it is armed."""

    class Connection(sqlite3.Connection):
        armed = False

        def execute(self, sql, *parameters):
            if self.armed and sql == "COMMIT" and not unless():
                error = sqlite3.OperationalError(name)
                error.sqlite_errorcode = code
                raise error
            return super().execute(sql, *parameters)

    return Connection


def edit(path, *statements):
    """Change the file behind the log's back, as an attacker or a bad disk would."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TRIGGER events_keep_update")
        connection.execute("DROP TRIGGER events_keep_delete")
        for statement in statements:
            connection.execute(*statement)


async def filled(maker, events=600):
    """A log of one job with this many events, closed."""
    async with maker.open() as log:
        await log.append(append(0, submitted(), *[TURN] * (events - 1)))


async def test_a_full_disk_refuses_the_batch_and_the_log_goes_on(sqlite_maker):
    """SQLITE_FULL writes nothing; a smaller append later finds its place."""
    async with sqlite_maker.open(pages_max=80) as log:
        await log.append(append(0, submitted()))

        with pytest.raises(DiskFull):
            await log.append(big(2, 1_000_000))
        (record,) = await log.append(append(1, TURN))

        assert record.seq == 2
        assert sqlite_maker.reasons == []
    async with sqlite_maker.open() as log:
        assert (log.head, log.damage) == (2, None)


async def test_a_full_disk_is_named_to_each_request_but_the_refused(sqlite_maker):
    """In a batch that does not fit, a conflict stays a conflict."""
    answers = {}

    async def one(log, name, request):
        try:
            await log.append(request)
        except (DiskFull, VersionConflict) as error:
            answers[name] = type(error)

    async with sqlite_maker.open(pages_max=80) as log, trio.open_nursery() as nursery:
        nursery.start_soon(one, log, "big", big(2, 1_000_000))
        nursery.start_soon(one, log, "wrong", append(9, TURN))

    assert answers == {"big": DiskFull, "wrong": VersionConflict}


async def test_the_ballast_is_given_up_once_to_make_room(sqlite_maker, tmp_path):
    """The batch is tried again after the ballast is gone; there is no second ballast."""
    ballast = tmp_path / "ballast"
    ballast.write_bytes(b"0" * 100)
    connection_class = failing(sqlite3.SQLITE_FULL, unless=lambda: not ballast.exists())
    async with sqlite_maker.open(ballast=ballast, connection_class=connection_class) as log:
        connection_class.armed = True

        (record,) = await log.append(append(0, submitted()))
        assert not ballast.exists()
        ballast.write_bytes(b"0")
        with pytest.raises(DiskFull):
            await log.append(append(1, TURN))

        assert ballast.exists()
        assert record.seq == log.head == 1


async def test_an_io_error_at_the_commit_ends_the_process(sqlite_maker):
    """The outcome is unknown: die is called with the reason, and nothing is answered as done."""
    connection_class = failing(sqlite3.SQLITE_IOERR, name="disk I/O error")
    async with sqlite_maker.open(connection_class=connection_class) as log:
        await log.append(append(0, submitted()))
        connection_class.armed = True

        with pytest.raises(OutcomeUnknown):
            await log.append(append(1, TURN))
        connection_class.armed = False
        with pytest.raises(OutcomeUnknown):
            await log.append(append(1, TURN))

        assert log.head == 1
        assert len(sqlite_maker.reasons) == 1
        assert "disk I/O error" in sqlite_maker.reasons[0]


async def test_events_can_be_neither_changed_nor_deleted(sqlite_maker):
    """Triggers guard the table against a bug."""
    await filled(sqlite_maker, 2)

    with closing(sqlite3.connect(sqlite_maker.path)) as connection:
        with pytest.raises(sqlite3.IntegrityError, match="never changed"):
            connection.execute("UPDATE events SET type = 'x'")
        with pytest.raises(sqlite3.IntegrityError, match="never deleted"):
            connection.execute("DELETE FROM events")


@pytest.mark.parametrize(
    ("seq", "statement", "reason"),
    [
        (599, ("UPDATE events SET body = CAST('{}' AS BLOB) WHERE seq = 599",), "hash"),
        (600, ("UPDATE events SET leaf = zeroblob(32) WHERE seq = 600",), "hash"),
        (580, ("UPDATE events SET session = 'other' WHERE seq = 580",), "session"),
        (590, ("DELETE FROM events WHERE seq = 590",), "missing"),
        (300, ("UPDATE events SET body = CAST('{}' AS BLOB) WHERE seq = 300",), "hash"),
        (501, ("DELETE FROM events WHERE seq > 500",), "the log ends before"),
        (257, ("DELETE FROM tiles WHERE idx = 1",), "missing"),
        (257, ("UPDATE tiles SET root = zeroblob(32) WHERE idx = 1",), "root of its leaves"),
    ],
)
async def test_a_damaged_end_opens_read_only_and_names_the_seq(
    sqlite_maker, seq, statement, reason
):
    """Reads go on, appends are refused with the place of the damage; nothing is reset."""
    await filled(sqlite_maker)
    edit(sqlite_maker.path, statement)

    async with sqlite_maker.open() as log:
        assert log.damage is not None
        assert log.damage.seq == seq
        assert reason in log.damage.reason
        with pytest.raises(LogReadOnly, match=f"seq {seq}"):
            await log.append(append(600, TURN))
        assert (await log.read_all(limit=1))[0].seq == 1


async def test_a_broken_chain_of_a_stream_is_found(sqlite_maker):
    """An event whose leaf and body agree, but whose prev_leaf is another, is damage."""
    await filled(sqlite_maker, 3)
    with closing(sqlite3.connect(sqlite_maker.path)) as connection:
        (body,) = connection.execute("SELECT body FROM events WHERE seq = 3").fetchone()
    previous = decode_envelope(3, body).prev_leaf
    forged = body.replace(previous.encode(), b"0" * 64)
    edit(
        sqlite_maker.path,
        ("UPDATE events SET body = ?, leaf = ? WHERE seq = 3", (forged, leaf_hash(forged))),
    )

    async with sqlite_maker.open() as log:
        assert log.damage is not None
        assert (log.damage.seq, "prev_leaf" in log.damage.reason) == (3, True)


async def test_a_log_of_a_newer_schema_is_refused_untouched(sqlite_maker):
    """The error names both schemas, and the file stays as it was."""
    await filled(sqlite_maker, 2)
    with closing(sqlite3.connect(sqlite_maker.path)) as connection, connection:
        connection.execute("UPDATE meta SET schema = ?", (SCHEMA + 1,))

    for read_only in (False, True):
        with pytest.raises(LogTooNew) as caught:
            async with sqlite_maker.open(read_only=read_only):
                pass
        assert (caught.value.found, caught.value.known) == (SCHEMA + 1, SCHEMA)


async def test_a_log_opened_for_reading_takes_no_append_and_is_not_made(sqlite_maker):
    """``read_only`` reads an existing file and refuses a missing one."""
    with pytest.raises(FileNotFoundError):
        async with sqlite_maker.open(read_only=True):
            pass
    await filled(sqlite_maker, 5)

    async with sqlite_maker.open(read_only=True) as log:
        assert len(await log.read(STREAM)) == 5
        assert log.service_state.queued == 1
        with pytest.raises(LogReadOnly):
            await log.append(append(5, TURN))


async def test_projections_that_were_dropped_are_rebuilt_equal(sqlite_maker):
    """Every table of the projections comes back with the same rows, at the next open."""
    key = e.IdempotencyRef(key="k", body="b")
    async with sqlite_maker.open() as log:
        await log.append(append(0, submitted(labels={"b": "2", "a": "1"}, idempotency=key)))
        await log.append(big(2))
        await log.append(append(1, e.JobErrored(cause="internal", left=1)))
        state = log.service_state
    before = tables(sqlite_maker.path)
    with closing(sqlite3.connect(sqlite_maker.path)) as connection, connection:
        for table in PROJECTION_TABLES:
            connection.execute(f"DROP TABLE {table}")

    async with sqlite_maker.open() as log:
        found = await log.jobs(JobQuery(label=("a", "1")))
        reopened = log.service_state

    assert reopened == state
    assert found == [(1, JOB)]
    assert tables(sqlite_maker.path) == before


async def test_projections_that_are_behind_are_rebuilt(sqlite_maker):
    """An applied seq that is not the head, or wrong rows, end with the fold of the events."""
    await filled(sqlite_maker, 3)
    before = tables(sqlite_maker.path)
    with closing(sqlite3.connect(sqlite_maker.path)) as connection, connection:
        connection.execute("UPDATE applied SET seq = 1")
        connection.execute("UPDATE jobs SET status = 'completed'")

    async with sqlite_maker.open() as log:
        unfinished = await log.unfinished()

    assert unfinished == [(1, JOB)]
    assert tables(sqlite_maker.path) == before


async def test_rebuilding_changes_nothing_that_is_right(sqlite_maker):
    """The public rebuild answers the state and leaves equal tables."""
    await filled(sqlite_maker, 3)
    before = tables(sqlite_maker.path)

    with closing(connect_writer(sqlite_maker.path)) as connection:
        state = rebuild_projections(connection)

    assert state.queued == 1
    assert tables(sqlite_maker.path) == before


async def test_an_erased_payload_is_nowhere_in_the_files(sqlite_maker):
    """Neither the database nor its write-ahead log holds the bytes afterwards."""
    secret = b"tell-nobody-" * 1000
    text = payload(secret, b"salt")
    fact = Fact(event=submitted(prompt=text.ref), payloads=(text,))
    async with sqlite_maker.open() as log:
        await log.append(append(0, fact))
        assert any(b"tell-nobody-" in data for data in files(sqlite_maker.path))
        await log.append(append(1, e.PayloadErased(digests=[text.digest])))

    assert not any(b"tell-nobody-" in data for data in files(sqlite_maker.path))
    async with sqlite_maker.open() as log:
        assert await log.payload(text.digest) is None


async def test_an_uncommitted_batch_is_gone_after_a_crash(sqlite_maker, tmp_path):
    """A copy of the files as they are while open, as after kill -9, opens to what was committed."""
    async with sqlite_maker.open() as log:
        await log.append(append(0, submitted(), TURN))
        for suffix in ("", "-wal"):
            data = sqlite_maker.path.with_name(f"log.db{suffix}").read_bytes()
            (tmp_path / f"copy.db{suffix}").write_bytes(data)
    sqlite_maker.path = tmp_path / "copy.db"

    async with sqlite_maker.open() as log:
        assert (log.head, log.damage) == (2, None)
        await log.append(append(2, TURN))


async def test_streams_beyond_the_cache_keep_their_versions(sqlite_maker, monkeypatch):
    """A writer that forgot a stream looks it up, its job's row too."""
    monkeypatch.setattr("storage.batch.STREAMS_CACHED_MAX", 2)
    started = Fact(event=e.JobStarted(agent_digest="", containment=""), epoch=1)
    async with sqlite_maker.open() as log:
        for number in range(1, 6):
            await log.append(big(number, 10))
        await log.append(append(1, started))
        with pytest.raises(VersionConflict):
            await log.append(append(1, TURN))

        assert await log.jobs(JobQuery(status=frozenset({"running"}))) == [(1, JOB)]
        assert log.service_state.active == 1


async def test_the_old_part_of_a_log_is_replayed_beyond_the_ring(sqlite_maker):
    """A follower from the start of a log that is longer than the ring sees each event once."""
    await filled(sqlite_maker, 1_500)
    seen = []
    async with sqlite_maker.open() as log:
        for version in range(1_500, 4_500, 500):
            await log.append(append(version, *[TURN] * 500))
        async with log.follow() as events:
            async for record in events:
                seen.append(int(record.seq))
                if record.seq == 4_500:
                    break
        one = []
        async with log.follow(stream=STREAM, after=100) as events:
            async for record in events:
                one.append(record.version)
                if record.seq == 4_500:
                    break

    assert seen == list(range(1, 4_501))
    assert one == list(range(101, 4_501))


def tables(path):
    """All rows of the projections, by table."""
    with closing(sqlite3.connect(path)) as connection:
        return {
            table: connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()
            for table in PROJECTION_TABLES
        }


def files(path):
    """The bytes of the database and of its write-ahead log."""
    return [part.read_bytes() for part in path.parent.glob("log.db*") if part.is_file()]
