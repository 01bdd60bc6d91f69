"""The command line: small when asked little, one line when it fails, exact exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from storage.folder import DataFolder
from web.cli_group import COMMANDS, run
from web.progress import describe

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("WATCHKEEPER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("WATCHKEEPER_LIMITS_GRACE_S", "0.2")
    monkeypatch.setenv("WATCHKEEPER_LOG_LOW_WATER_BYTES", "0")
    monkeypatch.chdir(tmp_path)


def modules_after(*arguments: str) -> set[str]:
    code = (
        "import sys; sys.argv = ['watchkeeper', *sys.argv[1:]]\n"
        "from web.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    return set(done.stderr.decode().splitlines())


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "web", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def read_until(process: subprocess.Popen[bytes], wanted: bytes) -> bytes:
    assert process.stderr is not None
    seen = b""
    while line := process.stderr.readline():
        seen += line
        if wanted in line:
            return seen
    raise AssertionError(seen)


def end(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=20)
    return process.returncode, out, err


def test_the_version_imports_next_to_nothing() -> None:
    """Neither click nor trio."""
    seen = modules_after("--version")

    assert not seen & {"click", "trio", "quart", "msgspec", "attrs"}


def test_the_help_imports_no_server() -> None:
    """The table of commands is literal."""
    seen = modules_after("--help")

    assert "click" in seen
    assert not seen & {"trio", "quart", "hypercorn", "storage"}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help of every command, with the line of the table's promise."""
    assert run([name, "--help"]) == 0
    assert "Usage: watchkeeper" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "names"),
    [
        (["nosuch"], 2, ["nosuch", "watchkeeper --help"]),
        (["run"], 2, ["PROMPT", "watchkeeper run --help"]),
        (["run", "x"], 1, ["--agent shell", "agents/NAME.md"]),
        (["run", "--agent", "shell", "--timeout", "0", "x"], 2, ["timeout_seconds"]),
        (["run", "--agent", "shell", "--ref", "x", "x"], 1, ["--repo"]),
        (["run", "--agent", "shell", "--repo", ".", "x"], 1, ["no git repository"]),
        (["serve", "--port", "99999"], 2, ["99999"]),
        (["serve", "--config", "nothing.toml"], 1, ["nothing.toml", "no such file"]),
        (["verify"], 1, ["no log", "--data"]),
        (["verify", "--data", "."], 1, ["no log"]),
        (["replay", "job_x"], 1, ["no log"]),
        (["jobs"], 1, ["no log", "--data"]),
        (["submit", "--agent", "echo", "x"], 1, ["no service", "watchkeeper serve"]),
        (["cancel", "job_x"], 1, ["no service"]),
    ],
)
def test_an_error_is_one_line_with_what_to_do(
    arguments: list[str], code: int, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, and stdout stays empty."""
    assert run(arguments) == code

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("watchkeeper: ")
    assert shown.err.count("\n") == 1
    for name in names:
        assert name in shown.err


def test_an_unknown_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A misspelt setting is not silently ignored."""
    monkeypatch.setenv("WATCHKEEPER_SERVER_PROT", "1")

    assert run(["doctor"]) == 1
    assert "WATCHKEEPER_SERVER_PROT" in capsys.readouterr().err


def test_doctor_says_where_each_setting_came_from(capsys, monkeypatch) -> None:
    """Checks first, then every key."""
    monkeypatch.setenv("WATCHKEEPER_LIMITS_CAPACITY", "3")

    assert run(["doctor"]) == 0

    shown = capsys.readouterr().out
    assert "git" in shown
    assert "3  (environment WATCHKEEPER_LIMITS_CAPACITY)" in shown
    assert run(["doctor", "--json"]) == 0
    assert {"checks", "settings"} == set(json.loads(capsys.readouterr().out))


@pytest.mark.slow
@pytest.mark.acceptance
def test_a_job_is_run_without_a_server(capsys) -> None:
    """Result and changed files on stdout, progress on stderr; then its history, stopped."""
    assert run(["run", "--agent", "shell", "echo hello; echo x > made.txt"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "hello\nA made.txt\n"
    assert "completed" in shown.err

    assert run(["run", "--agent", "shell", "--json", "exit 3"]) == 1
    job = json.loads(capsys.readouterr().out)
    assert (job["status"], job["exit_code"], job["files"]) == ("failed", 3, [])

    assert run(["verify"]) == 0
    root = capsys.readouterr().out.split("root ")[1].strip()
    assert run(["verify", "--root", root]) == 0
    size, _, digest = root.partition(":")
    assert run(["verify", "--root", f"{size}:{'0' * len(digest)}"]) == 1
    assert run(["verify", "--root", "x"]) == 2
    capsys.readouterr()
    assert run(["jobs", "--json"]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [found["status"] for found in jobs] == ["failed", "completed"]
    assert run(["status", job["job_id"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seq"] >= job["seq"]
    assert run(["replay", job["job_id"]]) == 0
    assert "exit 3, agent_exit" in capsys.readouterr().out
    assert run(["replay", job["job_id"], "--at", "1"]) == 1
    assert run(["events", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))


@pytest.mark.slow
@pytest.mark.acceptance
def test_an_interrupted_run_is_reaped_before_it_returns() -> None:
    """Ctrl-C: the job is cancelled, its processes are gone, the code is 130."""
    process = start("run", "--agent", "shell", "setsid sleep 986.5 & echo $! ; sleep 986.5")
    read_until(process, b"output")

    process.send_signal(signal.SIGINT)
    code, _, err = end(process)

    assert code == 130
    assert b"cancelled" in err
    left = subprocess.run(["pgrep", "-f", "sleep 986.5"], capture_output=True, check=False)
    assert left.stdout == b""


@pytest.mark.slow
@pytest.mark.acceptance
def test_a_run_beside_a_service_hands_over(tmp_path: Path, capsys) -> None:
    """The service does the job; the clients find it by the private file."""
    service = start("serve", "--port", "0")
    try:
        read_until(service, b"serving")

        assert run(["run", "--agent", "shell", "echo handed; echo x > a"]) == 0
        assert capsys.readouterr().out == "handed\nA a\n"
        assert run(["submit", "--agent", "echo", "hello"]) == 0
        job = capsys.readouterr().out.strip()
        assert run(["wait", job]) == 0
        assert run(["logs", "-f", job]) == 0
        assert "hello" in capsys.readouterr().out
        assert run(["cancel", job]) == 0
        assert "already completed" in capsys.readouterr().out
        assert run(["status", job]) == 0
        assert run(["diff", job]) == 0
    finally:
        service.send_signal(signal.SIGTERM)
        code, _, _ = end(service)
    assert code == 0
    assert not (tmp_path / "state" / "watchkeeper" / "local.json").exists()


@pytest.mark.slow
@pytest.mark.acceptance
def test_a_second_run_waits_for_the_folder(tmp_path: Path) -> None:
    """It names the holder, and goes on when the folder is free; Ctrl-C ends the waiting."""
    with DataFolder.lock(tmp_path / "state" / "watchkeeper"):
        process = start("run", "--agent", "shell", "echo later")
        impatient = start("run", "--agent", "shell", "echo never")
        seen = read_until(process, b"waiting")
        read_until(impatient, b"waiting")
        impatient.send_signal(signal.SIGINT)
        assert end(impatient)[0] == 130
    code, out, _ = end(process)

    assert str(os.getpid()).encode() in seen
    assert (code, out) == (0, b"later\n")


@pytest.mark.slow
@pytest.mark.acceptance
def test_a_dirty_repository_is_warned_about(tmp_path: Path, capsys) -> None:
    """The job starts from HEAD, without what is not committed."""
    repo = tmp_path / "repo"
    repo.mkdir()
    git = ["git", "-C", str(repo), "-c", "user.name=x", "-c", "user.email=x@example.invalid"]
    (repo / "a").write_text("old\n")
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    (repo / "a").write_text("new\n")

    assert run(["run", "--agent", "shell", "--repo", "repo", "cat a"]) == 0

    shown = capsys.readouterr()
    assert shown.out == "old\n"
    assert "warning: 1 uncommitted" in shown.err
    assert (repo / "a").read_text() == "new\n"


@pytest.mark.slow
@pytest.mark.acceptance
def test_the_demo_shows_what_it_promises(capsys) -> None:
    """Three endings, a diff, nothing left alive, a whole log."""
    assert run(["demo"]) == 0

    shown = capsys.readouterr().out
    for text in (
        "edits   completed",
        "fails   failed",
        "hangs   timeout",
        "+hello Watchkeeper",
        "+A file that was not committed",
        "0 left",
        "looked again now: 0 of",
        "whole:",
        "watchkeeper serve",
    ):
        assert text in shown


def test_every_terminal_event_has_a_line() -> None:
    """Also those with a detail that repeats the status."""
    base = {"stream": "job/j", "seq": 1, "by": "x", "epoch": 1, "texts": {}}

    assert (
        describe({**base, "type": "job.cancelled", "data": {"cause": "cancelled"}}) == "cancelled"
    )
    failed = {**base, "type": "job.failed", "data": {"cause": "agent_exit", "left": 2}}
    assert describe(failed) == "failed: agent_exit, 2 processes left"
    assert describe({**base, "type": "usage.recorded", "data": {}}) is None
