"""Assertions about the history of a job, whose failures show the history."""

import difflib
from collections.abc import Callable, Collection, Sequence
from types import EllipsisType
from typing import Final, get_args

import attrs
import msgspec

from storage import events as e
from storage.event_log import Recorded

TextOf = Callable[[e.PayloadRef], bytes | None]
_CLASSES: Final[dict[str, type[e.AnyEvent]]] = {
    str(one.__struct_config__.tag): one for one in get_args(e.AnyEvent)
}
_ENVELOPE: Final = ("epoch", "by", "n", "request_id")
_FIELDS_WIDTH: Final = 90
_TEXT_WIDTH: Final = 48
_NS: Final = 1_000_000_000


@attrs.frozen
class EventMatcher:
    """Matches an event by its type and some of its fields; made by :func:`event`."""

    type: str
    fields: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        wanted = "".join(f" {name}={value!r}" for name, value in self.fields)
        return f"{self.type}{wanted}"


Expected = str | type[e.AnyEvent] | EventMatcher | EllipsisType
"""What may stand in a history: a type's name or class, a matcher, or ``...`` for any events."""


def event(type_: str | type[e.AnyEvent], **fields: object) -> EventMatcher:
    """Answer a matcher for events of a type whose fields have these values.

    A field may be one of the event or of its envelope (``epoch``, ``by``, ``n``,
    ``request_id``). A function as a value is asked whether it likes the field's. A payload is
    compared with its bytes, or as text. Raises ValueError for a type or field that there is not.
    """
    name = _name_of(type_)
    known = (*_CLASSES[name].__struct_fields__, *_ENVELOPE)
    for field in fields:
        if field not in known:
            raise ValueError(f"{name} has no field {field!r}{_nearest(field, known)}")
    return EventMatcher(name, tuple(fields.items()))


def assert_history(
    history: Sequence[Recorded],
    expected: Sequence[Expected],
    *,
    ignoring: Collection[str] = (),
    text_of: TextOf = lambda _ref: None,
    remarks: Sequence[str] = (),
) -> None:
    """Raise AssertionError unless these are the events, in this order, and no others.

    ``...`` stands for any number of events, also none. Events of the types ``ignoring`` are left
    out first. ``text_of`` answers the bytes of a payload, None when it can not. ``remarks`` go
    below the text of a failure. Raises ValueError for a type that there is not.
    """
    left_out = {_name_of(one) for one in ignoring}
    records = [record for record in history if record.type not in left_out]
    wanted = [one if one is ... else _matcher_of(one) for one in expected]
    places = furthest = _reach({0}, wanted)
    reached_at = 0
    for number, record in enumerate(records):
        places = _step(places, wanted, record, text_of)
        if not places:
            break
        if max(places) >= max(furthest):
            furthest, reached_at = places, number + 1
    if len(wanted) not in places:
        raise AssertionError(_failure(records, wanted, reached_at, furthest, text_of, remarks))


# --- matching ------------------------------------------------------------------------------------

_Wanted = Sequence[EventMatcher | EllipsisType]


def _reach(places: set[int], wanted: _Wanted) -> set[int]:
    """Answer the places in what is wanted that can be reached without an event."""
    reached = set(places)
    for place in range(len(wanted)):
        if place in reached and wanted[place] is ...:
            reached.add(place + 1)
    return reached


def _step(places: set[int], wanted: _Wanted, record: Recorded, text_of: TextOf) -> set[int]:
    further = set()
    for place in places:
        one = wanted[place] if place < len(wanted) else None
        if one is ...:
            further.add(place)
        elif isinstance(one, EventMatcher) and not _differences(one, record, text_of):
            further.add(place + 1)
    return _reach(further, wanted)


