"""Every setting: its name, its default, and how its text becomes a value."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs

from actors.limits import Limits

MIB: Final = 1024 * 1024


@attrs.frozen(kw_only=True)
class Sources:
    """What defaults and relative paths refer to."""

    environ: Mapping[str, str]
    folder: Path
    file: Path | None


class Refused(Exception):
    """A value that a setting can not have."""


Parse = Callable[[object, Sources, str], object]


def setting(parse: Parse, default: object) -> Any:  # noqa: ANN401  attrs says Any as well
    """Answer a field; a callable default is asked with the sources."""
    ask = default if callable(default) else lambda _sources: default
    return attrs.field(metadata={"parse": parse, "default": ask})


def _text(value: object, _sources: Sources, _where: str) -> str:
    if not isinstance(value, str) or not value or "\x00" in value:
        raise Refused("must be text")
    return value


def _optional(value: object, sources: Sources, where: str) -> str | None:
    return None if value == "" else _text(value, sources, where)


def _flag(value: object, _sources: Sources, _where: str) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise Refused("must be true or false")


def _integer(low: int, high: int) -> Parse:
    def parse(value: object, _sources: Sources, _where: str) -> int:
        number = value
        if isinstance(value, str) and value.isascii() and value.lstrip("-").isdigit():
            number = int(value) if len(value) < 20 else None
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            message = f"must be an integer from {low} to {high}"
            raise Refused(message)
        return number

    return parse


def _number(low: float, high: float) -> Parse:
    def parse(value: object, _sources: Sources, _where: str) -> float:
        message = f"must be a number from {low:g} to {high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise Refused(message)
        try:
            number = float(value)
        except (ValueError, OverflowError) as error:
            raise Refused(message) from error
        if not low <= number <= high:
            raise Refused(message)
        return number

    return parse


def _choice(*known: str) -> Parse:
    def parse(value: object, _sources: Sources, _where: str) -> str:
        text = str(value).lower() if isinstance(value, bool) else value
        if text not in known:
            message = f"must be one of {', '.join(known)}"
            raise Refused(message)
        return str(text)

    return parse


def _path(value: object, sources: Sources, where: str) -> Path:
    text = _text(value, sources, where)
    home = sources.environ.get("HOME", "")
    path = Path(home + text[1:]) if text == "~" or text.startswith("~/") else Path(text)
    from_file = where.startswith("file ") and sources.file is not None
    base = sources.file.parent if from_file and sources.file is not None else sources.folder
    return (base / path).absolute()


def _optional_path(value: object, sources: Sources, where: str) -> Path | None:
    return None if value == "" else _path(value, sources, where)


def _list(separator: str, item: Parse) -> Parse:
    def parse(value: object, sources: Sources, where: str) -> tuple[object, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(separator) if part.strip()]
        if not isinstance(value, list):
            raise Refused("must be a list, or text")
        return tuple(item(part, sources, where) for part in value)

    return parse


def _xdg(variable: str, below_home: str, *rest: str) -> Callable[[Sources], Path]:
    def default(sources: Sources) -> Path:
        base = sources.environ.get(variable, "")
        # The XDG specification: a path that is not absolute is ignored.
        root = (
            Path(base)
            if base.startswith("/")
            else Path(sources.environ.get("HOME") or "/") / below_home
        )
        return root.joinpath("watchkeeper", *rest)

    return default


@attrs.frozen(kw_only=True)
class ServerSettings:
    """Where the service listens, and its data folder."""

    host: str = setting(_text, "127.0.0.1")
    port: int = setting(_integer(0, 65_535), 8_470)
    data: Path = setting(_path, _xdg("XDG_STATE_HOME", ".local/state"))


@attrs.frozen(kw_only=True)
class AuditSettings:
    """Where the signing key lies: never in the data folder."""

    key: Path = setting(_path, _xdg("XDG_CONFIG_HOME", ".config", "log.key"))


@attrs.frozen(kw_only=True)
class LimitSettings:
    """How much at once and for how long; ``queue_depth`` counts running and queued together."""

    capacity: int = setting(_integer(1, 10_000), 10)
    queue_depth: int = setting(_integer(1, 1_000_000), 100)
    grace_s: float = setting(_number(0, 3_600), 5.0)
    keep_finished_s: float = setting(_number(0, 31_536_000), 3_600.0)
    output_limit_bytes: int = setting(_integer(1_024, 1 << 40), 256 * MIB)


@attrs.frozen(kw_only=True)
class AgentSettings:
    """Where agents are defined and what they may start; ``allow_shell`` is about HTTP only."""

    folder: tuple[Path, ...] = setting(
        _list(":", _path), lambda sources: (sources.folder / "agents",)
    )
    allow_shell: bool = setting(_flag, False)
    background_jobs: int = setting(_integer(0, 1_000), 5)
    sub_agents: int = setting(_integer(0, 1_000), 4)
    depth: int = setting(_integer(0, 16), 3)
    tool_timeout_s: float = setting(_number(1, 86_400), 1_800.0)


@attrs.frozen(kw_only=True)
class WorkspaceSettings:
    """Where jobs work; ``kind`` None: a clone when there is a repository, else scratch."""

    repo: str | None = setting(_optional, None)
    ref: str | None = setting(_optional, None)
    kind: Literal["clone", "scratch"] | None = setting(_choice("clone", "scratch"), None)
    strategy: str = setting(_text, "auto")
    git_crypt_key: Path | None = setting(_optional_path, None)
    fetch_debounce_s: float = setting(_number(0, 86_400), 15.0)
    keep: str = setting(_choice("never", "failed", "always"), "never")


@attrs.frozen(kw_only=True)
class ModelSettings:
    """The models of the claude backend."""

    default: str = setting(_text, "sonnet")
    allowed: tuple[str, ...] = setting(
        _list(",", _text),
        (
            "haiku",
            "sonnet",
            "opus",
            "claude-haiku-4-5",
            "claude-sonnet-4-6",
            "claude-opus-4-7",
        ),
    )


@attrs.frozen(kw_only=True)
class OpenAISettings:
    """How the OpenAI-compatible routes make jobs; ``agent`` None: the first defined file."""

    agent: str | None = setting(_optional, None)
    max_budget_usd: float = setting(_number(0.000001, 1_000_000), 2.0)
    timeout_seconds: float = setting(_number(1, 86_400), 900.0)
    workspace: str = setting(_choice("clone", "scratch"), "clone")
    errors: str = setting(_text, "openai")
    on_disconnect: str = setting(_text, "cancel")
    side_call_agent: str | None = setting(_optional, None)


@attrs.frozen(kw_only=True)
class ContainmentSettings:
    """How hard jobs are held; ``auto`` is the strongest that works here."""

    mode: str = setting(_choice("auto", "pidns", "cgroup", "uid", "subreaper"), "auto")
    confine: str = setting(_choice("auto", "true", "false"), "auto")
    writable_paths: tuple[Path, ...] = setting(_list(":", _path), ())


@attrs.frozen(kw_only=True)
class LogSettings:
    """What the service says of itself, how long it drains, when the disk counts as full."""

    level: str = setting(_choice("debug", "info", "warning", "error"), "info")
    format: str = setting(_choice("auto", "text", "json"), "auto")
    drain_s: float = setting(_number(0, 86_400), 30.0)
    low_water_bytes: int = setting(_integer(0, 1 << 50), 256 * MIB)


SECTIONS: Final[Mapping[str, type[Any]]] = MappingProxyType(
    {
        "server": ServerSettings,
        "audit": AuditSettings,
        "limits": LimitSettings,
        "agents": AgentSettings,
        "workspace": WorkspaceSettings,
        "models": ModelSettings,
        "openai": OpenAISettings,
        "containment": ContainmentSettings,
        "log": LogSettings,
    }
)


@attrs.frozen(kw_only=True)
class Settings:
    """All settings in force. ``token`` None: the one in the data folder.

    ``provenance`` says of each ``section.key`` where it came from. ``url_given`` is whether the
    client was told where the service is.
    """

    server: ServerSettings
    audit: AuditSettings
    limits: LimitSettings
    agents: AgentSettings
    workspace: WorkspaceSettings
    models: ModelSettings
    openai: OpenAISettings
    containment: ContainmentSettings
    log: LogSettings
    token: str | None = attrs.field(repr=False)
    url: str
    url_given: bool
    file: Path | None
    provenance: Mapping[str, str]
    home: Path

    def runtime_limits(self) -> Limits:
        """Answer the limits in the units of the runtime."""
        return Limits(
            capacity=self.limits.capacity,
            queue_depth=self.limits.queue_depth,
            grace_ms=round(self.limits.grace_s * 1000),
            keep_finished_ms=round(self.limits.keep_finished_s * 1000),
            output_bytes_max=self.limits.output_limit_bytes,
            drain_ms=round(self.log.drain_s * 1000),
            low_water_bytes=self.log.low_water_bytes,
        )
