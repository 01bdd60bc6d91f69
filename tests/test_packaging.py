"""What is delivered: three packages and one command, and nothing that collides."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"actors", "storage", "web"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The names in a wheel built from this checkout, and its metadata."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        (entry,) = (name for name in names if name.endswith("entry_points.txt"))
        return set(names), archive.read(metadata).decode(), archive.read(entry).decode()


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel):
    """Every module of them, no test, no document, no second top-level name."""
    names, _, _ = wheel
    modules = {str(p.relative_to(ROOT)) for name in PACKAGES for p in (ROOT / name).rglob("*.py")}

    delivered = {name for name in names if ".dist-info/" not in name}

    assert {name for name in delivered if name.endswith(".py")} == modules
    assert {name.split("/")[0] for name in delivered} == PACKAGES
    assert "actors/process/keeper.py" in delivered


def test_the_metadata_is_that_of_the_project(wheel):
    """Name, version, licence, and every dependency with its bounds."""
    _, metadata, entry = wheel
    wanted = [line.split(": ", 1)[1] for line in metadata.splitlines() if line[:8] == "Requires"]

    assert f"\nName: {PROJECT['name']}\n" in metadata
    assert f"\nVersion: {PROJECT['version']}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert len(wanted) == len(PROJECT["dependencies"]) + 1, "one is Requires-Python"
    assert "watchkeeper = web.cli:main" in entry
    assert "[pytest11]\nwatchkeeper = actors.testing.plugin" in entry


def test_no_other_distribution_owns_our_names():
    """Of what is installed beside it nothing has a package of the same name."""
    owners = importlib.metadata.packages_distributions()

    assert {owner for name in PACKAGES for owner in owners.get(name, [])} <= {PROJECT["name"]}


def python(*arguments, cwd):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_the_version_is_that_of_the_project(tmp_path):
    """One version, whoever is asked."""
    said = python("-m", "web", "--version", cwd=tmp_path)

    assert PROJECT["version"] in said.split()


def test_the_command_line_imports_no_server(tmp_path):
    """A client of a service starts fast: the server comes with ``serve`` alone."""
    code = "import web.cli, sys; print(' '.join(m.split('.')[0] for m in sys.modules))"

    loaded = set(python("-c", code, cwd=tmp_path).split())

    assert (
        loaded & {"quart", "hypercorn", "h11", "trio", "sqlite3", "sqlite_utils", "actors"} == set()
    )
