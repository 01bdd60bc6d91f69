"""A real service in its own process, and a small client for it."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]


class Service:
    """``watchkeeper serve`` on a free port, with its data in a folder of the test."""

    def __init__(self, data, settings=None):
        self.data = data
        self.settings = settings or {}
        self.process = None
        self.log = data.parent / "service.log"

    def start(self):
        (self.data / "local.json").unlink(missing_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WATCHKEEPER_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "web", "serve", "--port", "0", "--data", str(self.data)],
                env={**environment, **self.settings, "PYTHONPATH": str(ROOT)},
                cwd=self.data.parent,
                stdout=log,
                stderr=log,
            )
        for _ in range(3000):
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                self._announced = json.loads((self.data / "local.json").read_text())
                if self._announced["pid"] == self.process.pid and self.get("/ready")[0] == 200:
                    return self
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)  # There is no event to wait for across a start of a process.
        raise AssertionError(self.log.read_text())

    def request(self, method, path, body=None, headers=None):
        parts = urlsplit(self._announced["url"])
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        try:
            connection.request(
                method,
                path,
                None if body is None else json.dumps(body),
                {
                    "Authorization": f"Bearer {self._announced['token']}",
                    "Content-Type": "application/json",
                    **(headers or {}),
                },
            )
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path):
        return self.request("GET", path)

    def json(self, path):
        status, data = self.get(path)
        assert status == 200, (path, status, data)
        return json.loads(data)

    def execute(self, prompt, agent="shell", **more):
        body = {"prompt": prompt, "agent": agent, **more}
        status, data = self.request("POST", "/execute", body)
        assert status == 202, (status, data)
        return json.loads(data)["job_id"]

    def wait(self, job):
        while True:
            view = self.json(f"/jobs/{job}/wait?timeout=30")
            if view["status"] not in ("queued", "running"):
                return view

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        """End it as an operator would; answer the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture
def service(tmp_path, request):
    """A started service; ``request.param`` are settings as environment variables."""
    data = tmp_path / "data"
    started = Service(data, getattr(request, "param", None)).start()
    yield started
    if started.process.poll() is None:
        started.stop()
