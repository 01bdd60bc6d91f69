"""The kill -9 campaign: a service under load, killed again and again, and what must hold then.

``python tests/acceptance/crash_campaign.py --random 100 --each 10`` is the whole of it; the tests
run a sample. Prints one line a kill and a table at the end; exit code 1 if anything did not hold.
"""

import argparse
import collections
import http.client
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from storage.verify import verify  # noqa: E402
from tests.acceptance.killable_service import TOKEN, WINDOWS  # noqa: E402

SCRIPT = """
echo run >> {marks}/{key}
echo "work of {key}" > result.txt
(setsid sleep 300 >/dev/null 2>&1 &)
sleep {pause}
echo more >> result.txt
"""


class Campaign:
    def __init__(self, folder, rng, repo=None):
        self.folder = folder
        self.data = folder / "data"
        self.marks = folder / "marks"
        self.marks.mkdir()
        self.rng = rng
        self.repo = repo
        self.acknowledged = {}
        self.wanted = []
        self.problems = []
        self.kills = collections.Counter()
        self.process = None
        self.url = None
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self.log = (folder / "service.log").open("ab")

    def start(self, window="none", nth=1):
        port_file = self.folder / "url"
        port_file.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).parent / "killable_service.py"),
                str(self.data),
                str(port_file),
                window,
                str(nth),
            ],
            stdout=self.log,
            stderr=self.log,
        )
        deadline = time.monotonic() + 60
        while not port_file.exists():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.problem("the service was not ready within 60 s")
                return False
            time.sleep(0.02)
        self.url = port_file.read_text()
        return True

    def kill(self):
        self.process.send_signal(signal.SIGKILL)

    def problem(self, text):
        self.problems.append(text)
        print("PROBLEM:", text, flush=True)

    def request(self, method, path, body=None, headers=None):
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
        try:
            connection.request(
                method,
                path,
                None if body is None else json.dumps(body),
                {
                    "Authorization": f"Bearer {TOKEN}",
                    "Content-Type": "application/json",
                    **(headers or {}),
                },
            )
            answer = connection.getresponse()
            data = answer.read()
            return answer.status, data
        finally:
            connection.close()

    def client(self, number):
        """Submit one job after another, each with its key, until told to stop."""
        count = 0
        while not self.stopping.is_set():
            key = f"c{number}-{count}"
            count += 1
            with self.lock:
                self.wanted.append(key)
            self.submit_surely(key)
            time.sleep(0.05)

    def submit_surely(self, key):
        pause = round(self.rng.choice([0, 0.05, 0.2, 0.6]), 2)
        body = {
            "prompt": SCRIPT.format(marks=self.marks, key=key, pause=pause),
            "agent": "shell",
            "timeout_seconds": 60,
            "metadata": {"key": key},
        }
        if self.repo is not None:
            body["workspace"] = {"repo": str(self.repo), "kind": "clone"}
        while True:
            try:
                status, data = self.request("POST", "/execute", body, {"Idempotency-Key": key})
            except (OSError, http.client.HTTPException):
                time.sleep(0.02)
                continue
            if status == 202:
                job = json.loads(data)["job_id"]
                known = self.acknowledged.setdefault(key, job)
                if known != job:
                    self.problem(f"key {key} was answered with {known} and with {job}")
                return
            if status not in (429, 503):
                self.problem(f"submission of {key} was answered {status}: {data[:200]!r}")
                return
            time.sleep(0.05)

    def survivors(self):
        """Processes that carry this folder's mark in their environment or their arguments."""
        found = []
        needle = str(self.data).encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environ = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if needle in environ and b"WATCHKEEPER_JOB_ID=" in environ and state != "Z":
                found.append(int(entry.name))
        return found

    def check_after_kill(self, window):
        deadline = time.monotonic() + 5
        while self.survivors() and time.monotonic() < deadline:
            time.sleep(0.01)
        left = self.survivors()
        if left:
            self.problem(f"{window}: processes {left} outlived the service by 5 s")
        if not (self.data / "log.db").exists():
            return
        report = verify(self.data / "log.db", self.data / "artifacts")
        if report.findings or report.torn:
            self.problem(f"{window}: verify: torn={report.torn} {report.findings[:3]}")

    def one_kill(self, window):
        nth = 1 if window == "random" else self.rng.randint(1, 6)
        ready = self.start(window, nth)
        if window == "random" and ready:
            time.sleep(self.rng.uniform(0, 0.8))
            self.kill()
        try:
            self.process.wait(8)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()
            window = "random"
        else:
            if self.process.returncode != -signal.SIGKILL:
                self.problem(f"{window}: the service ended with {self.process.returncode}")
        self.kills[window] += 1
        self.check_after_kill(window)

    def finish(self):
        """Start once more without a kill, wait until all jobs are over, and judge."""
        if not self.start():
            self.problem("the last start failed")
            return
        self.stopping.set()
        for thread in self.threads:
            thread.join(120)
        for key in self.wanted:
            if key not in self.acknowledged:
                self.problem(f"{key} was never acknowledged")
        views = {key: self.wait_terminal(job) for key, job in self.acknowledged.items()}
        self.judge(views)
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(30) != 0:
            self.problem(f"the drained service ended with {self.process.returncode}")
        self.check_after_kill("end")
        left = list((self.data / "workspaces").iterdir())
        if left:
            self.problem(f"{len(left)} workspace folders left: {left[:3]}")

    def wait_terminal(self, job):
        for _ in range(4):
            status, data = self.request("GET", f"/jobs/{job}/wait?timeout=25")
            if status != 200:
                self.problem(f"job {job} was accepted and is not there: {status}")
                return None
            view = json.loads(data)
            if view["status"] not in ("queued", "running"):
                return view
        self.problem(f"job {job} is stuck {view['status']}")
        return view

    def judge(self, views):
        self.outcomes = collections.Counter()
        for key, view in views.items():
            if view is None:
                continue
            self.outcomes[f"{view['status']}/{view['cause']}"] += 1
            mark = self.marks / key
            runs = len(mark.read_text().splitlines()) if mark.exists() else 0
            if runs > 1:
                self.problem(f"{key} ran {runs} times")
            if view["status"] == "completed" and runs != 1:
                self.problem(f"{key} completed after {runs} runs")
            if view["status"] not in ("completed", "error"):
                self.problem(f"{key} ended {view['status']}/{view['cause']}")
            if runs == 1:
                self.look_at_work(key, view)
        page = self.list_jobs()
        if len(page) != len(views):
            self.problem(f"{len(page)} jobs in the log for {len(views)} keys")

    def look_at_work(self, key, view):
        status, diff = self.request("GET", f"/jobs/{view['job_id']}/diff")
        if status != 200:
            self.problem(f"the work of {key} ({view['cause']}) is not retrievable: {status}")
        elif view["status"] == "completed" and f"work of {key}".encode() not in diff:
            self.problem(f"the diff of {key} lacks its work: {diff[:200]!r}")

    def list_jobs(self):
        jobs, cursor = [], ""
        while True:
            status, data = self.request("GET", f"/jobs?limit=100{cursor}")
            assert status == 200, data
            page = json.loads(data)
            jobs += page["jobs"]
            if page["next_cursor"] is None:
                return jobs
            cursor = f"&cursor={page['next_cursor']}"

    def run(self, plan):
        self.threads = [
            threading.Thread(target=self.client, args=(n,), daemon=True) for n in range(3)
        ]
        self.start_clients()
        for window in plan:
            before = len(self.problems)
            self.one_kill(window)
            if len(self.problems) > before + 20:
                break
        self.finish()

    def start_clients(self):
        self.url = "http://127.0.0.1:9"
        for thread in self.threads:
            thread.start()


def run_campaign(random_kills, each, seed, repo=None, keep=False):
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="watchkeeper-campaign-"))
    plan = ["random"] * random_kills + [w for w in WINDOWS for _ in range(each)]
    rng.shuffle(plan)
    campaign = Campaign(folder, rng, repo)
    try:
        campaign.run(plan)
    finally:
        campaign.stopping.set()
        if campaign.process and campaign.process.poll() is None:
            campaign.kill()
            campaign.process.wait()
        campaign.log.close()
        if not keep and not campaign.problems:
            shutil.rmtree(folder, ignore_errors=True)
    return campaign


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=100)
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    print("seed", options.seed, flush=True)
    campaign = run_campaign(options.random, options.each, options.seed)
    for window, count in sorted(campaign.kills.items()):
        print(f"{window:24} {count:4} kills")
    print(f"{len(campaign.acknowledged)} jobs accepted; outcomes {dict(campaign.outcomes)}")
    print(
        f"{len(campaign.problems)} problems; folder {campaign.folder if campaign.problems else 'removed'}"
    )
    return 1 if campaign.problems else 0


if __name__ == "__main__":
    sys.exit(main())
