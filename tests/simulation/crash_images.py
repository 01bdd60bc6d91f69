"""Power cuts: real appends through the real log, on a disk that remembers what was synced.

``python tests/simulation/crash_images.py --images 1000`` records three loads of appends, each of
which starts from what a power cut left of the one before, cuts the power at random points of
each, and lets the real log open what is left. Then every event that was acknowledged must be
there with its leaf, the log a prefix of what was written, ``verify`` content before and after
that start, what was erased still gone, and appending must go on. Prints a table; exit code 1 if
anything did not hold. The tests run a sample.
"""

import argparse
import collections
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from bisect import bisect_right
from contextlib import closing
from pathlib import Path

import attrs
import trio

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from storage import events as e  # noqa: E402
from storage.errors import StorageError  # noqa: E402
from storage.ids import IdSource, job_stream  # noqa: E402
from storage.sqlite_log import SqliteEventLog  # noqa: E402
from storage.verify import verify  # noqa: E402
from tests.old_logs.make import Clock, Story  # noqa: E402
from tests.simulation.recorded_disk import (  # noqa: E402
    MODES,
    CrashDisk,
    Record,
    RecordingVfs,
    connections_over,
    hears,
)

DB = "log.db"
APPENDERS = 6
JOBS_EACH = 2
LIVES = 2
GENERATIONS = 3
REAL_LIMITS_IN = 1
# The log's own limits come only after 16 and 64 MiB. With small ones a short load has many
# checkpoints of the write-ahead log, which begins anew and is cut; one generation keeps the real.
SMALL = {"wal_autocheckpoint": 60, "journal_size_limit": 100_000}


class Died(Exception):
    """The log would have ended its process."""


def die(why):
    raise Died(why)


@attrs.frozen(kw_only=True)
class Recording:
    """A load as it went over the disk, and what its clients were told.

    ``leaves`` are those of all events ever written, by seq from 1. ``erased`` are (operations
    done, bytes) of payloads whose erasure was answered. ``known`` is the seq that was answered
    before the first operation.
    """

    record: Record
    leaves: list[bytes]
    erased: list[tuple[int, bytes]]
    log_id: str
    artifacts: Path
    known: int

    def answered(self, cut):
        """Answer the newest seq that a client knew of before this operation."""
        count = bisect_right(self.record.answers, (cut, sys.maxsize))
        return max([self.known, *(seq for _, seq in self.record.answers[:count])])


class HeardLog:
    """The log as the load sees it: notes when each answer arrives."""

    def __init__(self, log, record):
        self._log = log
        self._record = record
        self.log_id = log.log_id

    async def append(self, request):
        records = await self._log.append(request)
        self._record.heard(records[-1].seq)
        return records


class Load:
    """Appenders that run jobs from submission to end, each after the other, all at once."""

    def __init__(self, record, artifacts, seed):
        self.record = record
        self.artifacts = artifacts
        self.chance = random.Random(seed)
        self.clock = Clock()
        self.ids = IdSource(self.clock, random.Random(f"ids {seed}").randbytes)
        self.erased = []

    async def live(self, path, session, connection_class):
        """Open the log, run the jobs, close it; answer its id."""
        async with SqliteEventLog.open(
            path,
            ids=self.ids,
            clock_ns=self.clock,
            session=session,
            die=die,
            connection_class=connection_class,
        ) as log:
            assert (log.damage, log.read_only) == (None, None)
            self.record.heard(log.head)
            async with trio.open_nursery() as nursery:
                for _ in range(APPENDERS):
                    story = Story(HeardLog(log, self.record), self.ids, self.artifacts)
                    nursery.start_soon(self._jobs, story)
            return log.log_id

    async def _jobs(self, story):
        for _ in range(JOBS_EACH):
            await self._job(story)

    async def _job(self, story):
        prompt = f"prompt {self.ids.salt().hex()} " * self.chance.choice((1, 20, 400))
        job = job_stream(self.ids.new_job())
        submission = story.submission(prompt, labels={"team": "core"})
        await story.say(job, submission)
        await story.begin(job)
        for turn in range(1, self.chance.randint(2, 5)):
            said = e.AgentTurnFinished(turn=turn, text=story.text(self._words()))
            await story.say(job, said, e.UsageRecorded(output_tokens=7), n=turn)
        tail = e.OutputRecorded(stream="stdout", offset=0, size=5, tail=story.text("hello"))
        await story.say(job, tail, n=10)
        ended = e.AgentEnded(exit=e.ExitStatus(code=0), result=story.text(self._words()))
        await story.say(job, ended, n=11)
        await story.say(job, e.ProcessReaped(phase="agent"))
        await story.say(job, story.artifact("diff", self.chance.randbytes(50)))
        await story.say(job, e.ProcessReaped(phase="capture"), e.JobCompleted(artifacts="complete"))
        await story.say(job, e.WorkspaceRemoved())
        if self.chance.random() < 0.3:
            await story.say(job, e.PayloadErased(digests=[submission.prompt.digest]), by="alice")
            self.erased.append((len(self.record.operations), prompt[:39].encode()))

    def _words(self):
        return "word " * self.chance.choice((1, 50, 1_000))


