"""Writes the reference pages that follow from the code; a test compares them.

Run ``python docs/generate.py`` after a change of the events or of the table of causes.
"""

import inspect
import sys
import typing
from pathlib import Path

import msgspec

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

import attrs  # noqa: E402  the checkout is put on the path first
import click  # noqa: E402

from storage import events as e  # noqa: E402
from storage.job_state import LEGAL_IN  # noqa: E402
from web.cli_group import watchkeeper  # noqa: E402
from web.settings import Settings, Sources  # noqa: E402

HEAD = """# Events

Generated from the code by `docs/generate.py`; do not edit.

Every event is one row of the table `events` in `DATA/log.db`. `body` holds the exact bytes that
were hashed: the envelope, then `data`, the event with its `type`.

| envelope field | meaning |
|---|---|
| `seq` | place in the log, from 1, without gaps |
| `stream` | `job/ID` or `service` |
| `version` | place in the stream, from 1 |
| `type` | name of the event |
| `schema` | version of the event's form |
| `recorded_at_ns` | UTC nanoseconds; never less than the event before |
| `session` | id of the service's start that wrote it |
| `by` | who asked: a token's name, an agent's job, or `service` |
| `request_id` | the HTTP request, or null |
| `caused_by` | seq of the event that led to it, or null |
| `epoch` | run of the job, from 1; 0: the job as a whole, or the service |
| `n` | number of the host's fact within the run, or null |
| `prev_leaf` | leaf of the stream's event before; null at version 1 |

Text that people or agents wrote is a reference `{digest, size}`; the bytes are in the table
`payloads` until they are erased.

"""


def events_page() -> str:
    """Answer the text of docs/reference/events.md."""
    parts = [HEAD]
    for title, union in (
        ("Events of a job", e.JobEvent),
        ("Events of the service", e.ServiceEvent),
    ):
        parts.append(f"## {title}\n\n")
        parts.extend(_event(cls) for cls in typing.get_args(union))
    parts.append("## Cause and status\n\n| cause | status |\n|---|---|\n")
    parts.extend(f"| `{cause}` | {status} |\n" for cause, status in e.STATUS_OF_CAUSE.items())
    return "".join(parts)


def _event(cls: type[msgspec.Struct]) -> str:
    lines = [f"### `{cls.__struct_config__.tag}`\n\n", inspect.getdoc(cls) or "", "\n\n"]
    legal = LEGAL_IN.get(cls)
    if legal:
        lines.append(f"Legal while: {', '.join(sorted(legal))}.\n\n")
    fields = msgspec.structs.fields(cls)
    if fields:
        lines.append("| field | type | default |\n|---|---|---|\n")
        lines.extend(_field(field) for field in fields)
        lines.append("\n")
    return "".join(lines)


def _field(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        default = f"`{msgspec.json.encode(field.default).decode()}`"
    elif field.default_factory is not msgspec.NODEFAULT:
        default = f"`{msgspec.json.encode(field.default_factory()).decode()}`"
    else:
        default = "required"
    return f"| `{field.name}` | {_type(field.type)} | {default} |\n"


def _type(kind: object) -> str:
    if isinstance(kind, type) and not typing.get_args(kind):
        return kind.__name__
    if isinstance(kind, typing.NewType):
        return kind.__name__
    args = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{a}`" for a in args)
    if args and typing.get_origin(kind) not in (list, dict):
        return " or ".join("null" if a is type(None) else _type(a) for a in args)
    return str(kind).replace("storage.events.", "").replace("NoneType", "null")


CONFIGURATION_HEAD = """# Configuration

Generated from the code by `docs/generate.py`; do not edit.

Settings come from `watchkeeper.toml` in the working folder (or `--config F`), then from the
environment, then from options of the command. An unknown key is an error. `watchkeeper doctor`
prints the value in force of each and where it came from.

`WATCHKEEPER_TOKEN`: for the service, a token with all scopes (none: one is made at the first start
and kept in the data folder); for a client, the token to send. `WATCHKEEPER_URL`: where a client
finds the service when there is no local one.

"""


def configuration_page() -> str:
    """Answer the text of docs/reference/configuration.md."""
    parts = [CONFIGURATION_HEAD]
    sources = Sources(environ={"HOME": "~"}, folder=Path(), file=None)
    for section in attrs.fields(Settings):
        if not (isinstance(section.type, type) and attrs.has(section.type)):
            continue
        doc = inspect.getdoc(section.type) or ""
        parts.append(f"## `[{section.name}]`\n\n{doc}\n\n")
        parts.append("| key | environment | default |\n|---|---|---|\n")
        for field in attrs.fields(section.type):
            if "default" not in field.metadata:
                continue
            name = f"WATCHKEEPER_{section.name}_{field.name}".upper()
            default = _shown(field.metadata["default"](sources))
            parts.append(f"| `{field.name}` | `{name}` | {default} |\n")
        parts.append("\n")
    return "".join(parts).rstrip() + "\n"


def _shown(value: object) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return ", ".join(f"`{one}`" for one in value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


CLI_HEAD = """# Command line

Generated from the code by `docs/generate.py`; do not edit.

Errors go to stderr in one line that says what to do. Commands that read the log take `--data DIR`
and work with the service running or stopped.

"""


def cli_page() -> str:
    """Answer the text of docs/reference/cli.md."""
    parts = [CLI_HEAD]
    context = click.Context(watchkeeper, info_name="watchkeeper")
    for name in watchkeeper.list_commands(context):
        command = watchkeeper.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context, terminal_width=90)
        parts.append(f"## `watchkeeper {name}`\n\n```text\n{command.get_help(inner)}\n```\n\n")
    return "".join(parts).rstrip() + "\n"


PAGES = {
    "events.md": events_page,
    "configuration.md": configuration_page,
    "cli.md": cli_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / "reference" / name).write_text(page())
