"""An ordinary user can hold jobs in a pid namespace too, and still sees what it holds."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.process.runner import KEEPER_FILE

pytestmark = pytest.mark.acceptance

NOBODY = 65_534
SERVICE = """
import marshal, os, socket, subprocess, sys
keeper = sys.argv[1]
tried = subprocess.run([sys.executable, "-I", "-S", keeper, "probe", "pidns"],
                       capture_output=True, text=True).stdout
if tried != "ok":
    sys.exit(f"probe: {tried}")
ours, theirs = socket.socketpair()
held = subprocess.Popen([sys.executable, "-I", "-S", keeper, str(theirs.fileno()), "pidns"],
                        pass_fds=[theirs.fileno()])
theirs.close()
def hear():
    size = int.from_bytes(ours.recv(4, socket.MSG_WAITALL), "big")
    return marshal.loads(ours.recv(size, socket.MSG_WAITALL))
assert hear()["type"] == "hello"
frame = marshal.dumps({"type": "spawn", "id": 1, "argv": (b"/bin/sleep", b"600"),
                       "env": {b"MARK": b"1"}, "cwd": b"/", "fds": (), "rlimits": {}})
ours.sendall(len(frame).to_bytes(4, "big") + frame)
pid = hear()["pid"]
print(open(f"/proc/{pid}/environ").read().rstrip(chr(0)), flush=True)
print(open(f"/proc/{pid}/status").read().split("Uid:")[1].split()[0], flush=True)
ours.close()
held.wait()
print(os.path.exists(f"/proc/{pid}"), flush=True)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can read, with the keeper in it."""
    folder = Path(tempfile.mkdtemp())
    try:
        place = folder / "actors" / "process"
        place.mkdir(parents=True)
        for name in ("__init__", "keeper", "pidns", "process_table", "subreaper"):
            shutil.copy(KEEPER_FILE.with_name(f"{name}.py"), place)
        shutil.copy(KEEPER_FILE.parents[1] / "__init__.py", place.parent)
        for path in (folder, place.parent, place):
            path.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)


def python_for_all() -> str:
    """An interpreter that another user may run: that of a home folder is often closed to it."""
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        asked = [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            done = subprocess.run(asked, **as_nobody(), capture_output=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return path
    pytest.skip("no Python of 3.11 or newer that user 65534 may run")


def as_nobody() -> dict[str, object]:
    """The arguments that make a program of root one of an ordinary user."""
    if os.geteuid() != 0:
        return {}
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


def test_an_ordinary_user_has_namespaces_too(shared):
    """Its child keeps its user, can be found by its environment, and ends with the keeper."""
    keeper = shared / "actors" / "process" / "keeper.py"

    done = subprocess.run(
        [python_for_all(), "-c", SERVICE, str(keeper)],
        **as_nobody(),
        cwd="/dev/shm",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    if done.stderr.startswith("probe:"):
        pytest.skip(f"pidns does not work for an ordinary user here: {done.stderr.strip()}")
    uid = str(NOBODY if os.geteuid() == 0 else os.geteuid())
    assert done.stderr == ""
    assert done.stdout.split("\n") == ["MARK=1", uid, "False", ""]
