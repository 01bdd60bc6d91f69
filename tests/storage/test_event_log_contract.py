"""The one contract that both event logs keep."""

import sqlite3
from contextlib import closing

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import events as e
from storage.codec import payload
from storage.errors import (
    AppendRefused,
    DuplicateKey,
    LogBusy,
    LogClosed,
    PointNotInLog,
    VersionConflict,
)
from storage.event_log import Append, Fact, JobQuery, StoredArtifact
from storage.ids import SERVICE_STREAM, JobId, job_stream
from storage.projections import fold_service
from storage.testing import EVENT_CLASSES, example_event, submitted

JOB = JobId("job_00000000000000000000000001")
STARTED = e.ServiceStarted(
    version="1",
    config_digest="c",
    capacity=2,
    queue_depth=9,
    containment="subreaper",
    boot_id="b",
    log_id="l",
)
TURN = e.AgentTurnFinished(turn=1)


def job(number):
    return JobId(f"job_{number:026d}")


def append(stream, version, *events, **options):
    facts = tuple(event if isinstance(event, Fact) else Fact(event=event) for event in events)
    return Append(stream=stream, expected_version=version, facts=facts, **options)


def submit(number, **fields):
    return append(job_stream(job(number)), 0, submitted(**fields))


async def gather(log, requests):
    """All answers or errors of requests that were made at once, in the requests' order."""
    answers = [None] * len(requests)

    async def one(index, request):
        try:
            answers[index] = await log.append(request)
        except AppendRefused as error:
            answers[index] = error

    async with trio.open_nursery() as nursery:
        for index, request in enumerate(requests):
            nursery.start_soon(one, index, request)
    return answers


async def test_events_of_one_request_get_neighbouring_seqs_and_versions(maker):
    """The facts of one append are committed together, in their order."""
    async with maker.open() as log:
        first, second = await log.append(append(job_stream(JOB), 0, submitted(), TURN))
        read = await log.read(job_stream(JOB))

    assert (first.seq, first.version, second.seq, second.version) == (1, 1, 2, 2)
    assert second.prev_leaf == first.leaf
    assert first.prev_leaf is None
    assert read == [first, second]
    assert log.head == 2


async def test_the_envelope_says_who_why_and_when(maker):
    """What the request and its facts say stands in the recorded event."""
    fact = Fact(event=TURN, epoch=3, n=17)
    async with maker.open(session="run-9") as log:
        (record,) = await log.append(
            append(job_stream(JOB), 0, fact, by="alice", request_id="r1", caused_by=5)
        )

    assert (record.by, record.request_id, record.caused_by) == ("alice", "r1", 5)
    assert (record.epoch, record.n, record.session) == (3, 17, "run-9")
    assert record.recorded_at_ns == maker.clock.now


async def test_a_wrong_version_is_refused_and_writes_nothing(maker):
    """A conflict names both versions; the log is as before."""
    async with maker.open() as log:
        await log.append(submit(1))

        with pytest.raises(VersionConflict) as caught:
            await log.append(append(job_stream(job(1)), 0, TURN))

        assert (caught.value.expected, caught.value.actual) == (0, 1)
        assert log.head == 1
        assert len(await log.read_all()) == 1


async def test_a_conflict_fails_alone_in_its_batch(maker):
    """Requests made at once are answered each for itself, and no seq is lost."""
    requests = [submit(1), submit(2), append(job_stream(job(3)), 4, TURN), submit(4)]
    async with maker.open() as log:
        answers = await gather(log, requests)
        records = await log.read_all()

    assert isinstance(answers[2], VersionConflict)
    assert sorted(answer[0].seq for answer in answers if isinstance(answer, tuple)) == [1, 2, 3]
    assert [record.seq for record in records] == [1, 2, 3]


