"""The commands by name, and the one border where an error becomes a line."""

import importlib
import os
import sys
from typing import Final, NoReturn

import click

from web.text import one_line, sole
from web.version import VERSION

COMMANDS: Final = {
    "demo": ("web.cli_demo", "See it work: a repository, three jobs, their history. No key."),
    "run": ("web.cli_run", "Run one job here and now, without a server."),
    "serve": ("web.cli_serve", "Run the service."),
    "submit": ("web.cli_client", "Hand a job to the service."),
    "jobs": ("web.cli_client", "List jobs, newest first."),
    "status": ("web.cli_client", "Show one job."),
    "logs": ("web.cli_client", "Show what a job wrote; -f follows."),
    "wait": ("web.cli_client", "Wait until a job has ended."),
    "cancel": ("web.cli_client", "End a job and all its processes."),
    "diff": ("web.cli_client", "Show what a job changed, as a patch."),
    "replay": ("web.cli_audit", "Show the history of a job from the log alone."),
    "events": ("web.cli_audit", "Show the events of the log."),
    "verify": ("web.cli_audit", "Prove that the log is whole."),
    "simulate": ("web.cli_simulate", "Run one simulated history, decided by a seed."),
    "doctor": ("web.cli_doctor", "Check this machine, and show the settings in force."),
}
"""Where each command lives, and its line in the help; modules are imported when used."""

INTERRUPTED: Final = 130
FAILED: Final = 1


class CommandFailed(Exception):
    """A command that ends with a code; its text, if any, goes to stderr."""

    def __init__(self, text: str = "", *, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


class LazyGroup(click.Group):
    """A group that imports a command when it is called for, and not for its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Answer the names in the order of the help."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Answer a command, imported now; None when there is none of this name."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command), "the table names commands"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands from literals."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="watchkeeper", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the whole trace of an error.")
def watchkeeper(*, debug: bool) -> None:
    """Run coding agents: isolated jobs under supervision, one log that proves what happened."""
    del debug  # Looked for by ``run``, before the arguments are parsed.


def run(arguments: list[str]) -> int:
    """Run a command and answer its exit code; an error is one line on stderr."""
    try:
        answer = watchkeeper.main(arguments, prog_name="watchkeeper", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as left:
        return left.exit_code
    except click.ClickException as error:
        return _usage(error)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BaseException as error:
        if isinstance(error, SystemExit) or arguments[:1] == ["--debug"]:
            raise
        return _failed(sole(error))
    return answer if isinstance(answer, int) else 0


def _usage(error: click.ClickException) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "watchkeeper"
    _line(f"{error.format_message().rstrip('.')}; see: {path} --help")
    return error.exit_code


def _failed(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        _leave_quietly()
        return FAILED
    if isinstance(error, CommandFailed):
        if str(error):
            _line(str(error))
        return error.code
    if _expected(error):
        _line(str(error))
        return FAILED
    name = type(error).__name__
    _line(f"internal error, {name}: {error}; run watchkeeper --debug … for the trace")
    return 70


def _expected(error: BaseException) -> bool:
    # Imported here: by now an error of these kinds has imported them already.
    from actors.errors import ActorsError
    from storage.errors import StorageError
    from web.client import ClientError
    from web.config import ConfigError
    from web.errors import Problem
    from web.server import PortTaken

    kinds = (ActorsError, StorageError, ClientError, ConfigError, Problem, PortTaken, OSError)
    return isinstance(error, kinds)


def _line(text: str) -> None:
    print(f"watchkeeper: {one_line(text, 2_000)}", file=sys.stderr)


def _leave_quietly() -> None:
    # The reader has gone: nothing more can be written, also not by the flush at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(text: str, *, code: int = FAILED) -> NoReturn:
    """End the command with a line and a code."""
    raise CommandFailed(text, code=code)
