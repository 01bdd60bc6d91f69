"""Faults that were seen in services of this kind, each reproduced against a real one."""

import contextlib
import http.client
import json
import subprocess
import threading
import time
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from storage.verify import verify
from tests.acceptance.conftest import Service

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]

QUICK = {"WATCHKEEPER_LIMITS_GRACE_S": "1", "WATCHKEEPER_LIMITS_QUEUE_DEPTH": "1000"}
THREE = QUICK | {"WATCHKEEPER_LIMITS_CAPACITY": "3"}
WIDE = QUICK | {"WATCHKEEPER_LIMITS_CAPACITY": "10"}
SECRETS = {"CLAUDECODE": "1", "WATCHKEEPER_TOKEN": "s3cret-token", "OTHER_SECRET": "s3cret-other"}
FOLDERS = ("workspaces", "runs", "captures", "output")
LATENCY_S_MAX = 5.0


def git(folder, *words):
    done = subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t.invalid", *words],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository with one commit on ``trunk``."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "trunk")
    (folder / "readme").write_text("hello\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def together(count, work):
    """Do the same in so many threads at once; answer what each returned."""
    answers = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(work(n)), daemon=True)
        for n in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def until_output(service, job):
    while not service.json(f"/jobs/{job}")["output"]:
        pass


def descriptors(service):
    return len(list(Path(f"/proc/{service.process.pid}/fd").iterdir()))


REBASE = """
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@a
git checkout -qb side
for n in $(seq 25); do echo $n > side.txt; git add -A; git commit -qm "side $n"; done
git checkout -q trunk
echo x > trunk.txt; git add -A; git commit -qm trunk
echo ready
git rebase -q trunk side || exit 9
git log --oneline trunk..side | wc -l
"""


def test_polling_the_diff_never_breaks_a_rebase(service, repository):
    """SV022: nothing of ours takes a lock in the working tree of a running agent."""
    job = service.execute(REBASE, workspace={"repo": str(repository)})
    statuses = []

    while service.json(f"/jobs/{job}")["status"] in ("queued", "running"):
        statuses.append(service.get(f"/jobs/{job}/diff")[0])
        statuses.append(service.get(f"/jobs/{job}/files")[0])

    view = service.wait(job)
    assert (view["status"], view["output"]) == ("completed", ["ready", "25"])
    assert set(statuses) <= {200, 409}
    assert service.get(f"/jobs/{job}/diff")[0] == 200


@pytest.mark.parametrize("service", [WIDE], indirect=True)
def test_a_hundred_jobs_of_every_ending_leave_nothing(service):
    """SV031, SV032, SV043: no workspace, no file, no descriptor, whatever the ending was."""
    service.wait(service.execute("true"))
    before = descriptors(service)
    stubborn = "trap '' TERM; (setsid sleep 600 &); sleep 600; sleep 600"
    hanging = ["(setsid sleep 600 &); sleep 600"] * 18 + [stubborn] * 2
    cancelled = [service.execute(script) for script in hanging]
    late = [service.execute("sleep 600", timeout_seconds=1) for _ in range(20)]
    failed = [service.execute("echo x > x; exit 3") for _ in range(20)]
    idle = [service.execute("true") for _ in range(40)]
    for job in cancelled:
        assert service.request("POST", f"/jobs/{job}/cancel")[0] == 202

    ends = [
        {service.wait(job)["status"] for job in group} for group in (cancelled, late, failed, idle)
    ]

    assert ends == [{"cancelled"}, {"timeout"}, {"failed"}, {"completed"}]
    assert service.get(f"/jobs/{idle[0]}/diff") == (200, b"")
    until(lambda: all(not any((service.data / name).glob("*")) for name in FOLDERS))
    until(lambda: descriptors(service) <= before + 2)
    assert service.json("/health")["host"]["degraded"] == []


def until(condition, limit_s=30):
    end_at = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_at
        time.sleep(0.02)  # There is no event for what is deleted in the background.


EXOTIC = r"""
printf 'out \377\376\000 end\n'; printf 'err \377\n' >&2
for name in 'a -> b.txt' 'ä ü.txt' 'quote".txt' 'new
line.txt'; do echo x > "$name"; done
echo x > "$(printf 'raw\377.txt')"
ln -s . loop; ln -s /etc/passwd leak
exit 3
"""


