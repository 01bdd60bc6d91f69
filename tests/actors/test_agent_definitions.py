"""Agent files are read whole, or every problem of every one is named."""

import hashlib
from pathlib import Path

import pytest

from actors.agent_definitions import AgentCatalog, AgentDefinitionsInvalid
from storage import events as e

FULL = """\
---
name: fixer
description: Fixes things
backend: command
command: [fix, "--model={model}"]
prompt_by: file
line_format: jsonl
model: big
models: [big, small]
tools: Read, Grep
timeout_seconds: 60
max_budget_usd: 1.5
workspace: {kind: clone, ref: main}
can_spawn_agents: true
spawnable_agents: [helper]
max_concurrent_jobs: 0
env: [API_KEY, MODE=fast, MISSING]
color: blue
---
You fix things.

Well.
"""


def load(folder: Path, files: dict[str, str], **environment: str) -> AgentCatalog:
    for name, text in files.items():
        (folder / name).write_text(text)
    return AgentCatalog.load([folder], environment=environment)


def problems(folder: Path, files: dict[str, str]) -> list[tuple[str | None, str]]:
    with pytest.raises(AgentDefinitionsInvalid) as invalid:
        load(folder, files)
    return [(problem.field, problem.message) for problem in invalid.value.problems]


def test_a_fresh_machine_has_shell_and_echo():
    """Without any file there are the built-in agents."""
    catalog = AgentCatalog.load([Path("/no/such/folder")], environment={})

    assert catalog.names() == ["echo", "shell"]
    assert catalog.get("shell").backend == "shell"
    assert catalog.get("shell").built_in
    assert catalog.get("nobody") is None
    assert catalog.get("shell").digest != catalog.get("echo").digest


def test_every_field_of_a_file_is_read(tmp_path):
    """Units are ours, text is trimmed, the digest is that of the file."""
    agent = load(tmp_path, {"any.md": FULL}, API_KEY="k", OTHER="o").get("fixer")

    assert agent.argv == ("fix", "--model={model}")
    assert (agent.prompt_by, agent.line_format) == ("file", "jsonl")
    assert (agent.model, agent.models) == ("big", ("big", "small"))
    assert agent.tools == ("Read", "Grep")
    assert (agent.timeout_ms, agent.max_budget_microusd) == (60_000, 1_500_000)
    assert agent.workspace == e.WorkspaceRequest(kind="clone", ref="main")
    assert (agent.can_spawn_agents, agent.spawnable_agents) == (True, ("helper",))
    assert agent.max_concurrent_jobs == 0
    assert agent.environment == (("API_KEY", "k"), ("MODE", "fast"))
    assert agent.system_prompt == "You fix things.\n\nWell."
    assert agent.digest == hashlib.sha256(FULL.encode()).hexdigest()
    assert agent.unknown_keys == ("color",)


def test_an_existing_sub_agent_file_works(tmp_path):
    """A file with a name and a description alone is an agent of the default backend."""
    text = "---\nname: reviewer\ndescription: Reviews\n---\nReview.\n"

    agent = load(tmp_path, {"reviewer.md": text}).get("reviewer")

    assert (agent.backend, agent.workspace, agent.timeout_ms) == ("claude", None, None)


def test_the_file_names_the_agent_when_it_does_not(tmp_path):
    """Without a name in it, a file's own name counts; CRLF and a byte order mark are fine."""
    text = "\ufeff---\r\ndescription: x\r\n---\r\nhi\r\n"

    assert load(tmp_path, {"quick.md": text}).get("quick").system_prompt == "hi"


def test_all_problems_of_all_files_are_named_at_once(tmp_path):
    """One start shows everything that is to be mended."""
    found = problems(
        tmp_path,
        {
            "a.md": "---\nname: [x]\nbackend: best\ntimeout_seconds: 0\n---\n",
            "b.md": "no front matter",
            "c.md": "---\nbackend: command\n---\n",
            "d.md": "---\nname: shell\n---\n",
            "e.md": "---\n: {\n---\n",
            "f.md": "---\nenv: [WATCHKEEPER_TOKEN, 'a b']\nworkspace: tent\n---\n",
            "g.md": "---\nname: x\n",
            "h.md": "---\n- a list\n---\n",
            "i.md": "---\nmax_budget_usd: 0\nmax_concurrent_jobs: -1\ncommand: [a]\n---\n",
        },
    )

    assert [field for field, _ in found] == [
        "name",
        "backend",
        "timeout_seconds",
        None,
        "command",
        "name",
        None,
        "workspace",
        "env",
        "env",
        None,
        None,
        "command",
        "max_budget_usd",
        "max_concurrent_jobs",
    ]
    assert "use one of claude" in found[1][1]


@pytest.mark.parametrize(
    ("seconds", "good"), [(0, False), (1, True), (86_400, True), (86_401, False)]
)
def test_the_range_of_timeouts_is_exact(tmp_path, seconds, good):
    """The limits, one below and one above."""
    files = {"a.md": f"---\ntimeout_seconds: {seconds}\n---\n"}

    if good:
        assert load(tmp_path, files).get("a").timeout_ms == seconds * 1000
    else:
        assert [field for field, _ in problems(tmp_path, files)] == ["timeout_seconds"]


def test_two_files_with_one_name_are_a_problem(tmp_path):
    """Inside a folder a name is one agent's."""
    text = "---\nname: same\n---\n"

    assert problems(tmp_path, {"a.md": text, "b.md": text})[0][0] == "name"


def test_the_earlier_folder_counts(tmp_path):
    """A project's agent stands before the user's own of that name."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.md").write_text(f"---\ndescription: {folder}\n---\n")

    catalog = AgentCatalog.load([tmp_path / "one", tmp_path / "two"], environment={})

    assert catalog.get("a").description == "one"
    assert [agent.name for agent in catalog.defined()] == ["a"]


def test_secrets_of_the_environment_are_not_shown(tmp_path):
    """A definition can be printed without telling what it was given."""
    agent = load(tmp_path, {"a.md": "---\nenv: [API_KEY]\n---\n"}, API_KEY="s3cret").get("a")

    assert agent.environment == (("API_KEY", "s3cret"),)
    assert "s3cret" not in repr(agent)


def test_what_is_no_text_is_a_problem(tmp_path):
    """Bytes that are not UTF-8 are named, not guessed."""
    (tmp_path / "a.md").write_bytes(b"---\nname: \xff\n---\n")

    assert problems(tmp_path, {})[0][1].startswith("is not UTF-8")
