"""Any program as an agent: an argument template, and optionally JSON Lines on stdout.

Placeholders in the arguments: ``{prompt_file}``, ``{model}`` (empty when none was asked for) and
``{workspace}``. With ``line_format`` ``jsonl`` each line of stdout that is an object with a known
``type`` is a fact; every other line, also a broken one, is plain output.
"""

import json
from pathlib import Path
from typing import Final, Literal, assert_never

import msgspec

from actors.backends.backend import PROMPT_FILE, BackendFact, Launch, Verdict, judge_exit
from actors.host import RunSpec
from storage import events as e

ARGUMENTS_BYTES_MAX: Final = 4_096
_NUMBER_MAX: Final = 10**15
_MICROS: Final = 1_000_000
_PLACEHOLDER: Final = "{prompt_file}"


class ProgressLine(msgspec.Struct, tag="progress"):
    """The agent finished a turn, or says how far it is."""

    text: str = ""


class UsageLine(msgspec.Struct, tag="usage"):
    """Tokens and cost since the last such line; ``cost_usd`` in dollars."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    model: str | None = None


class ToolLine(msgspec.Struct, tag="tool"):
    """A tool call of the agent has ended."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"null")
    outcome: Literal["ok", "failed", "denied"] = "ok"
    duration_ms: int | None = None


class SessionLine(msgspec.Struct, tag="session"):
    """The agent's own name of its session."""

    session: str


class ResultLine(msgspec.Struct, tag="result"):
    """The agent's answer; the last one counts."""

    result: str = ""
    is_error: bool = False
    errors: list[str] = []


_decoder = msgspec.json.Decoder(ProgressLine | UsageLine | ToolLine | SessionLine | ResultLine)


class CommandBackend:
    """Runs the command of an agent definition."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._turns = 0
        self._result: ResultLine | None = None

    @property
    def reads_lines(self) -> bool:
        """Whether lines are told: only when the definition says that they are JSON."""
        return self._spec.line_format == "jsonl"

    def launch(self, *, home: Path, tree: Path) -> Launch:
        """Answer the filled-in command."""
        values = {
            "{prompt_file}": str(home / PROMPT_FILE),
            "{model}": self._spec.model or "",
            "{workspace}": str(tree),
        }
        by_file = self._spec.prompt_by == "file" or any(
            _PLACEHOLDER in word for word in self._spec.argv
        )
        return Launch(
            argv=tuple(_fill(word, values) for word in self._spec.argv),
            stdin=None if by_file else self._spec.prompt.encode(),
            prompt_file=by_file,
        )

    def line(self, line: bytes) -> list[BackendFact]:
        """Answer the fact of a line; a result is kept for the verdict."""
        try:
            told = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return []
        match told:
            case ProgressLine():
                return [self._progress(told)]
            case UsageLine():
                return [_usage(told)]
            case ToolLine():
                return [_tool(told)]
            case SessionLine():
                return self._session(told)
            case ResultLine():
                self._result = told
                return []
            case _:
                assert_never(told)

    def verdict(self, exit_status: e.ExitStatus, stdout: bytes, stderr: bytes) -> Verdict:
        """Judge by exit code and, where lines are JSON, by the result that was told."""
        if not self.reads_lines:
            return judge_exit(exit_status, result=stdout, stderr=stderr)
        if self._result is not None and self._result.is_error:
            said = "\n".join(self._result.errors) or self._result.result
            return Verdict(
                cause="agent_reported_error",
                detail=_exit_detail(exit_status),
                error=(said or "the agent reported an error without a text").encode(),
                result=self._result.result.encode() or None,
            )
        result = self._result.result.encode() if self._result is not None else None
        verdict = judge_exit(exit_status, result=result, stderr=stderr)
        if verdict.cause is None and self._result is None:
            return Verdict(
                cause="no_result",
                detail=_exit_detail(exit_status),
                error=b"the agent ended without a line of type result",
            )
        return verdict

    def _progress(self, told: ProgressLine) -> BackendFact:
        self._turns += 1
        text = told.text.encode()
        return BackendFact(
            event=e.AgentTurnFinished(turn=self._turns, text=_placeholder(text)),
            texts=(("text", text),) if text else (),
        )

    def _session(self, told: SessionLine) -> list[BackendFact]:
        if self._spec.session_id is None:
            return []
        event = e.SessionBound(session_id=self._spec.session_id, agent_session=told.session)
        return [BackendFact(event=event)]


def _fill(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _usage(told: UsageLine) -> BackendFact:
    return BackendFact(
        event=e.UsageRecorded(
            input_tokens=_bounded(told.input_tokens),
            output_tokens=_bounded(told.output_tokens),
            cost_microusd=_bounded(told.cost_usd * _MICROS),
            source="reported",
            model=told.model,
        )
    )


def _bounded(number: float) -> int:
    # An agent may write any number; sums of these must stay integers that a database can hold.
    return round(min(max(number, 0), _NUMBER_MAX))


def _tool(told: ToolLine) -> BackendFact:
    # Compact and cut: what an agent passes to a tool may be a whole file.
    value = json.dumps(msgspec.json.decode(told.arguments), ensure_ascii=False)
    text = value.encode("utf-8", "replace")[:ARGUMENTS_BYTES_MAX] if value != "null" else b""
    return BackendFact(
        event=e.AgentToolCalled(
            name=told.name,
            arguments=_placeholder(text),
            outcome=told.outcome,
            duration_ms=told.duration_ms,
        ),
        texts=(("arguments", text),) if text else (),
    )


def _placeholder(text: bytes) -> e.PayloadRef | None:
    return e.PayloadRef(digest="", size=len(text)) if text else None


def _exit_detail(exit_status: e.ExitStatus) -> str:
    if exit_status.signal is not None:
        return f"signal {exit_status.signal}"
    return f"exit code {exit_status.code}"
