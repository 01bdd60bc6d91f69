"""What several commands share: options, settings, the log of a stopped service."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from web.config import load
from web.settings import Settings

_F = TypeVar("_F", bound=Callable[..., Any])


def with_config(command: _F) -> _F:
    """Add ``--config`` and ``--data``."""
    data = click.option(
        "--data", type=Path, help="Data folder (default: $XDG_STATE_HOME/watchkeeper)."
    )
    config = click.option("--config", type=Path, help="Configuration file (watchkeeper.toml).")
    return config(data(command))


def with_json(command: _F) -> _F:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(
        command
    )


def settings_of(config: Path | None, data: Path | None, **options: str | int | None) -> Settings:
    """Answer the settings with the options of a command over them."""
    given = {f"server.{name}": str(value) for name, value in options.items() if value is not None}
    if data is not None:
        given["server.data"] = str(data)
    return load(config, given)


@asynccontextmanager
async def log_of(settings: Settings) -> AsyncGenerator[Any, None]:
    """Open the log of a data folder for reading; works beside a running service.

    Answers a :class:`storage.sqlite_log.SqliteEventLog`. Raises FileNotFoundError.
    """
    # Any: the class is imported late, when a command really reads the log.
    from storage.folder import DataFolder
    from storage.ids import IdSource
    from storage.sqlite_log import SqliteEventLog

    path = DataFolder(settings.server.data).log
    if not path.is_file():
        raise FileNotFoundError(
            2, f"there is no log in {settings.server.data}; name its folder with --data"
        )
    async with SqliteEventLog.open(
        path,
        ids=IdSource(),
        clock_ns=time.time_ns,
        session=secrets.token_hex(8),
        die=_never,
        read_only=True,
    ) as log:
        yield log


def _never(reason: str) -> NoReturn:
    raise RuntimeError(reason)
