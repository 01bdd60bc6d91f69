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

from storage import events as e  # noqa: E402  the checkout is put on the path first
from storage.job_state import LEGAL_IN  # noqa: E402

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
    for title, union in (("Events of a job", e.JobEvent), ("Events of the service", e.ServiceEvent)):
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


if __name__ == "__main__":
    (DOCS / "reference" / "events.md").write_text(events_page())
