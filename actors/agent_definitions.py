"""Agent definitions: ``NAME.md`` files with YAML front matter and the system prompt below it.

The form is that of Claude Code's sub-agents, so that existing files work: keys that we do not know
are kept aside, not refused. Built in are ``shell`` and ``echo``.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import attrs
import msgspec
import yaml

from storage import events as e

BackendName = Literal["claude", "codex", "opencode", "command", "llm", "graph"]
FILE_BYTES_MAX: Final = 1024 * 1024
TIMEOUT_S_MAX: Final = 86_400
_MICROS: Final = 1_000_000
_MS: Final = 1_000
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FENCE: Final = "---"
# Any: types as values, for msgspec to convert to.
_FIELDS: Final[dict[str, Any]] = {
    "name": str,
    "description": str,
    "backend": BackendName,
    "model": str,
    "models": list[str],
    "command": list[str],
    "prompt_by": Literal["stdin", "file"],
    "line_format": Literal["text", "jsonl"],
    "tools": str | list[str],
    "permission_mode": str,
    "timeout_seconds": int,
    "max_budget_usd": float,
    "workspace": Literal["clone", "scratch"] | dict[str, str],
    "can_spawn_agents": bool,
    "spawnable_agents": list[str],
    "max_concurrent_jobs": int,
    "env": list[str] | dict[str, str],
}


@attrs.frozen(kw_only=True)
class AgentDefinition:
    """One agent. None of an optional field: the configuration or the request decides.

    ``argv`` is the command of backend ``command``. ``environment`` are the variables that the
    agent gets besides the allowed ones; those that the file only names have the values of the
    service. ``digest`` is the SHA-256 of the file, in hex.
    """

    name: str
    digest: str
    backend: str = "claude"
    description: str = ""
    system_prompt: str = ""
    model: str | None = None
    models: tuple[str, ...] | None = None
    argv: tuple[str, ...] = ()
    prompt_by: Literal["stdin", "file"] = "stdin"
    line_format: Literal["text", "jsonl"] = "text"
    tools: tuple[str, ...] | None = None
    permission_mode: str | None = None
    timeout_ms: int | None = None
    max_budget_microusd: int | None = None
    workspace: e.WorkspaceRequest | None = None
    can_spawn_agents: bool = False
    spawnable_agents: tuple[str, ...] | None = None
    max_concurrent_jobs: int | None = None
    environment: tuple[tuple[str, str], ...] = attrs.field(default=(), repr=False)
    path: str | None = None
    unknown_keys: tuple[str, ...] = ()

    @property
    def built_in(self) -> bool:
        """Whether it comes with us and not from a file."""
        return self.path is None


@attrs.frozen
class AgentProblem:
    """What is wrong with one file: the field (None: the file as a whole), and what to do."""

    path: str
    field: str | None
    message: str

    def __str__(self) -> str:
        where = f"{self.path}: {self.field}" if self.field else self.path
        return f"{where}: {self.message}"


class AgentDefinitionsInvalid(Exception):
    """Some agent files can not be used; ``problems`` names all of them."""

    def __init__(self, problems: tuple[AgentProblem, ...]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems


class AgentCatalog:
    """The agents of some folders and the built-in ones; read once."""

    def __init__(self, agents: Iterable[AgentDefinition] = ()) -> None:
        self._agents = {agent.name: agent for agent in BUILT_IN}
        for agent in agents:
            self._agents.setdefault(agent.name, agent)

    @classmethod
    def load(
        cls, folders: Iterable[Path], *, environment: Mapping[str, str] | None = None
    ) -> "AgentCatalog":
        """Answer the agents that are in some folders; blocks while it reads.

        Of two folders with one name the earlier counts. A folder that is not there is empty.
        ``environment`` (None: that of this process) has the values of the variables that files
        only name. Raises AgentDefinitionsInvalid with every problem of every file.
        """
        problems: list[AgentProblem] = []
        reader = _Reader(os.environ if environment is None else environment, problems)
        agents = [agent for folder in folders for agent in reader.folder(folder)]
        if problems:
            raise AgentDefinitionsInvalid(tuple(problems))
        return cls(agents)

    def names(self) -> list[str]:
        """Answer the names of all agents, sorted."""
        return sorted(self._agents)

    def get(self, name: str) -> AgentDefinition | None:
        """Answer the agent of a name; None when there is none."""
        return self._agents.get(name)

    def defined(self) -> list[AgentDefinition]:
        """Answer the agents that come from files, by name."""
        return [agent for _, agent in sorted(self._agents.items()) if not agent.built_in]


def parse_definition(
    path: Path, data: bytes, problems: list[AgentProblem], environment: Mapping[str, str]
) -> AgentDefinition:
    """Answer the definition in a file; what is wrong with it is added to ``problems``."""
    source = _Source(str(path), problems)
    header, body = _split(source, data)
    values = _checked(source, header)
    name = str(values.get("name", path.stem))
    source.check(
        _NAME.fullmatch(name) is not None,
        "name",
        "use up to 64 letters, digits, dots, dashes and underscores",
    )
    built_in = {agent.name for agent in BUILT_IN}
    source.check(name not in built_in, "name", f"{name!r} is a built-in agent; choose another")
    _check_command(source, values)
    return AgentDefinition(
        name=name,
        digest=hashlib.sha256(data).hexdigest(),
        backend=values.get("backend", "claude"),
        description=values.get("description", ""),
        system_prompt=body,
        model=values.get("model"),
        models=_tuple(values.get("models")),
        argv=tuple(values.get("command", ())),
        prompt_by=values.get("prompt_by", "stdin"),
        line_format=values.get("line_format", "text"),
        tools=_tuple(_words(values.get("tools"))),
        permission_mode=values.get("permission_mode"),
        timeout_ms=_timeout_ms(source, values.get("timeout_seconds")),
        max_budget_microusd=_budget(source, values.get("max_budget_usd")),
        workspace=_workspace(source, values.get("workspace")),
        can_spawn_agents=values.get("can_spawn_agents", False),
        spawnable_agents=_tuple(values.get("spawnable_agents")),
        max_concurrent_jobs=_count(source, values.get("max_concurrent_jobs")),
        environment=_environment(source, values.get("env"), environment),
        path=str(path),
        unknown_keys=tuple(sorted(str(key) for key in header.keys() - _FIELDS.keys())),
    )


@attrs.frozen
class _Source:
    path: str
    problems: list[AgentProblem]

    def check(self, holds: bool, field: str | None, message: str) -> None:
        if not holds:
            self.problems.append(AgentProblem(self.path, field, message))


def _built_in(name: str, description: str) -> AgentDefinition:
    digest = hashlib.sha256(f"built-in agent {name}, version 1".encode()).hexdigest()
    return AgentDefinition(name=name, backend=name, description=description, digest=digest)


BUILT_IN: Final = (
    _built_in("echo", "Answers its prompt."),
    _built_in("shell", "Runs its prompt as a shell script in the workspace."),
)


@attrs.frozen
class _Reader:
    environment: Mapping[str, str]
    problems: list[AgentProblem]

    def folder(self, folder: Path) -> list[AgentDefinition]:
        agents: dict[str, AgentDefinition] = {}
        for path in sorted(folder.glob("*.md")) if folder.is_dir() else ():
            agent = self._file(path)
            if agent is not None:
                other = agents.setdefault(agent.name, agent)
                source = _Source(str(path), self.problems)
                source.check(other is agent, "name", f"{agent.name!r} is also in {other.path}")
        return list(agents.values())

    def _file(self, path: Path) -> AgentDefinition | None:
        source = _Source(str(path), self.problems)
        try:
            data = path.read_bytes()
        except OSError as error:
            source.check(False, None, f"can not be read: {error.strerror}")
            return None
        if len(data) > FILE_BYTES_MAX:
            source.check(False, None, f"is longer than {FILE_BYTES_MAX} bytes")
            return None
        before = len(self.problems)
        agent = parse_definition(path, data, self.problems, self.environment)
        return agent if len(self.problems) == before else None


def _split(source: _Source, data: bytes) -> tuple[dict[Any, Any], str]:
    try:
        lines = data.decode().replace("\r\n", "\n").removeprefix("\ufeff").split("\n")
    except UnicodeDecodeError as error:
        source.check(False, None, f"is not UTF-8 at byte {error.start}")
        return {}, ""
    if lines[0].rstrip() != _FENCE:
        source.check(False, None, "begin it with a line of three dashes and the front matter")
        return {}, ""
    ends = [n for n, line in enumerate(lines) if n and line.rstrip() == _FENCE]
    if not ends:
        source.check(False, None, "end the front matter with a line of three dashes")
        return {}, ""
    body = "\n".join(lines[ends[0] + 1 :]).strip()
    try:
        header = yaml.safe_load("\n".join(lines[1 : ends[0]]))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        source.check(False, None, f"the front matter is not YAML: {_one_line(error)}")
        return {}, body
    source.check(isinstance(header, dict | None), None, "the front matter is not a mapping")
    return header if isinstance(header, dict) else {}, body


def _checked(source: _Source, header: Mapping[Any, Any]) -> dict[str, Any]:
    values = {}
    for key, expected in _FIELDS.items():
        if header.get(key) is None:
            continue
        try:
            values[key] = msgspec.convert(header[key], expected)
        except msgspec.ValidationError as error:
            hint = ""
            if key == "backend":
                hint = f"; use one of {', '.join(get_args(BackendName))}"
            source.check(False, key, f"{_one_line(error)}{hint}")
    return values


def _check_command(source: _Source, values: Mapping[str, Any]) -> None:
    needs = values.get("backend", "claude") == "command"
    has = bool(values.get("command"))
    source.check(has or not needs, "command", "backend command needs the list of its arguments")
    source.check(needs or "command" not in values, "command", "only backend command has one")
    bad = any("\0" in word for word in values.get("command", ()))
    source.check(not bad, "command", "an argument can not hold a NUL character")


def _timeout_ms(source: _Source, seconds: int | None) -> int | None:
    if seconds is None:
        return None
    fits = 1 <= seconds <= TIMEOUT_S_MAX
    source.check(fits, "timeout_seconds", f"{seconds} is not between 1 and {TIMEOUT_S_MAX}")
    return seconds * _MS


def _budget(source: _Source, dollars: float | None) -> int | None:
    if dollars is None:
        return None
    fits = 0 < dollars < _MICROS
    source.check(fits, "max_budget_usd", f"{dollars} is not more than 0 and below a million")
    return round(dollars * _MICROS) if fits else None


def _count(source: _Source, count: int | None) -> int | None:
    source.check(count is None or count >= 0, "max_concurrent_jobs", f"{count} is below 0")
    return count


def _workspace(source: _Source, value: str | dict[str, str] | None) -> e.WorkspaceRequest | None:
    if value is None:
        return None
    fields = {"kind": value} if isinstance(value, str) else value
    try:
        return msgspec.convert(fields, e.WorkspaceRequest)
    except msgspec.ValidationError as error:
        source.check(False, "workspace", _one_line(error))
        return None


def _environment(
    source: _Source, value: list[str] | dict[str, str] | None, service: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    pairs: list[tuple[str, str | None]] = []
    if isinstance(value, dict):
        pairs += value.items()
    for word in value if isinstance(value, list) else ():
        name, equals, text = word.partition("=")
        pairs.append((name, text if equals else None))
    for name, given in pairs:
        named = _VARIABLE.fullmatch(name) is not None and "\0" not in (given or "")
        source.check(named, "env", f"{name!r} is not the name of a variable")
        own = name.startswith("WATCHKEEPER_")
        source.check(not own, "env", f"{name} is the service's own and never given away")
    known = ((name, service.get(name) if given is None else given) for name, given in pairs)
    return tuple((name, value) for name, value in known if value is not None)


def _words(value: str | list[str] | None) -> list[str] | None:
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    return value


def _tuple(value: list[str] | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(value)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