async def test_of_many_equal_keys_one_wins(maker):
    """50 submissions with one idempotency key make one job; the others learn its id."""
    key = e.IdempotencyRef(key="k", body="b")
    async with maker.open() as log:
        answers = await gather(log, [submit(n, idempotency=key) for n in range(50)])
        winner = await log.job_for_key("k")
        with pytest.raises(DuplicateKey) as later:
            await log.append(submit(99, idempotency=key))

    refused = [answer for answer in answers if isinstance(answer, DuplicateKey)]
    assert len(refused) == 49
    assert {error.job_id for error in refused} == {winner}
    assert later.value.job_id == winner
    assert log.head == 1


async def test_an_unknown_key_belongs_to_no_job(maker):
    """A key that was never used is free."""
    async with maker.open() as log:
        assert await log.job_for_key("k") is None


async def test_one_append_more_than_may_be_pending_is_refused_as_busy(maker):
    """The inbox is bounded: at the limit an append is refused at once, and alone."""
    async with maker.open(pending_max=3) as log:
        answers = await gather(log, [submit(n) for n in range(4)])
        (after,) = await log.append(submit(9))

    busy = [answer for answer in answers if isinstance(answer, LogBusy)]
    assert len(busy) == 1
    assert busy[0].pending_max == 3
    assert after.seq == 4


async def test_a_closed_log_refuses_appends_and_reads(maker):
    """After aclose nothing is taken; closing twice is harmless."""
    async with maker.open() as log:
        await log.append(submit(1))
        await log.aclose()
        await log.aclose()

        with pytest.raises(LogClosed):
            await log.append(submit(2))
        with pytest.raises(LogClosed):
            await log.payload("d")
        with pytest.raises(LogClosed):
            await log.wait_past(1)


async def test_what_is_pending_at_the_close_is_committed(maker):
    """Appends that were queued before aclose are answered, not lost."""
    answers = []

    async def one(log, number):
        answers.append(await log.append(submit(number)))

    async with maker.open() as log, trio.open_nursery() as nursery:
        maker.clock.at_next_reading(lambda: nursery.start_soon(log.aclose))
        for number in range(5):
            nursery.start_soon(one, log, number)
        await log.wait_past(4)

    async with maker.open() as log:
        assert len(answers) == 5
        assert log.head == 5


async def test_a_cancelled_appender_still_learns_the_outcome(maker):
    """Cancellation waits until the append is answered, then strikes."""
    learned = []

    async def one(log, scope):
        with scope:
            learned.extend(await log.append(submit(1)))
            await trio.lowlevel.checkpoint()
            learned.append("not cancelled")

    async with maker.open() as log:
        scope = trio.CancelScope()
        maker.clock.at_next_reading(scope.cancel)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, log, scope)

    assert [record.seq for record in learned] == [1]
    assert scope.cancelled_caught


async def test_an_append_that_is_cancelled_before_it_is_queued_writes_nothing(maker):
    """In a cancelled scope an append does not begin."""
    async with maker.open() as log:
        with trio.CancelScope() as scope:
            scope.cancel()
            await log.append(submit(1))

        assert scope.cancelled_caught
        assert log.head == 0


async def test_recorded_time_never_decreases(maker):
    """A clock that steps back is held at the last time until it has caught up, restarts too."""
    async with maker.open() as log:
        (first,) = await log.append(submit(1))
        maker.clock.now -= 10**12
        (second,) = await log.append(submit(2))
    async with maker.open() as log:
        (third,) = await log.append(submit(3))
        maker.clock.now += 2 * 10**12
        (fourth,) = await log.append(submit(4))

    assert first.recorded_at_ns == second.recorded_at_ns == third.recorded_at_ns
    assert fourth.recorded_at_ns > first.recorded_at_ns


async def test_a_reopened_log_says_what_it_said_before(maker):
    """All reads are equal before a close and after the next open."""

    async def everything(log):
        return (
            log.log_id,
            log.head,
            log.service_state,
            await log.read_all(),
            await log.read(job_stream(job(1))),
            await log.unfinished(),
            await log.jobs(JobQuery()),
            await log.job_for_key("k"),
            await log.read_service_state(2),
        )

    async with maker.open() as log:
        await log.append(append(SERVICE_STREAM, 0, STARTED))
        await log.append(submit(1, idempotency=e.IdempotencyRef(key="k", body="b")))
        await log.append(submit(2))
        await log.append(append(job_stream(job(2)), 1, e.JobCancelled()))
        before = await everything(log)
    async with maker.open(session="s2") as log:
        after = await everything(log)
        (record,) = await log.append(append(job_stream(job(1)), 1, TURN))

    assert before == after
    assert (record.seq, record.version, record.session) == (5, 2, "s2")


