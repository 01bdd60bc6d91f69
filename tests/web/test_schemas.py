"""The border: any bytes are refused or become a request, and nothing else ever happens."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from web.errors import Problem, problem_body
from web.schemas import NESTING_MAX, canonical, check_json, nesting, parse_execute
from web.text import one_line
from web.views import parse_timestamp, timestamp

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "prompt",
        "agent",
        "model",
        "timeout_seconds",
        "max_budget_usd",
        "metadata",
        "labels",
        "workspace",
        "priority",
        "max_attempts",
        "webhook",
        "session_id",
    ]
)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused_as_a_problem(body: bytes) -> None:
    """No other error leaves the parser."""
    with pytest.raises(Problem) as caught:
        parse_execute(body)

    assert caught.value.status == 400


@given(st.dictionaries(FIELDS, VALUES, max_size=4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_object_is_a_request_or_a_bounded_problem(
    fields: dict[str, object], ascii_only: bool
) -> None:
    """422 or 400 with a field, below 4 KiB; else a request that has a canonical form."""
    whole = {"prompt": "x", "agent": "echo"} | fields
    body = json.dumps(whole, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")

    problem: Problem | None = None
    try:
        request = parse_execute(body)
    except Problem as found:
        problem = found

    if problem is not None:
        assert problem.status in {400, 422}
        assert len(problem_body(problem)) < 4096
    else:
        json.loads(canonical(request))
        request.prompt.encode()


@given(
    st.lists(
        st.sampled_from(["\\ud83d", "\\ude00", "\\\\", "a", "\\n", "\\u0041", "\\uD8aF", '\\"']),
        max_size=8,
    )
)
@settings(max_examples=500, deadline=None)
def test_halves_of_surrogate_pairs_are_found(parts: list[str]) -> None:
    """Refused exactly when the text can not be UTF-8."""
    body = '{"a": "' + "".join(parts) + '"}'
    try:
        json.loads(body)["a"].encode()
        whole = True
    except UnicodeEncodeError:
        whole = False

    try:
        check_json(body.encode())
        accepted = True
    except Problem:
        accepted = False

    assert accepted == whole


@pytest.mark.parametrize("depth", [NESTING_MAX - 1, NESTING_MAX, NESTING_MAX + 1])
def test_the_nesting_limit_is_exact(depth: int) -> None:
    """One below, at it, one above; brackets in strings do not count."""
    inner = b'{"a":' * (depth - 1) + b"1" + b"}" * (depth - 1)
    body = b'{"prompt": "' + b"[" * 500 + b'\\"", "agent": "echo", "metadata": ' + inner + b"}"

    if depth <= NESTING_MAX:
        assert parse_execute(body).agent == "echo"
    else:
        with pytest.raises(Problem, match="nested"):
            parse_execute(body)


def test_nesting_ignores_what_is_in_strings() -> None:
    """Also after escapes."""
    assert nesting(b'["' + b"[" * 200 + rb'\"[\\"]') == 1


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"priority": 0}, True),
        ({"metadata": None}, True),
        ({"priority": 1}, False),
        ({"metadata": {}}, False),
    ],
)
def test_equal_requests_have_one_canonical_form(changes: dict[str, object], same: bool) -> None:
    """However they are spaced or ordered; a default that is said is a default."""
    one = {"prompt": "x", "agent": "echo"}
    other = {**changes, "agent": "echo", "prompt": "x"}

    equal = canonical(parse_execute(json.dumps(one).encode())) == canonical(
        parse_execute(json.dumps(other, indent=2).encode())
    )

    assert equal == same


@given(st.integers(min_value=0, max_value=4_102_444_800_000))
@settings(deadline=None)
def test_times_survive_their_text(milliseconds: int) -> None:
    """RFC 3339 with milliseconds, there and back."""
    at_ns = milliseconds * 1_000_000

    text = timestamp(at_ns)

    assert text is not None
    assert parse_timestamp(text) == at_ns


@given(st.text(st.characters(), max_size=300))
@settings(deadline=None)
def test_a_detail_is_one_line_of_utf8(text: str) -> None:
    """Whatever went into it."""
    line = one_line(text, 50)

    assert len(line) <= 50
    assert line.isprintable()
    assert json.loads(problem_body(Problem(400, "x", text)))["status"] == 400
