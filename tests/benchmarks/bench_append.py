"""Appends of many tasks against bare executemany in equal batches, and against fdatasync.

Run it from the root: ``PYTHONPATH=. python tests/benchmarks/bench_append.py``. Rounds alternate,
so that a ratio compares what one disk did in one minute. Figures are events per second.
"""

import argparse
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import trio

from storage import events as e
from storage.event_log import Append, Fact
from storage.ids import IdSource, job_stream
from storage.schema import connect_writer
from storage.sqlite_log import SqliteEventLog

INSERT = "INSERT INTO bare VALUES (?,?,?,?,?,?,?,?)"
TABLE = """CREATE TABLE bare(seq INTEGER PRIMARY KEY, stream TEXT NOT NULL,
    version INTEGER NOT NULL, type TEXT NOT NULL, recorded_at_ns INTEGER NOT NULL,
    session TEXT NOT NULL, body BLOB NOT NULL, leaf BLOB NOT NULL, UNIQUE (stream, version))"""
EVENT = e.AgentTurnFinished(turn=1, text=e.PayloadRef(digest="ab" * 32, size=351))


def die(reason: str) -> NoReturn:
    """End the benchmark: its figures mean nothing."""
    sys.exit(reason)


async def log_round(path: Path, appenders: int, events: int) -> tuple[float, float]:
    """Answer events a second of the log, and the mean size of its batches."""
    ids = IdSource()
    each = events // appenders
    batches: Counter[int] = Counter()

    async def appender() -> None:
        stream = job_stream(ids.new_job())
        for version in range(each):
            fact = Fact(event=EVENT, epoch=1, n=version)
            await log.append(Append(stream=stream, expected_version=version, facts=(fact,)))
            batches[int(log.head)] += 1

    async with SqliteEventLog.open(
        path, ids=ids, clock_ns=time.time_ns, session="bench", die=die
    ) as log:
        begun = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(appenders):
                nursery.start_soon(appender)
        spent = time.perf_counter() - begun
    return each * appenders / spent, each * appenders / len(batches)


def bare_round(path: Path, rows: list[tuple[object, ...]], batch: int) -> float:
    """Answer events a second of executemany in batches, each its own transaction."""
    with closing(connect_writer(path)) as connection:
        connection.execute(TABLE)
        begun = time.perf_counter()
        for start in range(0, len(rows), batch):
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(INSERT, rows[start : start + batch])
            connection.execute("COMMIT")
        return len(rows) / (time.perf_counter() - begun)


def sync_round(path: Path, data: bytes, seconds: float) -> float:
    """Answer how many times a second one event's bytes are written and synced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            os.write(descriptor, data)
            os.fdatasync(descriptor)
            count += 1
        return count / (time.perf_counter() - begun)
    finally:
        os.close(descriptor)


def spread(values: list[float]) -> str:
    """Answer median and range of some values."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> None:
    """Run the rounds and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--appenders", type=int, default=100)
    parser.add_argument("--events", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    figures: dict[str, list[float]] = {"log": [], "bare": [], "sync": [], "batch": []}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for number in range(options.rounds):
            path = Path(folder) / f"{number}.db"
            rate, batch = trio.run(log_round, path, options.appenders, options.events)
            with closing(sqlite3.connect(path)) as connection:
                rows = connection.execute("SELECT * FROM events ORDER BY seq").fetchall()
            bare = bare_round(Path(folder) / f"{number}.bare.db", rows, max(1, round(batch)))
            synced = sync_round(Path(folder) / f"{number}.sync", rows[0][6], 0.5)
            for name, value in zip(figures, (rate, bare, synced, batch), strict=True):
                figures[name].append(value)
    for name, values in figures.items():
        print(f"{name:>6}: {spread(values)}")
    for other in ("bare", "sync"):
        ratios = [a / b for a, b in zip(figures["log"], figures[other], strict=True)]
        print(f"log / {other}: {spread(ratios)}")


if __name__ == "__main__":
    main()