async def test_the_services_state_is_the_fold_of_the_log_at_each_seq(maker):
    """The live state after each append, and the one read later, are the fold up to that seq."""
    owned = submitted(owner=job(1))
    requests = [
        append(SERVICE_STREAM, 0, STARTED, e.ServiceReady(recovered=0)),
        submit(1),
        append(job_stream(job(2)), 0, owned),
        append(
            job_stream(job(1)),
            1,
            Fact(event=e.JobStarted(agent_digest="", containment=""), epoch=1),
            Fact(event=TURN, epoch=1),
        ),
        append(job_stream(job(2)), 1, e.JobCancelled(left=2)),
        append(job_stream(job(2)), 2, e.SlotReleased()),
        append(job_stream(job(1)), 3, e.JobErrored(cause="internal")),
        append(SERVICE_STREAM, 2, e.ServiceDraining(drain_ms=1)),
    ]
    async with maker.open() as log:
        live = []
        for request in requests:
            await log.append(request)
            live.append(log.service_state)
        records = await log.read_all()
        later = [await log.read_service_state(int(state.seq)) for state in live]

    folded = [fold_service(records[: state.seq]) for state in live]
    assert live == folded
    assert later == folded
    assert live[3].active == 1
    assert live[-1].finished == 2


async def test_a_state_past_the_head_can_not_be_read(maker):
    """The future is refused, naming the head."""
    async with maker.open() as log:
        with pytest.raises(PointNotInLog) as caught:
            await log.read_service_state(1)

    assert (caught.value.asked, caught.value.head) == (1, 0)


async def test_payloads_and_artifacts_lie_beside_their_event_until_erased(maker):
    """Rows are committed with the event, and go with the event that erases them."""
    stored = StoredArtifact(digest="d", salt=b"s", file="f" * 64, size=3)
    text = payload(b"a prompt", b"salt")
    facts = (
        Fact(event=submitted(prompt=text.ref), payloads=(text,)),
        Fact(event=e.ArtifactStored(name="diff", digest="d", size=3), artifacts=(stored,)),
    )
    async with maker.open() as log:
        await log.append(append(job_stream(JOB), 0, *facts))
        assert await log.payloads([text.digest, "unknown"]) == {text.digest: b"a prompt"}
        assert await log.payload(text.digest) == b"a prompt"
        assert await log.artifact("d") == stored
        assert await log.artifact_files() == {"f" * 64}

        await log.append(append(job_stream(JOB), 2, e.PayloadErased(digests=[text.digest])))
        await log.append(append(job_stream(JOB), 3, e.ArtifactErased(digest="d")))

        assert await log.payload(text.digest) is None
        assert await log.artifact("d") is None
        assert await log.artifact_files() == frozenset()


async def test_a_refused_append_leaves_no_payload(maker):
    """Nothing of a refused request is written, what lies beside it included."""
    text = payload(b"x", b"salt")
    fact = Fact(event=submitted(), payloads=(text,))
    async with maker.open() as log:
        answers = await gather(log, [append(job_stream(JOB), 7, fact), submit(2)])

        assert isinstance(answers[0], VersionConflict)
        assert await log.payload(text.digest) is None


async def test_a_stream_is_read_from_a_version_and_up_to_a_seq(maker):
    """``after_version`` is exclusive, ``upto_seq`` inclusive; an unknown stream is empty."""
    stream = job_stream(JOB)
    async with maker.open() as log:
        await log.append(append(stream, 0, submitted(), TURN, TURN, TURN))
    async with maker.open() as log:
        cold = await log.read(stream, after_version=1, upto_seq=3)
        await log.append(append(stream, 4, TURN))
        warm = await log.read(stream, after_version=3)

        assert [record.version for record in cold] == [2, 3]
        assert [record.version for record in warm] == [4, 5]
        assert await log.read(job_stream(job(77))) == []


