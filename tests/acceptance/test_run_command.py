"""``watchkeeper run`` as a person uses it, on a repository of some thousand files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
FILES = 3000


def git(folder, *arguments):
    return subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t.invalid", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository of 3,000 files in 60 folders, and one file that is not committed."""
    folder = tmp_path_factory.mktemp("repo")
    for number in range(FILES):
        path = folder / f"d{number % 60}" / f"f{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"content {number}\n" * 5)
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "All")
    return folder


def start(tmp_path, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "web", "run", "--data", str(tmp_path / "data"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SCRIPT = """
echo changed > d1/f1.txt && git rm -q d2/f2.txt && git add -A
git -c user.name=a -c user.email=a@a.invalid commit -qm 'Change and remove'
echo again >> d3/f3.txt; echo new > 'a new file.txt'; echo the result
"""


def test_a_run_shows_its_result_and_exactly_the_changed_files(tmp_path, repository):
    """Committed, uncommitted and untracked work is listed; the user's checkout is untouched."""
    before = git(repository, "status", "--porcelain=v2", "--branch")

    run = start(tmp_path, "--agent", "shell", "--repo", str(repository), SCRIPT)
    out, err = run.communicate(timeout=120)

    assert run.returncode == 0, err
    assert "the result" in out
    changed = {p for p in ("d1/f1.txt", "d2/f2.txt", "d3/f3.txt", "a new file.txt") if p in out}
    assert len(changed) == 4
    assert out.count(".txt") == 4
    assert "workspace" in err or "prepared" in err
    assert git(repository, "status", "--porcelain=v2", "--branch") == before


def test_a_dirty_checkout_is_said(tmp_path, repository):
    """``--repo PATH`` means HEAD, and what is not committed is warned about."""
    (repository / "dirty.txt").write_text("not committed")
    try:
        run = start(tmp_path, "--agent", "shell", "--repo", str(repository), "ls dirty.txt")
        _, err = run.communicate(timeout=120)
    finally:
        (repository / "dirty.txt").unlink()

    assert run.returncode != 0
    assert "not committed" in err or "uncommitted" in err


def test_ctrl_c_cancels_reaps_and_keeps_the_work(tmp_path, repository):
    """Ctrl-C leaves no process, and a cancelled job whose captured work is there."""
    script = 'echo kept > kept.txt; setsid sleep 985.5 & echo re""ady-now; sleep 985.5'
    run = start(tmp_path, "--agent", "shell", "--repo", str(repository), "--json", script)
    for line in run.stderr:
        if "ready-now" in line:
            break
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)

    assert run.returncode == 130, err
    job = json.loads(out)
    assert (job["status"], job["cause"]) == ("cancelled", "cancelled")
    alive = subprocess.run(["pgrep", "-f", "sleep 985.5"], capture_output=True, check=False)
    assert alive.stdout == b""
    replay = subprocess.run(
        [
            sys.executable,
            "-m",
            "web",
            "replay",
            job["job_id"],
            "--json",
            "--data",
            str(tmp_path / "data"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    assert b"artifact.stored" in replay.stdout
    assert list((tmp_path / "data" / "workspaces").iterdir()) == []


@pytest.mark.parametrize("service", [{"WATCHKEEPER_LOG_DRAIN_S": "0"}], indirect=True)
def test_an_embedded_run_leaves_waiting_jobs_to_the_service(tmp_path, service):
    """Jobs that wait in the log are not started by a ``run`` that opens the folder alone."""
    del tmp_path
    blockers = [service.execute("echo up; sleep 60") for _ in range(10)]
    waiting = service.execute("echo started by the service")
    while not all(service.json(f"/jobs/{job}")["output"] for job in blockers):
        pass
    service.kill()

    run = start(service.data.parent, "--agent", "shell", "--json", "echo mine")
    out, err = run.communicate(timeout=120)

    assert run.returncode == 0, err
    service.start()
    mine = service.json(f"/jobs/{json.loads(out)['job_id']}")
    theirs = service.wait(waiting)
    assert mine["finished_at"] < theirs["started_at"]
    assert service.json(f"/jobs/{blockers[0]}")["cause"] == "interrupted"
