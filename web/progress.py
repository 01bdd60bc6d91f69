"""A job's events as lines for people, live or from the log."""

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO

from web.text import one_line

# Any: an event as :func:`web.views.event_view` shows it.
Json = Mapping[str, Any]

TRANSIENT: Final = frozenset({"output.recorded", "agent.turn_finished", "agent.tool_called"})
"""On a terminal each of these replaces the one before."""
TEXT_CHARACTERS: Final = 100
_COLOURS: Final = {
    "job.completed": "32",
    "job.failed": "31",
    "job.errored": "31",
    "job.timed_out": "33",
    "job.cancelled": "33",
}


class Progress:
    """Writes a timeline; on a terminal with colours, and a status line that is rewritten."""

    def __init__(self, out: TextIO, *, prefix: Callable[[Json], str] = lambda _event: "") -> None:
        self._out = out
        self._terminal = out.isatty()
        self._prefix = prefix
        self._started: dict[str, float] = {}
        self._transient = False

    def show(self, event: Json) -> None:
        """Write what is worth a line."""
        at = dt.datetime.fromisoformat(event["recorded_at"]).timestamp()
        begun = self._started.setdefault(event["stream"], at)
        text = describe(event)
        if text is None:
            return
        line = f"{at - begun:7.2f}s  {self._prefix(event)}{text}"
        if not self._terminal:
            print(line, file=self._out, flush=True)
            return
        transient = event["type"] in TRANSIENT
        colour = _COLOURS.get(event["type"], "2" if transient else "")
        shown = f"\x1b[{colour}m{line}\x1b[0m" if colour else line
        wipe = "\r\x1b[K" if self._transient else ""
        print(f"{wipe}{shown}", file=self._out, end="" if transient else "\n", flush=True)
        self._transient = transient

    def say(self, text: str) -> None:
        """Write a line of our own, in its place."""
        self.finish()
        print(text, file=self._out, flush=True)

    def finish(self) -> None:
        """Wipe the status line."""
        if self._transient:
            print("\r\x1b[K", file=self._out, end="", flush=True)
            self._transient = False


def describe(event: Json) -> str | None:
    """Answer what an event says on one line; None for those that people need not see."""
    describer = _DESCRIBERS.get(event["type"])
    return None if describer is None else describer(event["data"], event)


def _text(event: Json, name: str, characters_max: int = TEXT_CHARACTERS) -> str:
    found = event.get("texts", {}).get(name)
    if found is None:
        return ""
    return "(erased)" if found.get("erased") else one_line(found["text"], characters_max)


def _last_line(event: Json) -> str | None:
    found = event.get("texts", {}).get("tail", {}).get("text", "")
    lines = [line for line in found.splitlines() if line.strip()]
    return f"output     {one_line(lines[-1], TEXT_CHARACTERS)}" if lines else None


def _submitted(data: Json, event: Json) -> str:
    job = event["stream"].removeprefix("job/")
    return f"queued     {job}  {data['agent']}: {_text(event, 'prompt', 60)}"


def _workspace(data: Json, _event: Json) -> str:
    if data["kind"] == "scratch":
        return "workspace  empty folder"
    base = (data.get("base_commit") or "no commit")[:10]
    stale = f"  (stale: {data.get('stale_why')})" if data.get("stale") else ""
    return f"workspace  {data.get('repo')} at {base}{stale}"


def _ended(data: Json, _event: Json) -> str:
    status = data.get("exit", {})
    how = f"exit {status.get('code')}"
    if status.get("code") is None:
        how = f"signal {status.get('signal')}" if status.get("signal") else "no exit status"
    cause = data.get("cause")
    return f"ended      {how}" + (f", {cause}" if cause else "")


def _reaped(data: Json, _event: Json) -> str | None:
    seen = data.get("seen", 0)
    left = data.get("left", 0)
    if not seen and not left:
        return None
    took = f"{data.get('duration_ms', 0)} ms"
    return f"reaped     {seen} {_plural(seen, 'process', 'processes')}, {left} left, {took}"


def _tool(data: Json, event: Json) -> str:
    took = f" {data['duration_ms']} ms" if data.get("duration_ms") is not None else ""
    outcome = data.get("outcome", "ok")
    return f"tool       {data['name']} {outcome}{took} {_text(event, 'arguments')}".rstrip()


def _terminal(data: Json, event: Json) -> str:
    status = event["type"].removeprefix("job.")
    parts = [data.get("cause"), data.get("detail"), _text(event, "error")]
    left = data.get("left", 0)
    parts.append(f"{left} processes left" if left else None)
    seen = dict.fromkeys(part for part in parts if part and part != status)
    why = ", ".join(seen)
    return f"{status}" + (f": {why}" if why else "")


def _stored(data: Json, _event: Json) -> str | None:
    # Output, list and archive are always stored; what was changed is worth a line.
    if data["name"] not in {"diff", "bundle"}:
        return None
    return f"stored     {data['name']}, {_size(data['size'])}" if data["size"] else None


def _plural(number: int, one: str, more: str) -> str:
    return one if number == 1 else more


def _size(size: int) -> str:
    if size < 1024:
        return f"{size} B"
    return f"{size / 1024:.1f} KiB" if size < 1024 * 1024 else f"{size / 1024 / 1024:.1f} MiB"


_DESCRIBERS: Final[dict[str, Callable[[Json, Json], str | None]]] = {
    "job.submitted": _submitted,
    "job.cancel_requested": lambda _data, event: f"cancel     asked by {event['by']}",
    "job.started": lambda data, event: (
        f"started    run {event['epoch']}, held by {data['containment']}"
    ),
    "workspace.prepared": _workspace,
    "agent.started": lambda data, _event: f"agent      {data['backend']} runs",
    "agent.turn_finished": lambda data, event: (
        f"turn {data['turn']:<5} {_text(event, 'text')}".rstrip()
    ),
    "agent.tool_called": _tool,
    "agent.messaged": lambda _data, event: f"message    {_text(event, 'text')}",
    "output.recorded": lambda _data, event: _last_line(event),
    "agent.ended": _ended,
    "process.reaped": _reaped,
    "artifact.stored": _stored,
    "run.interrupted": lambda data, _event: f"interrupted  {data['why']}",
    "job.requeued": lambda data, _event: f"requeued   {data['why']}",
    "job.completed": _terminal,
    "job.failed": _terminal,
    "job.timed_out": _terminal,
    "job.errored": _terminal,
    "job.cancelled": _terminal,
    "slot.released": lambda _data, _event: "slot released",
    "service.started": lambda data, _event: f"service started, version {data['version']}",
    "service.ready": lambda data, _event: f"service ready, {data['recovered']} recovered",
    "service.draining": lambda _data, _event: "service draining",
    "service.stopped": lambda _data, _event: "service stopped",
}