async def test_the_whole_log_is_read_in_pages(maker):
    """``after`` is exclusive, ``upto`` inclusive, and a page has at most ``limit`` events."""
    async with maker.open() as log:
        for number in range(6):
            await log.append(submit(number))
        warm = [
            [r.seq for r in await log.read_all(after=1, limit=3)],
            [r.seq for r in await log.read_all(after=3, upto=5)],
            [r.seq for r in await log.read_all(after=6)],
        ]
    async with maker.open() as log:
        cold = [
            [r.seq for r in await log.read_all(after=1, limit=3)],
            [r.seq for r in await log.read_all(after=3, upto=5)],
            [r.seq for r in await log.read_all(after=6)],
        ]

    assert warm == cold == [[2, 3, 4], [4, 5], []]


async def test_a_time_is_found_as_the_last_seq_at_or_before_it(maker):
    """Between two events it is the earlier; before the first there is none."""
    async with maker.open() as log:
        times = [(await log.append(submit(n)))[0].recorded_at_ns for n in range(3)]

        assert await log.seq_at(times[0] - 1) == 0
        assert await log.seq_at(times[1]) == 2
        assert await log.seq_at(times[2] - 1) == 2
        assert await log.seq_at(times[2] + 10**12) == 3


async def test_jobs_are_filtered_newest_first(maker):
    """Each filter alone, and together with the cursor."""
    async with maker.open() as log:
        times = []
        for number in range(1, 7):
            fields = {
                "agent": "echo" if number % 2 else "shell",
                "owner": job(1) if number == 6 else None,
                "labels": {"team": "a" if number < 4 else "b"},
            }
            times.append((await log.append(submit(number, **fields)))[0].recorded_at_ns)
        await log.append(append(job_stream(job(2)), 1, e.JobCancelled()))
        await log.append(append(job_stream(job(3)), 1, e.JobErrored(cause="internal")))

        async def found(**query):
            return [int(name[-3:]) for _, name in await log.jobs(JobQuery(**query))]

        assert await found() == [6, 5, 4, 3, 2, 1]
        assert await found(limit=2) == [6, 5]
        assert await found(before=4) == [3, 2, 1]
        assert await found(agent="shell") == [6, 4, 2]
        assert await found(owner="") == [5, 4, 3, 2, 1]
        assert await found(owner=job(1)) == [6]
        assert await found(label=("team", "a")) == [3, 2, 1]
        assert await found(label=("team", "a"), agent="echo", before=3) == [1]
        assert await found(status=frozenset({"cancelled"})) == [2]
        assert await found(status=frozenset({"cancelled", "error"})) == [3, 2]
        assert await found(status=frozenset({"queued", "error"}), limit=3) == [6, 5, 4]
        assert await found(status=frozenset()) == []
        assert await found(status=frozenset({"error"}), label=("team", "a")) == [3]
        assert await found(since_ns=times[3]) == [6, 5, 4]
        assert await found(until_ns=times[3]) == [3, 2, 1]
        assert await found(since_ns=times[1], until_ns=times[2]) == [2]
        assert [int(name[-3:]) for _, name in await log.unfinished()] == [1, 4, 5, 6]


async def test_a_jobs_row_follows_its_events(maker):
    """Started, requeued, ended: the lists of jobs say so at once and after a restart."""
    started = Fact(event=e.JobStarted(agent_digest="", containment=""), epoch=1)
    async with maker.open() as log:
        await log.append(submit(1))
        await log.append(append(job_stream(job(1)), 1, started))
        running = await log.jobs(JobQuery(status=frozenset({"running"})))
    async with maker.open() as log:
        await log.append(append(job_stream(job(1)), 2, e.JobRequeued(why="restart")))
        queued = await log.jobs(JobQuery(status=frozenset({"queued"})))
        await log.append(append(job_stream(job(1)), 3, e.JobErrored(cause="internal", left=1)))
        state = log.service_state

    assert running == queued == [(1, job(1))]
    assert (state.active, state.queued, state.finished, state.quarantined) == (0, 0, 1, 1)