@attrs.define
class Outcome:
    """What the images of one or more records showed."""

    counts: collections.Counter = attrs.Factory(collections.Counter)
    problems: list[str] = attrs.Factory(list)


def record_load(folder, seed, *, before=None, files=(), pragmas=SMALL, early=False):
    """Record some lives of a log, from nothing or from what a cut left of an earlier record.

    ``before`` is (earlier recording, operations that it had done); ``files`` its image.
    ``pragmas`` and ``early`` change the connection: see :class:`RecordedConnection`.
    """
    folder.mkdir()
    earlier, cut = before or (None, 0)
    artifacts = earlier.artifacts if earlier else folder / "artifacts"
    write_files(folder / "disk", files)
    record = Record(dict(files))
    load = Load(record, artifacts, seed)
    with RecordingVfs(record, folder / "disk") as vfs:
        connections = connections_over(vfs, pragmas, early=early)

        async def live():
            hears(record)
            for life in range(LIVES):
                path = folder / "disk" / DB
                log_id = await load.live(path, f"{seed}-{life}", connections)
            return log_id

        log_id = trio.run(live)
    gone = [(0, secret) for done, secret in (earlier.erased if earlier else ()) if done <= cut]
    return Recording(
        record=record,
        leaves=leaves_of(folder / "disk" / DB),
        erased=gone + load.erased,
        log_id=log_id,
        artifacts=artifacts,
        known=earlier.answered(cut) if earlier else 0,
    )


def crash(recording, scratch, *, images, seed, problems_max=5):
    """Cut the power at random points of a record and examine what is left each time.

    Images that show a problem stay in the folder, as the cut left them. Ends after some problems.
    """
    chance = random.Random(seed)
    disk, outcome = CrashDisk(recording.record), Outcome()
    for number, (cut, kind) in enumerate(cuts(recording.record, images, chance)):
        disk.play(cut)
        mode = chance.choice(MODES)
        folder = scratch / f"image-{number}"
        files = disk.image(mode, chance)
        write_files(folder, files)
        counts, problems = trio.run(examine, folder, recording, cut)
        outcome.counts.update(counts)
        outcome.counts.update({"images": 1, f"cut {kind}": 1, f"left: {mode}": 1})
        outcome.counts["with something to lose"] += disk.unsynced > 0
        for problem in problems:
            outcome.problems.append(f"seed {seed}, image {number}, cut {cut}, {mode}: {problem}")
        shutil.rmtree(folder)
        if problems:
            write_files(folder, files)
        if len(outcome.problems) >= problems_max:
            break
    return outcome


def cuts(record, images, chance):
    """Answer points to cut at, in order; (operations done, kind of the point).

    Most operations are those of quiet commits, so that the points which matter are drawn apart:
    a sync that has not happened, an answer that was just heard, and an opening.
    """
    operations = record.operations
    first_answer = record.answers[0][0]
    places = {
        "anywhere": range(len(operations) + 1),
        "before a sync": [i for i, done in enumerate(operations) if done.kind == "sync"],
        "after an answer": [done for done, _ in record.answers],
        "while opening": range(first_answer + 1),
        "around a checkpoint": [i for i, o in enumerate(operations) if o.name == DB],
    }
    kinds = [kind for kind, points in places.items() if points]
    drawn = [kinds[number % len(kinds)] for number in range(images)]
    return sorted((chance.choice(places[kind]), kind) for kind in drawn)


