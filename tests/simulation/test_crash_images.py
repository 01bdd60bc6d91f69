"""What the log acknowledged survives a power cut; a log that syncs less is found out."""

import random
import tempfile
from pathlib import Path

import pytest

from tests.simulation.crash_images import (
    DB,
    SMALL,
    crash,
    leaves_of,
    record_load,
    run_campaign,
    scratch_parent,
    write_files,
)
from tests.simulation.recorded_disk import MODES, CrashDisk, Record


@pytest.fixture
def folder():
    """A folder for images, in memory where there is one."""
    with tempfile.TemporaryDirectory(dir=scratch_parent()) as name:
        yield Path(name)


@pytest.mark.slow
def test_every_acknowledged_event_is_there_after_a_power_cut(folder):
    """Cut anywhere, and again in what a cut had left: nothing acknowledged is lost or changed."""
    outcome = run_campaign(folder, images=90, seed=7)

    assert outcome.problems == []
    assert outcome.counts["images"] == 90
    assert outcome.counts["with something to lose"] > 45
    assert all(outcome.counts[f"left: {mode}"] for mode in MODES)


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", ["OFF", "NORMAL"])
def test_a_log_that_syncs_less_loses_what_it_acknowledged(folder, synchronous):
    """The images of a connection without its full syncs miss acknowledged events."""
    pragmas = {**SMALL, "synchronous": synchronous}
    recording = record_load(folder / "record", "less", pragmas=pragmas)

    outcome = crash(recording, folder, images=100, seed=1, problems_max=1)

    assert outcome.problems


@pytest.mark.slow
def test_an_answer_before_the_commit_is_found_out(folder):
    """A writer that answers first acknowledges events that a power cut takes away."""
    recording = record_load(folder / "record", "early", early=True)

    outcome = crash(recording, folder, images=100, seed=1, problems_max=1)

    assert any("acknowledged" in problem for problem in outcome.problems)


@pytest.mark.slow
def test_an_erasure_that_leaves_bytes_on_the_disk_is_found_out(folder):
    """Without secure deletion, what was erased before the cut is in some file after the start."""
    pragmas = {**SMALL, "secure_delete": "OFF"}
    recording = record_load(folder / "record", "remains", pragmas=pragmas)

    outcome = crash(recording, folder, images=100, seed=1, problems_max=1)

    assert any("was erased and is there again" in problem for problem in outcome.problems)


def test_the_record_played_to_its_end_is_the_file_itself(folder):
    """With nothing lost, the last image is byte for byte what SQLite left in the real folder."""
    recording = record_load(folder / "record", "whole")
    disk = CrashDisk(recording.record)
    disk.play(len(recording.record.operations))

    files = disk.image("kept", random.Random(1))

    assert files == {DB: (folder / "record" / "disk" / DB).read_bytes()}
    write_files(folder / "copy", files)
    assert leaves_of(folder / "copy" / DB) == recording.leaves


def test_answers_are_noted_as_early_as_clients_hear_them(folder):
    """Each commit's events are heard before the next sync, so that no cut comes too late."""
    recording = record_load(folder / "record", "heard")
    operations = recording.record.operations

    syncs = [i for i, done in enumerate(operations) if done.kind == "sync"]
    known = [recording.answered(cut) for cut in syncs]

    assert known == sorted(known)
    assert recording.answered(len(operations)) == len(recording.leaves)
    assert len(set(known)) > len(syncs) // 2


@pytest.mark.parametrize("mode", MODES)
def test_bytes_that_were_synced_are_in_every_image(mode):
    """No cut takes synced bytes away, changes them, or takes the name of a synced folder."""
    record = record_of(("write", "a-wal", 0, b"x" * 5_000), ("sync", "a-wal"))
    record.write("a-wal", 5_000, b"y" * 5_000)
    disk = CrashDisk(record)
    disk.play(len(record.operations))

    images = [disk.image(mode, random.Random(seed)) for seed in range(50)]

    assert all(image["a-wal"].startswith(b"x" * 5_000) for image in images)


def test_cuts_lose_tear_and_reorder_what_was_not_synced():
    """Of two writes the first, the second, none, both and parts of either may be there."""
    record = record_of(("sync", "a-wal"))
    record.write("a-wal", 0, b"1" * 1_024)
    record.write("a-wal", 1_024, b"2" * 1_024)
    disk = CrashDisk(record)
    disk.play(len(record.operations))

    left = {disk.image(mode, random.Random(seed))["a-wal"] for mode in MODES for seed in range(200)}

    one, two, nothing = b"1" * 1_024, b"2" * 1_024, bytes(1_024)
    assert {b"", one, nothing + two, one + two} <= left
    assert any(image.count(b"1") == 512 and image.count(b"2") == 1_024 for image in left)
    assert any(image.count(b"1") % 512 for image in left)


def test_names_of_a_folder_that_was_not_synced_may_be_old():
    """A file that was made may be missing, one that was deleted may be there, both with bytes."""
    record = record_of(("write", "a-wal", 0, b"old"), ("sync", "a-wal"))
    record.delete("a-wal", folder=False)
    record.create("a-wal")
    record.write("a-wal", 0, b"new")
    disk = CrashDisk(record)
    disk.play(len(record.operations))

    left = {disk.image(m, random.Random(seed)).get("a-wal") for m in MODES for seed in range(99)}

    assert {None, b"old", b"new", b""} <= left
    record.sync("a-wal")
    disk.play(len(record.operations))
    assert {disk.image(mode, random.Random(0))["a-wal"] for mode in MODES} == {b"new"}


class Heard(Record):
    """A record without clients."""

    def settle(self):
        return


def record_of(*steps):
    """Answer the record of a new write-ahead log with these steps."""
    record = Heard({})
    record.create("a-wal")
    for kind, *arguments in steps:
        getattr(record, kind)(*arguments)
    return record
