"""Bodies: every event class survives, and what is stored is what was hashed."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.codec import (
    EVENT_SCHEMA,
    Envelope,
    decode_envelope,
    decode_event,
    encode_body,
    encode_data,
    leaf_hash,
    payload,
    recorded,
    salted_digest,
)
from storage.errors import EventUnreadable
from storage.events import Event, JobEnding, event_type
from storage.testing import EVENT_CLASSES, example_event, submitted


def envelope(event, **fields):
    given_fields = {
        "seq": 1,
        "stream": "job/x",
        "version": 1,
        "type": event_type(event),
        "schema": EVENT_SCHEMA,
        "recorded_at_ns": 5,
        "session": "s",
        "by": "service",
        "request_id": None,
        "caused_by": None,
        "epoch": 0,
        "n": None,
        "prev_leaf": None,
        "data": encode_data(event),
    }
    return Envelope(**(given_fields | fields))


def classes_below(parent):
    for child in parent.__subclasses__():
        yield child
        yield from classes_below(child)


def test_every_event_class_is_in_the_union_that_is_generated():
    """A class that is left out of the union could be neither written nor read."""
    assert set(classes_below(Event)) - {JobEnding} == set(EVENT_CLASSES)


@pytest.mark.parametrize("cls", EVENT_CLASSES)
@settings(max_examples=15, deadline=None)
@given(chance=st.randoms(use_true_random=False))
def test_an_event_comes_back_equal(cls, chance):
    """Whatever its fields hold: body, event and leaf agree after a round trip."""
    event = example_event(cls, chance)
    body = encode_body(envelope(event))

    record = recorded(body, leaf_hash(body), 1)

    assert record.event == event
    assert type(record.event) is cls
    assert record.leaf == leaf_hash(body).hex()
    assert json.loads(body)["data"]["type"] == event_type(event)


def test_the_fields_of_a_body_have_a_fixed_order():
    """An auditor's program finds the envelope first, null written out, then the data."""
    body = encode_body(envelope(submitted()))

    assert list(json.loads(body)) == list(Envelope.__struct_fields__)
    assert b'"prev_leaf":null,"data":{"type":"job.submitted"' in body


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff", b"[" * 100_000, b'{"seq":"x"}'])
def test_a_body_that_is_none_is_unreadable(body):
    """Broken JSON, bytes that are no text and missing fields name the seq."""
    with pytest.raises(EventUnreadable) as caught:
        recorded(body, b"", 7)

    assert caught.value.seq == 7


def test_a_type_that_contradicts_its_data_is_unreadable():
    """The envelope's type and the tag inside must agree."""
    lying = envelope(submitted(), type="job.started")

    with pytest.raises(EventUnreadable, match=r"job\.started"):
        decode_event(decode_envelope(1, encode_body(lying)))


def test_an_old_body_is_lifted_to_todays_schema(monkeypatch):
    """An upcaster for (type, schema) sees the old data and answers today's."""
    monkeypatch.setitem(
        __import__("storage.codec").codec.UPCASTERS,
        ("job.requeued", 0),
        lambda data: {"type": data["type"], "why": data["reason"]},
    )
    old = msgspec.Raw(b'{"type":"job.requeued","reason":"restart"}')
    body = encode_body(envelope(submitted(), type="job.requeued", schema=0, data=old))

    assert recorded(body, b"", 1).event.why == "restart"


def test_a_payloads_digest_needs_its_salt():
    """Equal bytes with other salts have other digests."""
    one, two = payload(b"yes", b"1"), payload(b"yes", b"2")

    assert one.digest == salted_digest(b"1", b"yes") != two.digest
    assert one.ref.size == 3
