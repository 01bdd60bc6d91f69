"""``watchkeeper serve``: the service."""

from functools import partial
from pathlib import Path

import click
import trio

from web.cli_common import settings_of, with_config
from web.serving import run_service


@click.command()
@click.option("--host", help="Address to listen on (default: 127.0.0.1).")
@click.option("--port", type=click.IntRange(0, 65_535), help="Port (default: 8470; 0: a free one).")
@with_config
def serve(host: str | None, port: int | None, config: Path | None, data: Path | None) -> None:
    """Run the service until SIGTERM or Ctrl-C; running jobs get time to finish."""
    settings = settings_of(config, data, host=host, port=port)
    trio.run(partial(run_service, settings))