def _differences(matcher: EventMatcher, record: Recorded, text_of: TextOf) -> list[str]:
    """Answer what keeps a record from matching; empty when it matches."""
    if matcher.type != record.type:
        return [f"the type is {record.type}"]
    found = []
    for name, wanted in matcher.fields:
        value = getattr(record if name in _ENVELOPE else record.event, name)
        if isinstance(value, e.PayloadRef) and not isinstance(wanted, e.PayloadRef):
            value = _readable(value, wanted, text_of)
        good = wanted(value) if callable(wanted) else value == wanted
        if not good:
            found.append(f"{name} is {_cut(repr(value))}")
    return found


def _readable(ref: e.PayloadRef, wanted: object, text_of: TextOf) -> object:
    data = text_of(ref)
    return data.decode(errors="replace") if data is not None and isinstance(wanted, str) else data


def _matcher_of(one: str | type[e.AnyEvent] | EventMatcher | EllipsisType) -> EventMatcher:
    assert not isinstance(one, EllipsisType), "told apart by the caller"
    return one if isinstance(one, EventMatcher) else EventMatcher(_name_of(one))


def _name_of(type_: str | type[e.AnyEvent]) -> str:
    name = type_ if isinstance(type_, str) else str(type_.__struct_config__.tag)
    if name not in _CLASSES:
        raise ValueError(f"there is no event {name!r}{_nearest(name, _CLASSES)}")
    return name


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


# --- the text of a failure -----------------------------------------------------------------------


def _failure(
    records: Sequence[Recorded],
    wanted: _Wanted,
    number: int,
    places: set[int],
    text_of: TextOf,
    remarks: Sequence[str],
) -> str:
    awaited = [one for place in sorted(places) for one in wanted[place : place + 1]]
    options = [one for one in awaited if isinstance(one, EventMatcher)]
    hope = " or ".join(str(one) for one in options) or "nothing more"
    if number < len(records):
        head = f"event {number + 1} is {records[number].type}, expected: {hope}"
    else:
        head = f"the history ends after {number} events, expected: {hope}"
    rows = [_row(at, record, records[0], text_of) for at, record in enumerate(records)]
    rows.insert(min(number + 1, len(rows)), f"  ^ expected: {hope}")
    almost = [_almost(options, at, record, text_of) for at, record in enumerate(records)]
    asked = ", ".join("..." if one is ... else str(one) for one in wanted)
    return "\n".join(
        [head, *rows, *filter(None, almost), *remarks, f"all that was asked: [{asked}]"]
    )


def _row(at: int, record: Recorded, first: Recorded, text_of: TextOf) -> str:
    seconds = (record.recorded_at_ns - first.recorded_at_ns) / _NS
    fields = " ".join(_field(name, value, text_of) for name, value in _told(record.event))
    told = f"{at + 1:4} {seconds:10.3f} s  run {record.epoch}  {record.type:22} {fields}"
    return _cut(told.rstrip(), 40 + _FIELDS_WIDTH)


def _almost(
    options: Sequence[EventMatcher], at: int, record: Recorded, text_of: TextOf
) -> str | None:
    """Answer why a record of a type that is waited for is not the one."""
    reasons = [
        reason
        for option in options
        if option.type == record.type
        for reason in _differences(option, record, text_of)
    ]
    return f"event {at + 1}, {record.type}: {', '.join(reasons)}" if reasons else None


def _told(struct: msgspec.Struct) -> list[tuple[str, object]]:
    """Answer the fields that are not at their default; those of parts with the part's name."""
    plain = msgspec.structs.fields(struct)
    told: list[tuple[str, object]] = []
    for field in plain:
        value = getattr(struct, field.name)
        if value == field.default or value in ([], {}):
            continue
        if isinstance(value, msgspec.Struct) and not isinstance(value, e.PayloadRef):
            told += [(f"{field.name}.{name}", part) for name, part in _told(value)]
        else:
            told.append((field.name, value))
    return told


def _field(name: str, value: object, text_of: TextOf) -> str:
    if isinstance(value, e.PayloadRef):
        data = text_of(value)
        shown = f"<{value.size} bytes>" if data is None else repr(data.decode(errors="replace"))
        return f"{name}={_cut(shown)}"
    return f"{name}={_cut(repr(value))}"


def _cut(text: str, width: int = _TEXT_WIDTH) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
