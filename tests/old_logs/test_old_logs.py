"""Every history that a released version wrote replays to the same states, for ever."""

import base64
import json
import typing
from pathlib import Path

import attrs
import pytest

from storage import events as e
from storage.codec import leaf_hash, recorded, salted_digest
from storage.ids import SERVICE_STREAM
from storage.job_state import TERMINAL_STATUSES, fold
from storage.projections import fold_service
from storage.replay import state_bytes

HERE = Path(__file__).parent
VERSIONS = sorted(path.stem for path in HERE.glob("*.jsonl"))
NEWEST = "0.1.0"


def rows(version):
    text = (HERE / f"{version}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def history(version):
    return [
        recorded(row["body"].encode(), bytes.fromhex(row["leaf"]), number)
        for number, row in enumerate(rows(version), 1)
    ]


def states(version):
    return json.loads((HERE / f"{version}.states.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_history_folds_to_its_old_states(version):
    """Each job, byte for byte but for fields that are new and unused."""
    streams = {}
    for record in history(version):
        streams.setdefault(record.stream, []).append(record)
    streams.pop(SERVICE_STREAM)

    folded = {name: json.loads(state_bytes(fold(past))) for name, past in streams.items()}

    expected = states(version)
    expected.pop(SERVICE_STREAM)
    assert folded == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_history_gives_its_old_service_state(version):
    """Every field that was known then."""
    folded = attrs.asdict(fold_service(history(version)))

    expected = states(version)[SERVICE_STREAM]
    assert {name: folded[name] for name in expected} == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_the_bytes_of_an_old_history_are_untouched(version):
    """Leaves fit bodies, each names the leaf before it, payloads fit their digests."""
    last = {}
    for row, record in zip(rows(version), history(version), strict=True):
        assert leaf_hash(row["body"].encode()).hex() == row["leaf"]
        assert record.prev_leaf == last.get(record.stream)
        last[record.stream] = row["leaf"]
        for beside in row["payloads"]:
            data = base64.b64decode(beside["data"])
            assert salted_digest(bytes.fromhex(beside["salt"]), data) == beside["digest"]


def test_the_newest_history_covers_every_event_type_and_status():
    """Nothing that can be written is missing from what must be read."""
    past = history(NEWEST)

    assert {type(record.event) for record in past} == set(typing.get_args(e.AnyEvent))
    found = {state.get("status", "queued") for state in states(NEWEST).values()}
    assert found >= TERMINAL_STATUSES | {"queued", "running"}
    assert NEWEST in VERSIONS
