"""The vocabulary is closed, every event survives the log, and the fold knows no outside."""

import ast
import inspect
import typing

import msgspec
import pytest

from storage import codec, events, job_state, projections
from storage import events as e
from storage.codec import EVENT_SCHEMA, Envelope, decode_event, encode_body, encode_data, leaf_hash
from storage.errors import EventUnreadable

ALL_EVENTS = typing.get_args(e.AnyEvent)
JOB_EVENTS = typing.get_args(e.JobEvent)
SERVICE_EVENTS = typing.get_args(e.ServiceEvent)
CAUSES = typing.get_args(e.Cause)
IMPURE = {"trio", "sqlite3", "sqlite_utils", "os", "time", "random", "secrets", "datetime"}


def envelope(event, **changes):
    fields = {
        "seq": 1,
        "stream": "job/job_0",
        "version": 1,
        "type": e.event_type(event),
        "schema": EVENT_SCHEMA,
        "recorded_at_ns": 7,
        "session": "ses_0",
        "by": "alice",
        "request_id": None,
        "caused_by": None,
        "epoch": 0,
        "n": None,
        "prev_leaf": None,
        "data": encode_data(event),
    }
    return Envelope(**{**fields, **changes})


def defined_events():
    found = []
    for _, cls in inspect.getmembers(events, inspect.isclass):
        abstract = cls in (e.Event, e.JobEnding)
        if issubclass(cls, e.Event) and not abstract:
            found.append(cls)
    return found


def test_the_union_holds_every_event_class_once():
    """No event class is left out of the union, and none is in it twice."""
    assert sorted(c.__name__ for c in defined_events()) == sorted(c.__name__ for c in ALL_EVENTS)
    assert len({c.__struct_config__.tag for c in ALL_EVENTS}) == len(ALL_EVENTS)


def test_every_event_is_of_a_job_or_of_the_service():
    """The table of legal phases names all events of a job and none of the service."""
    assert set(job_state.LEGAL_IN) == set(JOB_EVENTS)
    assert not set(JOB_EVENTS) & set(SERVICE_EVENTS)
    assert set(JOB_EVENTS) | set(SERVICE_EVENTS) == set(ALL_EVENTS)


def test_event_names_are_dotted_and_lower_case():
    """A name is ``noun.past_participle``."""
    for cls in ALL_EVENTS:
        noun, _, verb = cls.__struct_config__.tag.partition(".")
        assert noun.isalpha()
        assert noun.islower()
        assert verb.replace("_", "").isalpha()
        assert verb.islower()


def test_events_are_frozen_and_take_no_positional_argument():
    """Every class says for itself what msgspec does not inherit."""
    for cls in ALL_EVENTS:
        assert cls.__struct_config__.frozen, cls
        assert not inspect.signature(cls).parameters or all(
            p.kind is inspect.Parameter.KEYWORD_ONLY
            for p in inspect.signature(cls).parameters.values()
        ), cls


def test_each_cause_has_the_status_of_the_core_page():
    """The table of spec/core.md, written out."""
    assert dict(e.STATUS_OF_CAUSE) == {
        "agent_exit": "failed",
        "no_result": "failed",
        "agent_reported_error": "failed",
        "budget_exceeded": "failed",
        "output_limit": "failed",
        "timed_out": "timeout",
        "cancelled": "cancelled",
        "workspace_failed": "error",
        "unlock_failed": "error",
        "lfs_missing": "error",
        "disk_full": "error",
        "spawn_failed": "error",
        "interrupted": "error",
        "outcome_unknown": "error",
        "internal": "error",
    }
    assert set(e.STATUS_OF_CAUSE) == set(CAUSES)


@pytest.mark.parametrize("cause", [None, *CAUSES])
def test_an_ending_is_the_terminal_event_of_its_cause(cause):
    """The class of the event, the cause in it and the status agree, and nothing is dropped."""
    ref = e.PayloadRef(digest="00", size=1)

    event = e.ending(cause, detail="why", error=ref, left=2, artifacts="incomplete")

    by_status = {
        "completed": e.JobCompleted,
        "failed": e.JobFailed,
        "timeout": e.JobTimedOut,
        "error": e.JobErrored,
        "cancelled": e.JobCancelled,
    }
    assert type(event) is by_status[job_state.status_of(cause)]
    assert getattr(event, "cause", None) == cause
    assert (event.detail, event.error, event.left) == ("why", ref, 2)
    assert event.artifacts == "incomplete"


def test_defaults_are_left_out_of_the_body():
    """A field at its default costs no byte, so a new field leaves old bodies valid."""
    assert bytes(encode_data(e.JobCompleted())) == b'{"type":"job.completed"}'


def test_a_field_this_version_does_not_know_is_ignored():
    """A body with one more field is still read."""
    data = msgspec.Raw(b'{"type":"job.requeued","why":"x","later":1}')

    event = decode_event(envelope(e.JobRequeued(why="x"), data=data))

    assert event == e.JobRequeued(why="x")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"type":"job.nonsense"}', "job.nonsense"),
        (b'{"type":"job.requeued"}', "why"),
        (b'{"type":"job.completed"}', "its type is job.requeued"),
        (b"[]", "object"),
    ],
)
def test_data_that_is_not_its_type_is_unreadable(data, words):
    """The error names the seq and what is wrong."""
    with pytest.raises(EventUnreadable, match=words) as caught:
        decode_event(envelope(e.JobRequeued(why="x"), seq=9, data=msgspec.Raw(data)))
    assert caught.value.seq == 9


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff", b"null", b"[" * 100_000])
def test_a_body_that_is_no_envelope_is_unreadable(body):
    """Whatever the bytes, the answer is EventUnreadable."""
    with pytest.raises(EventUnreadable):
        codec.recorded(body, b"", 3)


def test_an_event_comes_back_from_its_body_as_it_was():
    """Envelope and event survive the bytes; the leaf is SHA-256 over 0x00 and the body."""
    event = e.JobRequeued(why='quotes " and \\ and é')
    body = encode_body(envelope(event, n=4, caused_by=2, request_id="req", epoch=3))

    record = codec.recorded(body, leaf_hash(body), 1)

    assert record.event == event
    assert (record.n, record.caused_by, record.request_id, record.epoch) == (4, 2, "req", 3)
    assert record.leaf == leaf_hash(body).hex()


def test_an_upcaster_lifts_an_old_body(monkeypatch):
    """An event of an older schema passes through each upcaster between, in order."""
    monkeypatch.setitem(
        codec.UPCASTERS, ("job.requeued", 0), lambda data: {**data, "why": data["reason"]}
    )
    old = msgspec.Raw(b'{"type":"job.requeued","reason":"crash"}')

    event = decode_event(envelope(e.JobRequeued(why=""), schema=0, data=old))

    assert event == e.JobRequeued(why="crash")


@pytest.mark.parametrize("module", [events, job_state, projections, codec])
def test_the_fold_reads_no_clock_and_no_disk(module):
    """The modules of the fold import nothing that knows time, chance, files or threads."""
    tree = ast.parse(inspect.getsource(module))

    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    assert not names & IMPURE