async def examine(folder, recording, cut):
    """Open what a cut left with the real log; answer what it was a case of, and what is wrong."""
    answered = recording.answered(cut)
    counts, problems = collections.Counter(), []
    try:
        if answered:
            problems += findings(folder / DB, recording, "before the start")
        head = await _reopen(folder / DB, recording, cut, problems)
        problems += findings(folder / DB, recording, "after the start")
        counts["nothing was answered yet"] += not answered
        counts["events that nobody had heard of survived"] += head > answered
    except (StorageError, sqlite3.Error, AssertionError, RuntimeError, OSError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    for done, secret in recording.erased:
        if done <= cut and any(secret in path.read_bytes() for path in folder.iterdir()):
            problems.append(f"{secret!r} was erased and is there again")
    return counts, problems


async def _reopen(path, recording, cut, problems):
    clock, answered = Clock(), recording.answered(cut)
    ids = IdSource(clock, random.Random(f"reopened {cut}").randbytes)
    async with SqliteEventLog.open(path, ids=ids, clock_ns=clock, session="r", die=die) as log:
        if log.damage is not None or log.read_only is not None:
            problems.append(f"damage: {log.damage or log.read_only}")
        leaves = [record.leaf for record in await all_events(log)]
        if len(leaves) < answered:
            problems.append(f"{answered} events were acknowledged, {len(leaves)} are there")
        if leaves != [leaf.hex() for leaf in recording.leaves[: len(leaves)]]:
            problems.append("the log is not a prefix of what was written")
        if answered and log.log_id != recording.log_id:
            problems.append("the log has another id")
        story = Story(log, ids, recording.artifacts)
        job = await story.submit("after the crash")
        await story.begin(job)
        if len(await log.read(job)) != 5 or log.head != len(leaves) + 5:
            problems.append("appending does not go on")
        return len(leaves)


async def all_events(log):
    """Answer every event of a log."""
    events = []
    while page := await log.read_all(after=len(events)):
        events += page
    return events


def findings(path, recording, when):
    """Answer what ``verify`` finds."""
    report = verify(path, recording.artifacts)
    found = [f"verify {when}: {finding}" for finding in report.findings]
    return found or ([] if report.ok else [f"verify {when}: torn"])


def leaves_of(path):
    """Answer the leaves of all events in a file."""
    with closing(sqlite3.connect(path)) as connection:
        return [leaf for (leaf,) in connection.execute("SELECT leaf FROM events ORDER BY seq")]


def write_files(folder, files):
    """Make a folder of these files, name to bytes."""
    folder.mkdir(parents=True)
    for name, data in dict(files).items():
        (folder / name).write_bytes(data)


def run_campaign(folder, *, images, seed):
    """Record and crash some generations, each born of a crash of the one before."""
    total, before, files = Outcome(), None, ()
    for generation in range(GENERATIONS):
        mine = f"{seed}.{generation}"
        pragmas = {} if generation == REAL_LIMITS_IN else SMALL
        recording = record_load(folder / mine, mine, before=before, files=files, pragmas=pragmas)
        share = images // GENERATIONS + (generation < images % GENERATIONS)
        outcome = crash(recording, folder / mine, images=share, seed=mine)
        total.counts.update(outcome.counts)
        total.counts["operations recorded"] += len(recording.record.operations)
        total.counts["syncs recorded"] += sum(o.kind == "sync" for o in recording.record.operations)
        total.counts["events acknowledged"] += len(recording.leaves) - recording.known
        total.problems += outcome.problems
        before, files = _next_birth(recording, random.Random(mine))
    return total


def _next_birth(recording, chance):
    ends = len(recording.record.operations)
    disk, cut = CrashDisk(recording.record), chance.randint(ends // 2, ends)
    disk.play(cut)
    return (recording, cut), disk.image("sectors", chance)


def scratch_parent():
    """Answer a folder in memory for the images, None for the usual one: it is the faster."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--keep", type=Path, help="folder to make, for images with a problem")
    options = parser.parse_args()
    print("seed", options.seed, flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=scratch_parent()) as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(exist_ok=options.keep is None)
        outcome = run_campaign(folder, images=options.images, seed=options.seed)
    for name, count in sorted(outcome.counts.items()):
        print(f"{count:8} {name}")
    print(f"{len(outcome.problems)} problems in {time.monotonic() - began:.0f} s")
    for problem in outcome.problems:
        print(problem)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