async def test_a_follower_replays_then_follows_without_gap_or_double(maker):
    """Events before, during and after the replay come once each, in order."""
    seen = []

    async def follower(log):
        async with log.follow(after=2) as events:
            async for record in events:
                seen.append(int(record.seq))
                if record.seq == 200:
                    return

    async def appender(log, number):
        for version in range(10):
            event = submitted() if version == 0 else TURN
            await log.append(append(job_stream(job(number)), version, event))

    async with maker.open() as log:
        await log.append(submit(100))
        for version in range(1, 10):
            await log.append(append(job_stream(job(100)), version, TURN))
    async with maker.open() as log, trio.open_nursery() as nursery:
        nursery.start_soon(follower, log)
        for number in range(19):
            nursery.start_soon(appender, log, number)

    assert seen == list(range(3, 201))


async def test_a_follower_of_one_stream_sees_that_stream_alone(maker):
    """Other streams pass it by; it sees its own from the log and live."""
    seen = []
    stream = job_stream(job(1))

    async def follower(log, started):
        async with log.follow(stream=stream) as events:
            started.set()
            async for record in events:
                seen.append((record.stream, record.version))
                if record.version == 4:
                    return

    async with maker.open() as log:
        await log.append(submit(1))
        await log.append(submit(2))
    async with maker.open() as log, trio.open_nursery() as nursery:
        started = trio.Event()
        nursery.start_soon(follower, log, started)
        await started.wait()
        await log.append(append(stream, 1, TURN, TURN))
        await log.append(append(job_stream(job(2)), 1, TURN))
        await log.append(append(stream, 3, TURN))

    assert seen == [(stream, version) for version in (1, 2, 3, 4)]


async def test_closing_the_log_ends_its_followers(maker):
    """A follower gets all that was committed, then its loop ends."""
    seen = []

    async def follower(log, **of):
        async with log.follow(**of) as events:
            seen.append([int(record.seq) async for record in events])

    async with trio.open_nursery() as nursery, maker.open() as log:
        nursery.start_soon(follower, log)
        nursery.start_soon(lambda: follower(log, stream=job_stream(job(1))))
        nursery.start_soon(lambda: follower(log, stream=job_stream(job(9))))
        await log.append(submit(1))
        await log.append(submit(2))

    assert sorted(seen) == [[], [1], [1, 2]]


async def test_wait_past_returns_when_the_head_or_the_stream_is_past(maker):
    """A stream is not past because another one is."""
    order = []

    async def waiter(log, name, seq, stream, ready):
        ready.set()
        await log.wait_past(seq, stream=stream)
        order.append((name, int(log.head)))

    async with maker.open() as log:
        await log.append(submit(1))
        await log.append(submit(2))
    async with maker.open() as log, trio.open_nursery() as nursery:
        await log.wait_past(1)
        await log.wait_past(0, stream=job_stream(job(1)))
        for name, seq, stream in (("log", 2, None), ("one", 1, job_stream(job(1)))):
            ready = trio.Event()
            nursery.start_soon(waiter, log, name, seq, stream, ready)
            await ready.wait()
        await log.append(append(job_stream(job(2)), 1, TURN))
        await log.append(append(job_stream(job(1)), 1, TURN))

    assert [name for name, _ in order] == ["log", "one"]
    assert order[1][1] == 4


