"""The service as its clients meet it: real processes, real sockets, a real log."""

import collections
import json
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from storage.schema import PROJECTION_TABLES
from storage.verify import verify

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]
ROOT = Path(__file__).parents[2]

BUSY = {
    "WATCHKEEPER_LIMITS_CAPACITY": "10",
    "WATCHKEEPER_LIMITS_QUEUE_DEPTH": "1000",
    "WATCHKEEPER_LIMITS_GRACE_S": "1",
}


def cli(service, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "web", *arguments, "--data", str(service.data)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        text=True,
    )


@pytest.mark.parametrize("service", [BUSY], indirect=True)
def test_two_hundred_jobs_of_eight_clients_run_ten_at_a_time_in_order(service):
    """All complete, never more than ten run, in the order of acceptance, health is the fold."""
    jobs, looks, stop = [], [], threading.Event()

    def client(number):
        for count in range(25):
            prompt = f"pwd; echo {number}-{count} > mine.txt; sleep 0.02"
            jobs.append(service.execute(prompt))

    def watch():
        while not stop.is_set():
            looks.append(service.json("/health"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    clients = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()

    views = [service.wait(job) for job in jobs]
    stop.set()
    watcher.join()

    assert collections.Counter(v["status"] for v in views) == {"completed": 200}
    assert max(look["active"] for look in looks) <= 10
    events = all_events(service)
    started = [e["stream"] for e in events if e["type"] == "job.started"]
    submitted = [e["stream"] for e in events if e["type"] == "job.submitted"]
    assert started == submitted
    folders = {view["output"][0] for view in views}
    assert len(folders) == 200, "each job has its own checkout"
    for look in looks:
        assert fold_counts(events, look["seq"]) == (look["active"], look["queued"])
    assert list((service.data / "workspaces").iterdir()) == []
    assert service.stop() == 0


def all_events(service):
    events, after = [], 0
    while True:
        page = service.json(f"/events?after={after}&limit=900")["events"]
        if not page:
            return events
        events += page
        after = page[-1]["seq"]


def fold_counts(events, seq):
    state = {}
    for event in events:
        if event["seq"] > seq:
            break
        if event["type"] in ("job.submitted", "job.requeued"):
            state[event["stream"]] = "queued"
        elif event["type"] == "job.started":
            state[event["stream"]] = "running"
        elif event["type"] in ("job.completed", "job.failed", "job.errored", "job.cancelled"):
            state[event["stream"]] = "over"
    counts = collections.Counter(state.values())
    return counts["running"], counts["queued"]


SCRIPT = "echo one; sleep 1.2; echo two >&2; echo x > f.txt; exit 3"


def test_what_was_said_live_is_said_for_ever(service):
    """Views seen live equal ``at_seq``, after a restart, after a rebuild, and in a replay."""
    job = service.execute(SCRIPT, metadata={"ticket": 7})
    seen = {}
    while True:
        status, data = service.get(f"/jobs/{job}")
        assert status == 200
        view = json.loads(data)
        seen[view["seq"]] = data
        if view["status"] not in ("queued", "running"):
            break
    assert len(seen) >= 3

    assert {s: service.get(f"/jobs/{job}?at_seq={s}")[1] for s in seen} == seen
    service.stop()
    service.start()
    assert {s: service.get(f"/jobs/{job}?at_seq={s}")[1] for s in seen} == seen
    service.stop()
    drop_projections(service.data / "log.db")
    service.start()
    assert {s: service.get(f"/jobs/{job}?at_seq={s}")[1] for s in seen} == seen
    service.stop()
    for seq, data in seen.items():
        replayed = cli(service, "replay", job, "--at", str(seq), "--json")
        assert replayed.returncode == 0, replayed.stderr
        assert json.loads(replayed.stdout)["job"] == json.loads(data)
    assert verify(service.data / "log.db", service.data / "artifacts").ok


def drop_projections(path):
    connection = sqlite3.connect(path, isolation_level=None)
    for table in PROJECTION_TABLES:
        connection.execute(f"DROP TABLE {table}")
    connection.close()


def test_a_cancel_during_a_run_keeps_the_work_and_leaves_no_process(service):
    """A cancelled job has its diff, and its daemons are gone."""
    script = "echo work > w.txt; (setsid sleep 600 &) ; echo ready; sleep 600"
    job = service.execute(script)
    while not service.json(f"/jobs/{job}")["output"]:
        pass

    assert service.request("POST", f"/jobs/{job}/cancel")[0] == 202
    view = service.wait(job)

    assert (view["status"], view["cause"]) == ("cancelled", "cancelled")
    assert b"+work" in service.get(f"/jobs/{job}/diff")[1]
    assert service.request("POST", f"/jobs/{job}/cancel")[0] == 200
    reaped = [e for e in all_events(service) if e["type"] == "process.reaped"]
    assert all(e["data"].get("left", 0) == 0 for e in reaped)
    assert sum(e["data"].get("seen", 0) for e in reaped) >= 3


def test_a_run_beside_a_service_hands_the_job_to_it(service):
    """``run`` on the folder of a living service uses that service."""
    ran = cli(service, "run", "--agent", "shell", "--json", "echo handed over")

    assert ran.returncode == 0, ran.stderr
    job = json.loads(ran.stdout)["job_id"]
    assert service.json(f"/jobs/{job}")["output"] == ["handed over"]


def test_a_second_service_on_the_folder_is_refused_by_name(service):
    """The data folder has one holder, and the refusal names its pid."""
    second = cli(service, "serve", "--port", "0")

    assert second.returncode != 0
    assert str(service.process.pid) in second.stderr


def test_the_service_forgets_nothing_when_it_is_killed(service):
    """kill -9 with running and queued jobs: all end, from the log alone (SV106, SV107)."""
    slow = [service.execute("echo began > b.txt; echo up; sleep 30") for _ in range(3)]
    while not all(service.json(f"/jobs/{job}")["output"] for job in slow):
        pass
    service.kill()
    service.start()

    views = [service.wait(job) for job in slow]

    assert {(v["status"], v["cause"]) for v in views} == {("error", "interrupted")}
    assert all(b"+began" in service.get(f"/jobs/{job}/diff")[1] for job in slow)
