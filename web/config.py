"""The settings: a file, the environment over it, options over both; read once, then frozen.

Only this module reads the environment. An unknown key is an error that names the known ones.
"""

import hashlib
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec

from web.settings import SECTIONS, Refused, Settings, Sources

PREFIX: Final = "WATCHKEEPER_"
CHILD_PREFIX: Final = "WATCHKEEPER_JOB_"
FILE_NAME: Final = "watchkeeper.toml"
TOKEN: Final = "WATCHKEEPER_TOKEN"  # noqa: S105  the name of a variable
URL: Final = "WATCHKEEPER_URL"
DEFAULT_URL: Final = "http://127.0.0.1:8470"


class ConfigError(Exception):
    """A setting that can not be used: ``key`` as people write it, and where it was found."""

    def __init__(self, key: str, where: str, reason: str) -> None:
        super().__init__(f"{key} ({where}): {reason}")
        self.key = key
        self.where = where
        self.reason = reason


def load(
    config: Path | None = None,
    options: Mapping[str, str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Settings:
    """Answer the settings in force; raises ConfigError.

    ``config`` None takes ``watchkeeper.toml`` of the working folder when there is one.
    ``options`` are values of the command line by ``section.key``. ``environ`` and ``folder``
    None are those of the process.
    """
    environ = os.environ if environ is None else environ
    folder = Path.cwd() if folder is None else folder
    file = _config_file(config, folder)
    found = _from_file(file) if file is not None else {}
    found |= _from_environment(environ)
    found |= {
        key: (value, f"option --{key.split('.')[1]}") for key, value in (options or {}).items()
    }
    values, provenance = _parse(found, Sources(environ=environ, folder=folder, file=file))
    return Settings(
        **values,
        token=environ.get(TOKEN) or None,
        url=environ.get(URL, DEFAULT_URL).rstrip("/"),
        url_given=URL in environ,
        file=file,
        provenance=provenance,
        home=_home(environ),
    )


def digest(settings: Settings) -> str:
    """Answer SHA-256 over the effective values; secrets are not among them."""
    plain = {name: attrs.asdict(getattr(settings, name)) for name in SECTIONS}
    text = msgspec.json.encode(plain, enc_hook=str, order="deterministic")
    return hashlib.sha256(text).hexdigest()


def shown(settings: Settings) -> list[tuple[str, str, str]]:
    """Answer (key, value, where it came from) of every setting, for people."""
    rows = []
    for section, cls in SECTIONS.items():
        for field in attrs.fields(cls):
            key = f"{section}.{field.name}"
            value = getattr(getattr(settings, section), field.name)
            rows.append((key, _shown_value(value), settings.provenance[key]))
    rows.append(("token", "set" if settings.token else "made at first start", TOKEN))
    return rows


def _shown_value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _config_file(config: Path | None, folder: Path) -> Path | None:
    if config is None:
        found = folder / FILE_NAME
        return found if found.is_file() else None
    if not config.is_file():
        raise ConfigError("--config", str(config), "there is no such file")
    return config.absolute()


# Any: a value of TOML, before it has a type.
def _from_file(file: Path) -> dict[str, tuple[Any, str]]:
    where = f"file {file}"
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(file.name, str(file), f"is not TOML: {error}") from error
    found = {}
    for section, table in document.items():
        if section not in SECTIONS or not isinstance(table, dict):
            raise ConfigError(f"[{section}]", where, f"is not known; known are {_sections()}")
        for name, value in table.items():
            if name not in _names(section):
                raise ConfigError(f"{section}.{name}", where, _known(section))
            found[f"{section}.{name}"] = (value, where)
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found = {}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable.startswith(CHILD_PREFIX):
            continue
        if variable in {TOKEN, URL}:
            continue
        section, _, name = variable.removeprefix(PREFIX).lower().partition("_")
        if section not in SECTIONS:
            reason = f"names no section; known are {_sections()}"
            raise ConfigError(variable, "environment", reason)
        if name not in _names(section):
            raise ConfigError(variable, "environment", _known(section))
        found[f"{section}.{name}"] = (environ[variable], f"environment {variable}")
    return found


def _parse(
    found: Mapping[str, tuple[Any, str]], sources: Sources
) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    provenance: dict[str, str] = {}
    for section, cls in SECTIONS.items():
        given = {}
        for field in attrs.fields(cls):
            key = f"{section}.{field.name}"
            default: Callable[[Sources], object] = field.metadata["default"]
            if key not in found:
                given[field.name], provenance[key] = default(sources), "default"
                continue
            value, where = found[key]
            try:
                given[field.name] = field.metadata["parse"](value, sources, where)
            except Refused as error:
                raise ConfigError(key, where, str(error)) from error
            provenance[key] = where
        values[section] = cls(**given)
    return values, provenance


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or "/").absolute()


def _names(section: str) -> list[str]:
    return [field.name for field in attrs.fields(SECTIONS[section])]


def _sections() -> str:
    return ", ".join(f"[{section}]" for section in SECTIONS)


def _known(section: str) -> str:
    return f"is not known; known keys of [{section}] are {', '.join(_names(section))}"