async def test_many_followers_at_the_head_all_see_the_next_event(maker):
    """A hundred followers of the log and of streams are woken each by what is theirs."""
    seen = []

    async def follower(log, stream, started):
        async with log.follow(stream=stream, after=int(log.head)) as events:
            started.set()
            async for record in events:
                seen.append(record.stream)
                return

    async with maker.open() as log, trio.open_nursery() as nursery:
        await log.append(submit(1))
        await log.append(submit(2))
        for number in range(100):
            started = trio.Event()
            stream = None if number % 2 else job_stream(job(1))
            nursery.start_soon(follower, log, stream, started)
            await started.wait()
        await log.append(append(job_stream(job(2)), 1, TURN))
        await log.append(append(job_stream(job(1)), 1, TURN))

    assert seen.count(job_stream(job(2))) == 50
    assert seen.count(job_stream(job(1))) == 50


async def test_an_append_without_facts_is_a_bug(maker):
    """An empty request asserts in its caller; the log goes on."""
    async with maker.open() as log:
        with pytest.raises(AssertionError):
            await log.append(append(job_stream(JOB), 0))
        await log.append(submit(1))

        assert log.head == 1


@st.composite
def histories(draw):
    """Appends over three streams, some of them refused, with any event that may stand there."""
    chance = draw(st.randoms(use_true_random=False))
    requests = []
    versions = {}
    for _ in range(draw(st.integers(1, 12))):
        number = chance.randint(0, 2)
        stream = job_stream(job(number)) if number else SERVICE_STREAM
        facts = []
        for _ in range(chance.randint(1, 3)):
            event = example_event(chance.choice(EVENT_CLASSES), chance)
            if isinstance(event, e.JobSubmitted):
                if versions.get(stream):
                    continue
                event = with_some_key(event, chance)
            of_service = isinstance(event, e.ServiceEvent.__args__)
            if of_service == (stream == SERVICE_STREAM):
                facts.append(
                    Fact(event=event, epoch=chance.randint(0, 3), n=chance.choice([None, 4]))
                )
        if not facts:
            continue
        wrong = chance.random() < 0.1
        version = versions.get(stream, 0) + wrong
        requests.append(append(stream, version, *facts, by="x", request_id=None))
        if not wrong:
            versions[stream] = versions.get(stream, 0) + len(facts)
    return requests


def with_some_key(event, chance):
    """The submission with one of two idempotency keys, or none."""
    key = chance.choice([None, None, "k1", "k2"])
    ref = None if key is None else e.IdempotencyRef(key=key, body="b")
    return msgspec.structs.replace(event, idempotency=ref)


@pytest.mark.slow
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(requests=histories())
def test_both_logs_write_the_same_bytes_for_the_same_seams(new_maker, requests):
    """For any history both answer equally, refusals included, and store equal rows."""
    memory, sqlite = new_maker("memory"), new_maker("sqlite")

    said = [trio.run(_replay, maker, requests) for maker in (memory, sqlite)]

    assert said[0] == said[1]
    with closing(sqlite3.connect(sqlite.path)) as connection:
        rows = connection.execute("SELECT * FROM events ORDER BY seq").fetchall()
        tiles = connection.execute("SELECT level, idx, root FROM tiles").fetchall()
    assert memory.store.events == rows
    assert memory.store.tiles == tiles


async def _replay(maker, requests):
    answers = []
    async with maker.open() as log:
        for request in requests:
            try:
                answers.append(await log.append(request))
            except AppendRefused as error:
                answers.append((type(error), str(error)))
        return answers, log.service_state, await log.jobs(JobQuery()), await log.unfinished()


async def test_both_logs_complete_the_same_tiles(new_maker):
    """Over more than one tile of events the roots are equal, over restarts too."""
    roots = []
    for kind in ("memory", "sqlite"):
        maker = new_maker(kind)
        for start in (0, 300):
            async with maker.open() as log:
                for version in range(start, start + 300, 100):
                    turns = [TURN] * 100
                    await log.append(append(job_stream(JOB), version, *turns))
        if kind == "memory":
            roots.append(maker.store.tiles)
        else:
            with closing(sqlite3.connect(maker.path)) as connection:
                roots.append(connection.execute("SELECT level, idx, root FROM tiles").fetchall())

    assert [tile[:2] for tile in roots[0]] == [(0, 0), (0, 1)]
    assert roots[0] == roots[1]
