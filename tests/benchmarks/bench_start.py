"""How long a start takes on a million events after kill -9.

Run it from the root: ``PYTHONPATH=. python tests/benchmarks/bench_start.py``. It builds a log of
jobs through the same batches as the writer, copies the database and its write-ahead log while
they are open, and measures in a new process: open, the unfinished jobs, and each of their
streams.
"""

import argparse
import json
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import trio

from actors.runtime import RuntimeConfig, open_runtime
from storage import events as e
from storage.batch import Batch, Prepared, Tip
from storage.event_log import Append, Fact
from storage.ids import SERVICE_STREAM, IdSource, JobId, StreamName, job_stream
from storage.job_state import fold
from storage.projection_store import write_projections
from storage.schema import connect_writer, migrate
from storage.sqlite_log import SqliteEventLog
from storage.testing import submitted
from storage.writer import ConnectionSource, insert_batch

BATCH_EVENTS = 5_000
STARTED = e.ServiceStarted(
    version="1",
    config_digest="",
    capacity=10,
    queue_depth=100,
    containment="",
    boot_id="",
    log_id="",
)
TURN = e.AgentTurnFinished(turn=1, text=e.PayloadRef(digest="ab" * 32, size=351))
BEGUN: tuple[e.JobEvent, ...] = (
    e.JobStarted(agent_digest="ab" * 32, containment="cgroup"),
    e.WorkspacePrepared(kind="clone", strategy="shared", repo="/srv/repo", base_commit="c" * 40),
    e.ProcessSpawned(keeper="k", pid=1, start_time=2, boot_id="b"),
    e.AgentStarted(backend="claude"),
)
ENDED: tuple[e.JobEvent, ...] = (
    e.UsageRecorded(input_tokens=1000, output_tokens=200, cost_microusd=5),
    e.AgentEnded(exit=e.ExitStatus(code=0)),
    e.ProcessReaped(phase="agent", seen=1),
)


def die(reason: str) -> NoReturn:
    """End the benchmark: its figures mean nothing."""
    sys.exit(reason)


def requests(events: int, jobs: int, unfinished: int, ids: IdSource) -> list[tuple[int, Append]]:
    """Answer requests with the event number at which they come; some jobs never end."""
    chance = random.Random(1)
    each = events // jobs
    open_jobs = set(chance.sample(range(jobs), unfinished))
    planned: list[tuple[int, Append]] = [
        (0, append(SERVICE_STREAM, 0, STARTED)),
    ]
    for number in range(jobs):
        stream = job_stream(JobId(ids.new_job()))
        at = number * each + 1
        key = e.IdempotencyRef(key=f"{number:064x}", body="b" * 64)
        planned.append((at, append(stream, 0, submitted(labels={"team": "a"}, idempotency=key))))
        turns = (TURN,) * max(0, each - 2 - len(BEGUN) - len(ENDED))
        middle, last = (*BEGUN, *turns, *ENDED), e.JobCompleted()
        if number in open_jobs:
            middle, last = (*BEGUN, *turns, TURN, TURN, TURN), TURN
        # A job's later events come later: the streams are mixed, as in life.
        later = at + chance.randint(1, 200 * each)
        planned.append((later, append(stream, 1, *middle)))
        planned.append((later + each, append(stream, 1 + len(middle), last)))
    planned.sort(key=lambda pair: pair[0])
    return planned


def append(stream: StreamName, version: int, *events: e.AnyEvent) -> Append:
    """Answer a request with these events of epoch 1."""
    facts = tuple(Fact(event=event, epoch=1) for event in events)
    return Append(stream=stream, expected_version=version, facts=facts)


def build(path: Path, copy: Path, options: argparse.Namespace) -> int:
    """Write the log and copy its files while the last transactions are in the WAL alone."""
    ids = IdSource()
    with closing(connect_writer(path)) as connection:
        migrate(connection, lambda: ids.new("log"))
        connection.execute("PRAGMA synchronous=OFF")
        tip, source = Tip(), ConnectionSource(connection)
        batch = None
        for _, request in requests(options.events, options.jobs, options.unfinished, ids):
            if batch is None:
                connection.execute("BEGIN IMMEDIATE")
                batch = Batch(tip, source, session="bench", clock_ns=time.time_ns)
            batch.add(Prepared(request))
            if len(batch.events) >= BATCH_EVENTS:
                commit(connection, tip, batch)
                batch = None
        if batch is not None:
            commit(connection, tip, batch)
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
        return tip.seq


def commit(connection: sqlite3.Connection, tip: Tip, batch: Batch) -> None:
    """Write a batch as the writer does."""
    batch.finish()
    insert_batch(connection, batch)
    write_projections(connection, batch)
    connection.execute("COMMIT")
    tip.adopt(batch)


async def start(path: Path) -> dict[str, float]:
    """Answer the seconds that each part of a start takes."""
    begun = time.perf_counter()
    async with SqliteEventLog.open(
        path, ids=IdSource(), clock_ns=time.time_ns, session="s", die=die
    ) as log:
        opened = time.perf_counter()
        jobs = await log.unfinished()
        for _, job in jobs:
            state = fold(await log.read(job_stream(JobId(job))))
            assert state is not None, "an unfinished job has its events"
        done = time.perf_counter()
        assert log.damage is None, "the copy is whole"
        return {
            "open_s": opened - begun,
            "streams_s": done - opened,
            "total_s": done - begun,
            "events": int(log.head),
            "unfinished": len(jobs),
        }


async def ready(path: Path) -> dict[str, float]:
    """Answer the seconds until a whole runtime is ready on a copy: recovery of each unfinished job.

    Every unfinished job had begun, the dearest case: each is reaped and marked interrupted.
    """
    data = path.parent / "data"
    data.mkdir()
    for suffix in ("", "-wal"):
        shutil.move(f"{path}{suffix}", data / f"log.db{suffix}")
    begun = time.perf_counter()
    async with open_runtime(RuntimeConfig(data=data, version="bench")) as runtime:
        done = time.perf_counter()
        assert runtime.ready, "the block is entered when the service is ready"
        return {"ready_s": done - begun, "events": int(runtime.log.head)}


def main() -> None:
    """Build once, start several times, each on a fresh copy and in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--unfinished", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start", type=Path, help="only start on this file and print figures")
    parser.add_argument("--ready", type=Path, help="only start a runtime on this file")
    options = parser.parse_args()
    if options.ready is not None:
        print(json.dumps(trio.run(ready, options.ready)))
        return
    if options.start is not None:
        print(json.dumps(trio.run(start, options.start)))
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        begun = time.perf_counter()
        build(folder / "log.db", folder / "killed.db", options)
        sizes = [(folder / f"killed.db{s}").stat().st_size / 1e6 for s in ("", "-wal")]
        took = time.perf_counter() - begun
        print(f"built in {took:.0f} s: {sizes[0]:.0f} MB, WAL {sizes[1]:.1f} MB")
        for _ in range(options.rounds):
            for suffix in ("", "-wal"):
                shutil.copy(folder / f"killed.db{suffix}", folder / f"start.db{suffix}")
            (folder / "start.db-shm").unlink(missing_ok=True)
            for what in ("--start", "--ready"):
                command = [sys.executable, __file__, what, str(folder / "start.db")]
                subprocess.run(command, check=True)
                if what == "--start":
                    for suffix in ("", "-wal"):
                        shutil.copy(folder / f"killed.db{suffix}", folder / f"start.db{suffix}")
                    (folder / "start.db-shm").unlink(missing_ok=True)
            shutil.rmtree(folder / "data")


if __name__ == "__main__":
    main()
