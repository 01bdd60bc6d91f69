"""Requests and replies at the border: bytes become values that are right by their type."""

import re
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from web.errors import Problem, bad_field
from web.text import one_line

PROMPT_BYTES_MAX: Final = 8 * 1024 * 1024
METADATA_BYTES_MAX: Final = 64 * 1024
MESSAGE_BYTES_MAX: Final = 1024 * 1024
BODY_BYTES_MAX: Final = 25 * 1024 * 1024
"""An 8 MiB prompt with every character escaped still fits."""
NESTING_MAX: Final = 100
BUDGET_USD_MAX: Final = 1_000_000
LABELS_MAX: Final = 32

_Name = Annotated[str, Meta(min_length=1, max_length=200)]
_LabelKey = Annotated[str, Meta(min_length=1, max_length=64)]
_LabelValue = Annotated[str, Meta(max_length=256)]
_Reference = Annotated[str, Meta(min_length=1, max_length=4096)]
_Timeout = Annotated[float, Meta(ge=1, le=86_400)]
_Budget = Annotated[float, Meta(gt=0, le=BUDGET_USD_MAX)]

_T = TypeVar("_T")
_STRING_OR_BRACKET: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
_STRING_OR_SPACE: Final = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")|[ \t\r\n]++', re.DOTALL)
_STRING_OR_NUMBER: Final = re.compile(
    rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")|-?[0-9][0-9.eE+-]*+', re.DOTALL
)
_AT_PATH: Final = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING: Final = re.compile(r"missing required field `(?P<field>[^`]*)`")
_LONE_SURROGATE: Final = re.compile(
    r"(?<!\\)(?:\\\\)*(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)


class WorkspaceBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ``workspace`` of a request; what is left out, the configuration decides."""

    repo: _Reference | None = None
    ref: _Reference | None = None
    kind: Literal["clone", "scratch"] | None = None


class ExecuteBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of ``POST /execute``; ``metadata`` is empty when there is none."""

    prompt: str
    agent: _Name
    model: _Name | None = None
    max_budget_usd: _Budget = 5.0
    timeout_seconds: _Timeout = 2_700
    metadata: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    workspace: WorkspaceBody | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    max_attempts: Annotated[int, Meta(ge=1, le=10)] = 1
    session_id: _Name | None = None
    webhook: Annotated[str, Meta(max_length=2_048)] | None = None
    labels: dict[_LabelKey, _LabelValue] | None = None


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /jobs/{id}/messages``."""

    text: str


def parse_execute(body: bytes) -> ExecuteBody:
    """Answer the job that a body asks for; raises Problem 400 or 422 with the field's name."""
    request = parse_object(body, ExecuteBody)
    metadata = msgspec.Raw(_metadata(bytes(request.metadata)))
    request = msgspec.structs.replace(request, metadata=metadata)
    _refuse_nul(request)
    if len(request.prompt.encode()) > PROMPT_BYTES_MAX:
        raise bad_field("prompt", f"must be at most {PROMPT_BYTES_MAX} bytes of UTF-8")
    if request.labels is not None and len(request.labels) > LABELS_MAX:
        raise bad_field("labels", f"must be at most {LABELS_MAX}")
    if request.webhook is not None and not request.webhook.startswith(("http://", "https://")):
        raise bad_field("webhook", "must be an http or https URL")
    return request


def parse_message(body: bytes) -> str:
    """Answer the text of a message; raises Problem."""
    text = parse_object(body, MessageBody).text
    if "\x00" in text:
        raise bad_field("text", "must not hold a NUL character", status=400)
    if not text:
        raise bad_field("text", "must not be empty")
    if len(text.encode()) > MESSAGE_BYTES_MAX:
        raise bad_field("text", f"must be at most {MESSAGE_BYTES_MAX} bytes of UTF-8")
    return text


def canonical(request: ExecuteBody) -> bytes:
    """Answer the bytes that two equal requests share, however they were spaced or ordered."""
    metadata = _STRING_OR_SPACE.sub(_kept, bytes(request.metadata)) or b"null"
    whole = msgspec.structs.replace(request, metadata=msgspec.Raw(metadata))
    return msgspec.json.encode(whole, order="deterministic")


def parse_object(body: bytes, type_: type[_T]) -> _T:
    """Answer a body as a value of this type; raises Problem 400 (JSON) or 422 (a field)."""
    check_json(body)
    try:
        msgspec.json.decode(body, type=msgspec.Raw)  # All of it is JSON before a field is judged.
        return msgspec.json.decode(body, type=type_)
    except msgspec.ValidationError as error:
        raise _field_problem(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(str(error)) from error
    except RecursionError as error:
        raise _too_deep() from error


def check_json(body: bytes) -> None:
    """Raise Problem 400 for what is no JSON object in UTF-8, or is nested too deeply."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_json(f"byte {error.start} is not UTF-8") from error
    if body[:1] == b"\xef":
        raise _not_json("it begins with a byte order mark")
    if nesting(body) > NESTING_MAX:
        raise _too_deep()
    if "\\u" in text and _LONE_SURROGATE.search(text):
        raise _not_json("it holds half of a surrogate pair")
    if not text.lstrip(" \t\r\n").startswith("{"):
        raise Problem(400, "not_an_object", "the body must be a JSON object")


def nesting(body: bytes) -> int:
    """Answer how deep brackets are nested; strings do not count."""
    if body.count(b"[") + body.count(b"{") <= NESTING_MAX:
        return 0
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(body):
        first = match.group()[0]
        if first in b"[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > NESTING_MAX:
                break
        elif first in b"]}":
            depth -= 1
    return deepest


def _metadata(text: bytes) -> bytes:
    text = text.strip()
    if text in {b"", b"null"}:
        return b""
    if not text.startswith(b"{"):
        raise bad_field("metadata", "must be an object")
    if len(text) > METADATA_BYTES_MAX:
        raise bad_field("metadata", f"must be at most {METADATA_BYTES_MAX} bytes of JSON")
    if rb"\u0000" in text and _has_nul(msgspec.json.decode(_without_numbers(text))):
        raise bad_field("metadata", "must not hold a NUL character", status=400)
    return text


def _without_numbers(text: bytes) -> bytes:
    # Numbers may be of any length: metadata is kept as text, so they are never converted.
    return _STRING_OR_NUMBER.sub(lambda match: match.group(1) or b"0", text)


def _kept(match: re.Match[bytes]) -> bytes:
    return match.group(1) or b""


def _has_nul(value: Any) -> bool:  # noqa: ANN401  any JSON
    if isinstance(value, str):
        return "\x00" in value
    if isinstance(value, list):
        return any(_has_nul(item) for item in value)
    if isinstance(value, dict):
        return any("\x00" in key or _has_nul(item) for key, item in value.items())
    return False


def _refuse_nul(request: ExecuteBody) -> None:
    workspace = request.workspace or WorkspaceBody()
    labels = request.labels or {}
    texts = {
        "prompt": request.prompt,
        "agent": request.agent,
        "model": request.model or "",
        "session_id": request.session_id or "",
        "webhook": request.webhook or "",
        "workspace.repo": workspace.repo or "",
        "workspace.ref": workspace.ref or "",
        "labels": "".join((*labels, *labels.values())),
    }
    for field, text in texts.items():
        if "\x00" in text:
            raise bad_field(field, "must not hold a NUL character", status=400)


def _field_problem(message: str) -> Problem:
    path = _AT_PATH.search(message)
    missing = _MISSING.search(message)
    reason = message[: path.start()] if path else message
    names = [n for n in (path and path["path"], missing and missing["field"]) if n]
    field = one_line(".".join(names).replace("[...]", ""), 100) or "body"
    return bad_field(field, one_line(reason[:1].lower() + reason[1:], 300))


def _not_json(reason: str) -> Problem:
    return Problem(400, "not_json", f"the body is not JSON: {one_line(reason, 200)}")


def _too_deep() -> Problem:
    return Problem(400, "too_deep", f"the body is nested deeper than {NESTING_MAX} levels")
