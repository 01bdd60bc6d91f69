"""Compares the record of apsw's SQLite with what the SQLite of Python's ``sqlite3`` asks of the OS.

``python tests/simulation/compare_with_strace.py`` needs strace. It makes the same appends twice,
recorded, and by the log as it is in production under strace, and compares each write, truncate,
sync and delete of the log's files and folder. Exit code 1 if they differ.
"""

import argparse
import difflib
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import trio

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from storage.ids import IdSource  # noqa: E402
from storage.sqlite_log import SqliteEventLog  # noqa: E402
from tests.old_logs.make import Clock, Story, die  # noqa: E402
from tests.simulation.recorded_disk import (  # noqa: E402
    Record,
    RecordingVfs,
    connections_over,
    hears,
)

CALLS = "pwrite64,fsync,fdatasync,ftruncate,unlink"
CALL = re.compile(r"(pwrite64|fsync|fdatasync|ftruncate)\(\d+<([^>]*)>(?: \(deleted\))?")
TWO_NUMBERS = re.compile(r", (\d+), (\d+)(?:\)| <unfinished)")
LAST_NUMBER = re.compile(r", (\d+)(?:\)| <unfinished)")
UNLINK = re.compile(r'unlink\("([^"]*)"')


async def appends(folder, **seams):
    """Two lives of a log with one client, so that its batches are the same each time."""
    for life in range(2):
        clock = Clock()
        ids = IdSource(clock, random.Random(life).randbytes)
        async with SqliteEventLog.open(
            folder / "log.db", ids=ids, clock_ns=clock, session="s", die=die, **seams
        ) as log:
            story = Story(log, ids, folder)
            for _ in range(5):
                await story.begin(await story.submit("hello " * 300))


def recorded(folder):
    """Answer the operations of the appends as the record has them."""
    folder.mkdir()
    record = Record({})

    async def run(vfs):
        hears(record)
        await appends(folder, connection_class=connections_over(vfs, {}))

    with RecordingVfs(record, folder) as vfs:
        trio.run(run, vfs)
    lines = []
    for done in record.operations:
        numbers = {"write": [len(done.data), done.offset], "truncate": [done.offset]}
        if done.kind != "create":
            lines.append(" ".join(map(str, [done.kind, done.name, *numbers.get(done.kind, [])])))
        if done.folder:
            lines.append("sync .")
    return lines


def traced(folder):
    """Answer the operations of the appends as strace saw them."""
    folder.mkdir()
    trace = folder.with_suffix(".strace")
    command = ["strace", "-f", "-y", "-o", trace, "-e", f"trace={CALLS}"]
    command += [sys.executable, __file__, "--append-in", folder]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    lines = (operation(line, folder) for line in trace.read_text().splitlines())
    return [line for line in lines if line is not None]


def operation(line, folder):
    """Answer what a line of strace did to the folder's files, but the shared memory; or None."""
    if unlinked := UNLINK.search(line):
        call, path = "unlink", Path(unlinked[1])
    elif called := CALL.search(line):
        call, path = called[1], Path(called[2])
    else:
        return None
    if not path.is_relative_to(folder) or path.name.endswith("-shm"):
        return None
    name = str(path.relative_to(folder))
    if call == "pwrite64":
        return f"write {name} {' '.join(TWO_NUMBERS.search(line).groups())}"
    if call == "ftruncate":
        return f"truncate {name} {LAST_NUMBER.search(line)[1]}"
    return f"{'delete' if call == 'unlink' else 'sync'} {name}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--append-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.append_in:
        trio.run(appends, options.append_in)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        by_sqlite3, by_record = traced(folder / "traced"), recorded(folder / "recorded")
    print(f"sqlite3: {len(by_sqlite3)} operations; record: {len(by_record)}")
    print(*difflib.unified_diff(by_sqlite3, by_record, "sqlite3", "record", lineterm=""), sep="\n")
    return int(by_sqlite3 != by_record)


if __name__ == "__main__":
    sys.exit(main())