def test_bytes_that_are_no_text_break_no_reply(service):
    """SV019, SV038, SV053, SV100: every read answers, exactly, in valid UTF-8."""
    job = service.execute(EXOTIC)
    view = service.wait(job)

    replies = {
        path: service.get(f"/jobs/{job}{path}")
        for path in ("", "/events", "/files", "/diff", "/output", "/output?stream=stderr", "/why")
    }

    assert view["status"] == "failed"
    assert {path: status for path, (status, _) in replies.items() if status != 200} == {}
    for path in ("", "/events", "/files", "/why"):
        json.loads(replies[path][1].decode("utf-8"))
    assert replies["/output"][1] == b"out \xff\xfe\x00 end\n"
    assert view["output"] == ["out \ufffd\ufffd\x00 end"]
    names = {f["path"] for f in json.loads(replies["/files"][1])["files"]}
    assert {"a -> b.txt", "ä ü.txt", 'quote".txt', "new\nline.txt", "loop", "leak"} < names
    assert service.get(f"/jobs/{job}/files/leak")[0] == 404


def test_fifty_posts_with_one_key_make_one_job(service):
    """SV110: whoever comes while the first is being written gets its id."""

    def post(_):
        body = {"prompt": "once", "agent": "echo"}
        status, data = service.request("POST", "/execute", body, {"Idempotency-Key": "k"})
        return status, json.loads(data)["job_id"]

    answers = together(50, post)

    assert len(answers) == 50
    assert len(set(answers)) == 1
    assert answers[0][0] == 202
    assert len(service.json("/jobs")["jobs"]) == 1


class Poller:
    """One client that asks over and over on its own connection until told to stop."""

    def __init__(self, service, path, stop):
        local = json.loads((service.data / "local.json").read_text())
        parts = urlsplit(local["url"])
        self.connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        self.headers = {"Authorization": f"Bearer {local['token']}"}
        self.path, self.stop, self.count = path, stop, 0

    def run(self):
        while not self.stop.is_set():
            self.connection.request("GET", self.path, headers=self.headers)
            answer = self.connection.getresponse()
            answer.read()
            assert answer.status == 200
            self.count += 1
        self.connection.close()
        return self.count


def test_two_hundred_pollers_do_not_hold_up_a_submission(service):
    """SV113: the time of a POST is bounded while everybody polls a diff."""
    job = service.execute("seq 1000 > numbers")
    service.wait(job)
    stop, times, counts = threading.Event(), [], []
    pollers = threading.Thread(
        target=lambda: counts.extend(
            together(200, lambda _: Poller(service, f"/jobs/{job}/diff", stop).run())
        )
    )
    pollers.start()

    for _ in range(10):
        began = time.monotonic()
        service.execute("hello", agent="echo")
        times.append(time.monotonic() - began)
    stop.set()
    pollers.join()

    assert len(counts) == 200
    assert sum(counts) >= 200
    assert max(times) < LATENCY_S_MAX


def frames(service, job, last):
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(last)}
    status, data = service.request("GET", f"/jobs/{job}/events", headers=headers)
    assert status == 200
    lines = data.decode().split("\n")
    return [int(line[4:]) for line in lines if line.startswith("id: ")], data


def test_a_stream_is_resumed_across_restarts(service):
    """SV076, SV077, SV080, SV116: an id means the same place, however long it was kept."""
    job = service.execute("echo one; echo two >&2")
    service.wait(job)
    seqs, _ = frames(service, job, 0)
    for _ in range(2):
        service.stop()
        service.start()

        for index, last in enumerate(seqs[:-1]):
            resumed, data = frames(service, job, last)
            assert resumed == seqs[index + 1 :]
            assert b"event: reset" not in data
            assert b"event: end" in data


