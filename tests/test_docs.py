"""The documents say what the code does."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import pytest

from actors import errors as actors_errors
from storage import errors as storage_errors
from storage import events as e
from storage.job_state import Phase, Status
from tests.web.fake_runtime import FakeRuntime
from web.app import WatchkeeperApp, create_app
from web.auth import TokenBook
from web.edge import Web
from web.errors import CODE_OF_STATUS
from web.schemas import ExecuteBody, MessageBody

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
ADDED = {"HEAD", "OPTIONS"}


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["events.md", "configuration.md", "cli.md"])
def test_a_generated_page_is_what_the_code_says(name):
    """After a change of the code, ``python docs/generate.py`` has been run."""
    assert (REFERENCE / name).read_text() == generator().PAGES[name]()


@pytest.fixture
async def app(tmp_path) -> WatchkeeperApp:
    runtime = await FakeRuntime(tmp_path).open()
    return create_app(Web(runtime=runtime, tokens=TokenBook(), data=tmp_path, version="0"))


async def test_every_route_is_in_the_reference_and_no_other(app):
    """Method, rule and scope of each, in the table at the top and as a section."""
    text = (REFERENCE / "http.md").read_text()
    table = set(re.findall(r"^\| \[`([A-Z]+) (\S+)`\]\(#\S+\) \| `?(\w+)`? \|", text, re.MULTILINE))
    headings = " ".join(line for line in text.splitlines() if line.startswith("## "))

    routes = {
        (method, rule.rule, app.access[rule.endpoint])
        for rule in app.url_map.iter_rules()
        for method in rule.methods - ADDED
    }

    assert table == routes
    assert {f"{m} {r}" for m, r, _ in routes} <= set(re.findall(r"`([A-Z]+ /\S+)`", headings))


@pytest.mark.parametrize("body", [ExecuteBody, MessageBody])
def test_every_field_of_a_body_is_in_the_reference(body):
    """What can be sent can be looked up."""
    text = (REFERENCE / "http.md").read_text()

    assert {
        f for f in body.__struct_fields__ if f"`{f}" not in text and f"{{{f}" not in text
    } == set()


def codes_in_web():
    """The codes of all problems that the web room makes."""
    found = set(CODE_OF_STATUS.values())
    for path in (ROOT / "web").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                at = {"Problem": 1, "not_found": 1, "_paused": 0}.get(node.func.id)
                if at is not None and len(node.args) > at:
                    code = node.args[at]
                    found |= {code.value} if isinstance(code, ast.Constant) else set()
    return found


def codes_of_errors(module):
    """The codes of all expected errors of a room."""
    return {value.code for value in vars(module).values() if hasattr(value, "code")}


def first_cells(page):
    return set(re.findall(r"^\| `([a-z_]+)` \|", (REFERENCE / page).read_text(), re.MULTILINE))


def test_every_error_code_is_in_the_reference_and_no_other():
    """With its status and what to do."""
    codes = codes_in_web() | codes_of_errors(actors_errors) | codes_of_errors(storage_errors)

    assert first_cells("errors.md") == codes | set(e.STATUS_OF_CAUSE)


def test_the_reference_gives_each_status_its_code():
    """The statuses of the table are those that the code answers."""
    text = (REFERENCE / "errors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d{3})\b", text, re.MULTILINE))

    # 503 has the codes of its reasons beside its own, 429 only that of the queue.
    assert {code: rows.get(code) for code in CODE_OF_STATUS.values()} == {
        code: str(status) for status, code in CODE_OF_STATUS.items()
    }


def test_every_cause_has_its_status_in_the_reference():
    """The table of causes agrees with the code."""
    text = (REFERENCE / "errors.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \| ([a-z]+) \|", text, re.MULTILINE))

    assert set(e.STATUS_OF_CAUSE.items()) <= rows


def slug(heading):
    """The anchor that a heading gets."""
    words = heading.lstrip("#").strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    """Files are there, and so are the headings in them."""
    broken = []
    for target, anchor in LINK.findall(page.read_text()):
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            broken.append(target)
        elif anchor:
            lines = path.read_text().splitlines()
            if anchor not in {slug(line) for line in lines if line.startswith("#")}:
                broken.append(f"{target}#{anchor}")

    assert broken == []


def test_every_page_can_be_reached_from_the_readme():
    """No document is an orphan; a link to a folder leads to the pages in it."""
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        waiting += page.glob("*.md") if page.is_dir() else ()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = LINK.findall(page.read_text())
        waiting += [(page.parent / target).resolve() for target, _ in links if target]

    pages = {page for page in PAGES if "examples" not in page.parts}
    assert pages - seen == set()


@pytest.mark.parametrize("words", [Status, Phase])
def test_every_status_and_phase_is_in_the_glossary(words):
    """A word that the service says can be looked up."""
    text = (ROOT / "docs" / "glossary.md").read_text()

    assert {w for w in typing.get_args(words) if f"\n| {w} |" not in text} == set()


def commands_of_readme():
    """The first command of each of the two sections that promise one."""
    text = (ROOT / "README.md").read_text()
    sections = (text.split(f"## {name}\n")[1] for name in ("Run it", "Pass the tests"))
    return [section.split("```sh\n")[1].split("\n```")[0] for section in sections]


def bare_environment(tmp_path):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WATCHKEEPER_", "PYTEST_"))}
    return kept | {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.mark.slow
@pytest.mark.acceptance
def test_the_readmes_first_command_shows_the_demo(tmp_path):
    """In a fresh checkout; the dependencies are those of this environment, not downloaded."""
    here = tmp_path / "checkout"
    ignore = shutil.ignore_patterns(
        ".git", ".venv*", "__pycache__", ".*_cache", "tests", "*.egg-info"
    )
    shutil.copytree(ROOT, here, ignore=ignore)
    packages = [p for p in sys.path if p.endswith("site-packages")]
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}

    done = subprocess.run(
        ["/bin/sh", "-ec", commands_of_readme()[0]],
        cwd=here,
        env=bare_environment(tmp_path) | offline | {"PYTHONPATH": os.pathsep.join(packages)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "completed" in done.stdout + done.stderr
    assert "whole" in done.stdout + done.stderr


def test_the_readmes_second_command_is_what_the_gate_does():
    """All that it installs is locked by hash; the gate takes the same steps."""
    command = commands_of_readme()[1]
    gate = (ROOT / ".ci" / "run").read_text()
    locked = set(
        re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]

    for step in ("--require-hashes -r requirements.lock", "--no-deps --no-build-isolation -e ."):
        assert step in command
        assert step in gate
    assert command.endswith("python -m pytest")
    assert "python -m pytest" in gate
    names = {re.match(r"[\w.-]+", name)[0].lower() for name in [*wanted, "hatchling"]}
    assert names - {name.lower() for name in locked} == set()


def test_the_example_agent_runs(tmp_path):
    """``watchkeeper run`` with the agent of the how-to, as the tutorial says."""
    agents = tmp_path / "agents"
    shutil.copytree(ROOT / "docs" / "examples" / "agents", agents)
    command = [sys.executable, "-m", "web", "run", "--agent", "wordcount", "--json"]

    done = subprocess.run(
        [*command, "--data", str(tmp_path / "data"), "one two three"],
        cwd=tmp_path,
        env=bare_environment(tmp_path) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    assert (job["status"], job["output"]) == ("completed", ["counted 3 words"])
