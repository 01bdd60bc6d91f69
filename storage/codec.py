"""Bytes to events and back: the hashed body, its digests, and the upcasters for old bodies.

The body of an event is one JSON object: the envelope's fields in a fixed order, then ``data``,
the event without its tag. The bytes that were hashed are the bytes that are stored.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Final

import msgspec

from storage.errors import EventUnreadable
from storage.event_log import Payload, Recorded
from storage.events import AnyEvent, event_type
from storage.ids import Seq, StreamName

EVENT_SCHEMA: Final = 1
LEAF_PREFIX: Final = b"\x00"

# Any: JSON of an old event, before it has a type.
Upcaster = Callable[[dict[str, Any]], dict[str, Any]]
UPCASTERS: Final[dict[tuple[str, int], Upcaster]] = {}


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """The body as it is hashed and stored; null is written out, nothing is left away."""

    seq: int
    stream: str
    version: int
    type: str
    schema: int
    recorded_at_ns: int
    session: str
    by: str
    request_id: str | None
    caused_by: int | None
    epoch: int
    n: int | None
    prev_leaf: str | None
    data: msgspec.Raw


_encoder = msgspec.json.Encoder()
_event_decoder: Final[msgspec.json.Decoder[AnyEvent]] = msgspec.json.Decoder(AnyEvent)
_envelope_decoder = msgspec.json.Decoder(Envelope)


def encode_data(event: AnyEvent) -> msgspec.Raw:
    """Answer the JSON of an event; its first field is the tag, ``type``."""
    return msgspec.Raw(_encoder.encode(event))


def encode_body(envelope: Envelope) -> bytes:
    """Answer the exact bytes that are hashed and stored."""
    return _encoder.encode(envelope)


def leaf_hash(body: bytes) -> bytes:
    """Answer the leaf of the Merkle tree: SHA-256 over 0x00 and the body (RFC 6962, 2.1)."""
    return hashlib.sha256(LEAF_PREFIX + body).digest()


def decode_envelope(seq: int, body: bytes) -> Envelope:
    """Answer the envelope of a stored body; raises EventUnreadable."""
    try:
        return _envelope_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventUnreadable(seq, str(error)) from error


def decode_event(envelope: Envelope) -> AnyEvent:
    """Answer the event of an envelope, lifted to today's schema; raises EventUnreadable."""
    data: bytes | msgspec.Raw = envelope.data
    try:
        if envelope.schema != EVENT_SCHEMA:
            data = _upcast(envelope)
        event = _event_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventUnreadable(envelope.seq, str(error)) from error
    if event_type(event) != envelope.type:
        reason = f"its type is {envelope.type}, its data says {event_type(event)}"
        raise EventUnreadable(envelope.seq, reason)
    return event


def recorded(body: bytes, leaf: bytes, seq: int) -> Recorded:
    """Answer a stored row as an event; raises EventUnreadable."""
    envelope = decode_envelope(seq, body)
    return Recorded(
        seq=Seq(envelope.seq),
        stream=StreamName(envelope.stream),
        version=envelope.version,
        type=envelope.type,
        schema=envelope.schema,
        recorded_at_ns=envelope.recorded_at_ns,
        session=envelope.session,
        by=envelope.by,
        request_id=envelope.request_id,
        caused_by=envelope.caused_by,
        epoch=envelope.epoch,
        n=envelope.n,
        prev_leaf=envelope.prev_leaf,
        event=decode_event(envelope),
        leaf=leaf.hex(),
    )


def payload(data: bytes, salt: bytes) -> Payload:
    """Answer bytes made ready to be stored beside an event."""
    return Payload(digest=salted_digest(salt, data), salt=salt, data=data)


def salted_digest(salt: bytes, data: bytes) -> str:
    """Answer ``sha256(salt + data)`` in hex."""
    return hashlib.sha256(salt + data).hexdigest()


def _upcast(envelope: Envelope) -> bytes:
    # Any: JSON of an old event, before it has a type.
    data: dict[str, Any] = msgspec.json.decode(envelope.data)
    for schema in range(envelope.schema, EVENT_SCHEMA):
        upcaster = UPCASTERS.get((envelope.type, schema))
        if upcaster is not None:
            data = upcaster(data)
    return _encoder.encode(data)