def mounted(folder, options):
    """Mount a small file system; answer whether that was allowed."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.fixture
def few_inodes(tmp_path):
    """A file system with room for bytes and for 200 files."""
    folder = tmp_path / "small"
    if not mounted(folder, "nr_inodes=200,size=600m"):
        pytest.skip("no right to mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_without_inodes_is_a_disk_that_is_low(few_inodes):
    """SV034: refused like a disk without bytes, and health shows both."""
    service = Service(few_inodes / "data").start()
    try:
        status, data = service.request("POST", "/execute", {"prompt": "x", "agent": "echo"})
        host = service.json("/health")["host"]
    finally:
        service.stop()

    assert (status, json.loads(data)["code"]) == (503, "disk_low")
    assert host["inodes_free"] < 200
    assert host["disk_free_bytes"] > 256 * 1024 * 1024


@pytest.fixture
def small_disk(tmp_path):
    """A file system that a job can fill, in bytes and in files."""
    folder = tmp_path / "small"
    if not mounted(folder, "nr_inodes=3000,size=400m"):
        pytest.skip("no right to mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def has_room(host):
    return host["disk_free_bytes"] > 300 * 1024 * 1024 and host["inodes_free"] > 2000


MANY_FILES = "i=0; while [ $i -lt 5000 ]; do : > f$i || exit 7; i=$((i+1)); done"
BIG_FILE = "head -c 500m /dev/zero > big"


def test_a_job_that_fills_the_disk_ends_and_gives_it_back(small_disk):
    """SV034: out of inodes or out of bytes, its end is written and the next job runs."""
    service = Service(small_disk / "data", QUICK).start()
    try:
        ends = []
        for script in (MANY_FILES, BIG_FILE):
            ends.append(service.wait(service.execute(script)))
            until(lambda: has_room(service.json("/health")["host"]))
        after = service.wait(service.execute("echo fine"))
        assert service.json("/health")["host"]["degraded"] == []
    finally:
        service.stop()

    assert {view["artifacts"]["state"] for view in ends} == {"incomplete"}
    assert {view["cause"] for view in ends} <= {"agent_exit", "disk_full"}
    assert after["output"] == ["fine"]
    assert verify(small_disk / "data" / "log.db", small_disk / "data" / "artifacts").ok


def test_ignored_data_of_a_repository_costs_nothing(service, repository):
    """SV035: twenty gigabytes beside the tracked files neither refuse a job nor slow it."""
    (repository / ".gitignore").write_text("cache\n")
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "ignore")
    with (repository / "cache").open("wb") as file:
        file.truncate(20 << 30)

    view = service.wait(service.execute("ls -A", workspace={"repo": str(repository)}))

    assert (view["status"], view["output"]) == ("completed", [".git", ".gitignore", "readme"])


def living(mark):
    """How many processes have the mark in their command line."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += mark.encode() in (folder / "cmdline").read_bytes()
    return found


def until_living(mark, count):
    """Wait until so many processes have the mark."""
    deadline = time.monotonic() + 30
    while living(mark) < count:
        assert time.monotonic() < deadline, f"{living(mark)} of {count} came up"
        time.sleep(0.02)


@pytest.mark.parametrize("service", [THREE], indirect=True)
def test_running_jobs_are_ended_and_queued_ones_run_after_a_kill(service, tmp_path):
    """SV106, SV107: three were running, five were queued; nothing runs twice or for ever."""
    mark = f"98765.{uuid.uuid4().int % 10**9:09d}"
    running = [service.execute(f"echo up; exec sleep {mark}") for _ in range(3)]
    for job in running:
        until_output(service, job)
    until_living(mark, 3)
    queued = [service.execute(f"echo {n} >> {tmp_path}/ran; echo {n}") for n in range(5)]
    service.kill()
    service.start()

    ends = [service.wait(job) for job in [*running, *queued]]

    assert [(v["status"], v["cause"]) for v in ends[:3]] == [("error", "interrupted")] * 3
    assert [v["status"] for v in ends[3:]] == ["completed"] * 5
    assert sorted((tmp_path / "ran").read_text().split()) == list("01234")
    assert living(mark) == 0


@pytest.mark.parametrize("service", [SECRETS], indirect=True)
def test_the_environment_of_the_service_stays_with_it(service):
    """SV059: neither its token nor a marker of another agent reaches a job."""
    view = service.wait(service.execute("env; cat /proc/$PPID/environ | tr '\\0' '\\n'"))

    text = "\n".join(view["output"]) + view["stderr"]
    assert "PATH=" in text
    assert "s3cret" not in text
    assert "CLAUDECODE" not in text


def test_a_cancel_after_the_end_stops_nothing_later(service):
    """SV082: it answers 200 and no later job of any kind feels it."""
    first = service.execute("one", agent="echo")
    service.wait(first)

    answers = [service.request("POST", f"/jobs/{first}/cancel")[0] for _ in range(3)]
    second = service.wait(service.execute("sleep 0.3; echo two"))

    assert answers == [200, 200, 200]
    assert (second["status"], second["output"]) == ("completed", ["two"])
    assert service.json(f"/jobs/{first}")["status"] == "completed"
