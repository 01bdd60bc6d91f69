"""Refusals on their way to the client: one envelope, ``application/problem+json``."""

from http import HTTPStatus
from typing import Final

import msgspec

from actors import errors as refused
from storage import errors as stored
from web.text import one_line

PROBLEM_TYPE: Final = "application/problem+json"
DETAIL_CHARACTERS_MAX: Final = 1_000
CODE_OF_STATUS: Final = {
    400: "bad_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    411: "length_required",
    413: "body_too_large",
    415: "unsupported_media_type",
    429: "queue_full",
    431: "headers_too_large",
    500: "internal",
    501: "not_implemented",
    503: "unavailable",
    505: "http_version_not_supported",
}


class Problem(Exception):
    """A refusal with a stable ``code``; ``field`` names the part of the request at fault.

    ``detail`` is one line for people and may change. ``headers`` are added to the reply.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        field: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.field = field
        self.headers = headers


def problem_body(problem: Problem) -> bytes:
    """Answer the JSON of a problem: bounded, one line of detail, always valid UTF-8."""
    body = {
        "type": f"urn:watchkeeper:problem:{problem.code}",
        "title": title_of(problem.status),
        "status": problem.status,
        "detail": one_line(problem.detail, DETAIL_CHARACTERS_MAX),
        "code": problem.code,
    }
    if problem.field is not None:
        body["field"] = one_line(problem.field, 100)
    return msgspec.json.encode(body)


def title_of(status: int) -> str:
    """Answer the phrase of a status, for example ``Not Found``."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def of_status(status: int, detail: str | None = None) -> Problem:
    """Answer the problem of a plain HTTP status."""
    code = CODE_OF_STATUS.get(status, f"http_{status}")
    return Problem(status, code, detail or title_of(status))


def not_found(detail: str, code: str = "not_found") -> Problem:
    """Answer a 404."""
    return Problem(404, code, detail)


def bad_parameter(name: str, detail: str) -> Problem:
    """Answer a 400 for a query parameter or a header."""
    return Problem(400, "bad_parameter", f"{name}: {detail}", field=name)


def bad_field(name: str, detail: str, *, status: int = 422) -> Problem:
    """Answer the refusal of a field of the body."""
    return Problem(status, "bad_field", f"{name}: {detail}", field=name)


def from_error(error: refused.ActorsError | stored.StorageError) -> Problem:
    """Answer the reply for an expected error of the rooms below."""
    if isinstance(error, refused.ActorsError):
        return _from_runtime(error)
    text = str(error)
    match error:
        case stored.JobUnknown():
            return not_found(text, "unknown_job")
        case stored.PointNotInLog():
            return Problem(400, "past_the_head", text, field="at_seq")
        case stored.ArtifactUnavailable():
            return Problem(410, "artifact_unavailable", text)
        case stored.DiskFull():
            return _paused("disk_full", text, 30)
        case stored.LogBusy():
            return _paused("busy", text, 1)
        case stored.LogClosed():
            return _paused("closed", text, 5)
        case stored.LogReadOnly():
            return _paused("read_only", text, 60)
        case _:
            return Problem(500, "internal", "the log could not be used; see the service's log")


def _from_runtime(error: refused.ActorsError) -> Problem:
    text = str(error)
    match error:
        case refused.QueueFull():
            return _paused(error.code, text, error.retry_after_s, status=429)
        case refused.AdmissionPaused():
            return _paused(error.code, text, error.retry_after_s)
        case refused.UnknownAgent():
            return Problem(422, error.code, f"agent: {text}", field="agent")
        case refused.UnknownModel():
            return Problem(422, error.code, f"model: {text}", field="model")
        case refused.AgentNotAllowed():
            return Problem(403, error.code, f"agent: {text}", field="agent")
        case refused.KeyReused():
            return Problem(409, error.code, text, field="Idempotency-Key")
        case refused.NotRunning():
            return Problem(409, error.code, text)
        case _:
            return Problem(500, "internal", "the runtime could not answer; see its log")


def _paused(code: str, text: str, retry_after_s: int, *, status: int = 503) -> Problem:
    return Problem(status, code, text, headers=(("Retry-After", str(max(1, retry_after_s))),))
