"""The check of a log names every damage, accuses no untouched log, and keeps its memory."""

import importlib.util
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import trio

from storage import events as e
from storage.codec import Envelope, decode_envelope, encode_body, leaf_hash
from storage.errors import LogTooNew
from storage.findings import FINDINGS_MAX, Findings
from storage.merkle import EMPTY_ROOT, tree_root
from storage.sqlite_log import SqliteEventLog
from storage.verify import parse_root, verify

MAKE = Path(__file__).parents[1] / "old_logs" / "make.py"
FILLER = 300
COLUMNS = ("stream", "version", "type", "recorded_at_ns", "session")


def load_make():
    spec = importlib.util.spec_from_file_location("old_logs_make", MAKE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_make()


async def write_log(folder, *, filler=FILLER):
    clock, ids = make.sources()
    async with SqliteEventLog.open(
        folder / "log.db", ids=ids, clock_ns=clock, session="ses_1", die=make.die
    ) as log:
        story = make.Story(log, ids, folder / "artifacts")
        await make.tell(story)
        if filler:
            job = await story.submit("long")
            await story.begin(job)
            for start in range(0, filler, 100):
                await story.say(job, *[e.UsageRecorded(output_tokens=1)] * 100, n=start)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A log of all event types and more than one tile, with its artifact files."""
    folder = tmp_path_factory.mktemp("pristine")
    trio.run(write_log, folder)
    return folder


@pytest.fixture
def data(pristine, tmp_path):
    """A copy of it whose triggers are gone, so that it can be edited."""
    folder = tmp_path / "data"
    shutil.copytree(pristine, folder)
    edit(folder, "DROP TRIGGER events_keep_update", "DROP TRIGGER events_keep_delete")
    return folder


def edit(folder, *statements):
    """Run statements, each a text or (text, parameters), by a connection of our own."""
    with closing(sqlite3.connect(folder / "log.db")) as connection, connection:
        for statement in statements:
            text, parameters = statement if isinstance(statement, tuple) else (statement, ())
            assert connection.execute(text, parameters).rowcount != 0, text


def ask(folder, text, *parameters):
    with closing(sqlite3.connect(folder / "log.db")) as connection:
        return connection.execute(text, parameters).fetchall()


def check(folder, root=None):
    return verify(folder / "log.db", folder / "artifacts", root)


def kinds(report):
    return {finding.kind for finding in report.findings}


def told(report, kind):
    """Answer the seqs of the findings of a kind."""
    return {finding.seq for finding in report.findings if finding.kind == kind}


def head_of(folder):
    return ask(folder, "SELECT max(seq) FROM events")[0][0]


def flipped(value):
    """Answer a value with one bit changed, of the same type."""
    if isinstance(value, int):
        return value ^ 1
    if isinstance(value, bytes):
        return bytes([*value[:-1], value[-1] ^ 1]) if value else b"x"
    return value[:-1] + chr(ord(value[-1]) ^ 1) if value else "x"


def forge(folder, seq, **changes):
    """Rewrite a body with its leaf, as somebody would who knows the format."""
    ((body,),) = ask(folder, "SELECT body FROM events WHERE seq = ?", seq)
    old = decode_envelope(seq, body)
    fields = {name: getattr(old, name) for name in old.__struct_fields__}
    forged = encode_body(Envelope(**{**fields, **changes}))
    edit(
        folder,
        (
            "UPDATE events SET body = ?, leaf = ? WHERE seq = ?",
            (forged, leaf_hash(forged), seq),
        ),
    )


def test_an_untouched_log_is_not_accused(pristine):
    """No finding; size, head and root are those of the rows, and a second look agrees."""
    leaves = [leaf for (leaf,) in ask(pristine, "SELECT leaf FROM events ORDER BY seq")]

    report = check(pristine)

    assert report.findings == ()
    assert report.ok
    assert not report.torn
    assert (report.size, report.head_seq) == (len(leaves), len(leaves))
    assert report.root == tree_root(leaves).hex()
    assert check(pristine) == report


def test_every_earlier_root_is_confirmed(pristine):
    """A root noted at any size holds, also at 0 and at the head."""
    leaves = [leaf for (leaf,) in ask(pristine, "SELECT leaf FROM events ORDER BY seq")]

    for size in (0, 1, 7, 255, 256, 257, len(leaves)):
        assert check(pristine, (size, tree_root(leaves[:size]))).ok


def test_an_empty_log_is_whole(tmp_path):
    """A log without an event has the root of nothing."""

    async def open_and_close():
        clock, ids = make.sources()
        async with SqliteEventLog.open(
            tmp_path / "log.db", ids=ids, clock_ns=clock, session="s", die=make.die
        ):
            pass

    trio.run(open_and_close)

    report = check(tmp_path)

    assert report.ok
    assert (report.size, report.head_seq, report.root) == (0, 0, EMPTY_ROOT.hex())


def test_a_log_whose_projections_were_dropped_is_whole(data):
    """They are rebuilt at the next start and say nothing until then."""
    edit(data, "DELETE FROM idempotency")
    assert not check(data).ok

    with closing(sqlite3.connect(data / "log.db")) as connection, connection:
        for table in ("jobs", "job_labels", "idempotency", "service_state", "applied"):
            connection.execute(f"DROP TABLE {table}")

    assert check(data).ok


def test_a_log_is_checked_while_it_is_written(tmp_path):
    """The check needs no lock and sees one moment of a living log."""

    async def run():
        clock, ids = make.sources()
        async with SqliteEventLog.open(
            tmp_path / "log.db", ids=ids, clock_ns=clock, session="s", die=make.die
        ) as log:
            story = make.Story(log, ids, tmp_path / "artifacts")
            await make.tell(story)
            return check(tmp_path), log.head

    report, head = trio.run(run)

    assert report.ok
    assert report.head_seq == head


def test_a_missing_file_is_an_error_and_is_not_made(tmp_path):
    """Nothing is verified where nothing is."""
    with pytest.raises(FileNotFoundError):
        verify(tmp_path / "log.db", None)
    assert not (tmp_path / "log.db").exists()


@pytest.mark.slow
@pytest.mark.parametrize("column", COLUMNS)
def test_a_changed_column_is_named(data, column):
    """One bit of any column that repeats the body, in rows all over the log: the seq is named."""
    rows = ask(data, f"SELECT seq, {column} FROM events ORDER BY seq")
    for seq, value in rows[::17]:
        other = flipped(value)
        if column == "version":
            other = value + 100_000
        edit(data, (f"UPDATE events SET {column} = ? WHERE seq = ?", (other, seq)))

        report = check(data)

        assert told(report, "column") == {seq}, (column, seq)
        assert any(column in finding.what for finding in report.findings)
        edit(data, (f"UPDATE events SET {column} = ? WHERE seq = ?", (value, seq)))
    assert check(data).ok


@pytest.mark.parametrize("value", [None, 1.5, b"bytes", "text", "\udcff"])
def test_a_column_of_another_type_is_a_finding_and_no_crash(data, value):
    """SQLite keeps anything anywhere; so may an editor."""
    text = "CAST(x'ff' AS TEXT)" if value == "\udcff" else "?"
    parameters = () if value == "\udcff" else (value,)
    for column in ("session", "recorded_at_ns", "body", "leaf"):
        if value is None or (column == "session" and value == "text"):
            continue
        edit(data, (f"UPDATE events SET {column} = {text} WHERE seq = 9", parameters))

        report = check(data)

        assert not report.ok
        assert not report.torn
        assert 9 in {finding.seq for finding in report.findings}


@pytest.mark.slow
def test_a_changed_body_is_named(data):
    """A byte anywhere in a body, in rows all over the log; within a tile we know it was the body."""
    tile = 256
    for seq, body in ask(data, "SELECT seq, body FROM events ORDER BY seq")[::11]:
        at = seq * 7 % len(body)
        changed = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        edit(data, ("UPDATE events SET body = ? WHERE seq = ?", (changed, seq)))

        report = check(data)

        assert told(report, "body") == {seq}
        assert ("was changed" in report.findings[0].what) == (seq <= tile)
        edit(data, ("UPDATE events SET body = ? WHERE seq = ?", (body, seq)))


@pytest.mark.slow
def test_a_changed_leaf_is_named(data):
    """A bit of a leaf; within a tile we know that it was the leaf and not the body."""
    for seq, leaf in ask(data, "SELECT seq, leaf FROM events ORDER BY seq")[::11]:
        edit(data, ("UPDATE events SET leaf = ? WHERE seq = ?", (flipped(leaf), seq)))

        report = check(data)

        assert told(report, "leaf" if seq <= 256 else "body") == {seq}
        edit(data, ("UPDATE events SET leaf = ? WHERE seq = ?", (leaf, seq)))


def test_a_forged_event_with_its_leaf_is_found_by_its_tile(data):
    """Body, leaf and columns agree with each other; the tile and the next event do not."""
    forge(data, 8, by="mallory")

    report = check(data)

    assert "tile" in kinds(report)
    assert told(report, "chain") == {9}


def test_a_forged_event_in_the_tail_is_found_by_a_root_or_the_next_event(data):
    """Past the last tile the chain of its stream tells, or a root that was noted."""
    head = head_of(data)
    root = bytes.fromhex(check(data).root)
    forge(data, head, by="mallory")

    assert "root" in kinds(check(data, (head, root)))

    forge(data, head - 1, by="mallory")
    assert told(check(data), "chain") == {head}


@pytest.mark.parametrize("seq", [1, 2, 9, 200, 256, 257, 300])
def test_a_removed_row_is_named(data, seq):
    """A gap in the seqs, wherever it is."""
    edit(data, f"DELETE FROM events WHERE seq = {seq}")

    assert seq in told(check(data), "missing")


def test_removed_rows_are_named_as_a_range(data):
    """One finding, not a hundred."""
    edit(data, "DELETE FROM events WHERE seq BETWEEN 100 AND 199")

    whats = [finding.what for finding in check(data).findings if finding.kind == "missing"]

    assert "events 100 to 199 are missing" in whats


@pytest.mark.parametrize(("one", "two"), [(8, 9), (2, 300), (256, 257)])
def test_two_swapped_rows_are_both_named(data, one, two):
    """Each row says which event it really holds."""
    edit(
        data,
        f"UPDATE events SET seq = -1 WHERE seq = {one}",
        f"UPDATE events SET seq = {one} WHERE seq = {two}",
        f"UPDATE events SET seq = {two} WHERE seq = -1",
    )

    assert told(check(data), "moved") == {one, two}


def test_swapped_bodies_are_found(data):
    """Everything but the seq columns is exchanged."""
    rows = dict(ask(data, "SELECT seq, body FROM events WHERE seq IN (8, 9)"))
    leaves = dict(ask(data, "SELECT seq, leaf FROM events WHERE seq IN (8, 9)"))
    for seq, other in ((8, 9), (9, 8)):
        edit(
            data,
            (
                "UPDATE events SET body = ?, leaf = ? WHERE seq = ?",
                (rows[other], leaves[other], seq),
            ),
        )

    assert told(check(data), "moved") == {8, 9}


def test_a_cut_tail_is_found_by_what_lies_beside_it(data):
    """The projections, payloads and tiles know of events that are gone."""
    head = head_of(data)
    edit(data, f"DELETE FROM events WHERE seq > {head - 3}")

    assert "cut" in kinds(check(data))


def test_a_cut_made_everywhere_is_found_by_a_noted_root(data):
    """Rows, projections and payloads cut alike: only SIZE:HASH can tell, and it does."""
    head = head_of(data)
    root = bytes.fromhex(check(data).root)
    edit(data, f"DELETE FROM events WHERE seq > {head - 3}")
    with closing(sqlite3.connect(data / "log.db")) as connection, connection:
        for table in ("jobs", "job_labels", "idempotency", "service_state", "applied"):
            connection.execute(f"DROP TABLE {table}")

    assert check(data).ok
    assert told(check(data, (head, root)), "cut") == {head - 2}


def test_a_log_that_was_cut_and_went_on_is_found_by_a_noted_root(data, tmp_path):
    """As long as before, but another log."""
    root = check(data).root
    other = tmp_path / "other"
    other.mkdir()
    trio.run(write_log, other)
    edit(other, "DROP TRIGGER events_keep_update")
    forge(other, head_of(other), by="mallory")

    assert kinds(check(other, (head_of(data), bytes.fromhex(root)))) == {"root"}


def test_a_decreasing_time_is_named(data):
    """An event may not be older than the one before it."""
    seq = head_of(data)
    forge(data, seq, recorded_at_ns=5)
    edit(data, f"UPDATE events SET recorded_at_ns = 5 WHERE seq = {seq}")

    assert told(check(data), "time") == {seq}


@pytest.mark.slow
@pytest.mark.parametrize("column", ["salt", "data", "digest", "seq"])
def test_a_changed_payload_is_named_in_every_row(data, column):
    """Salt, bytes, digest or seq of each payload: the event that names it is accused."""
    for digest, seq, value in ask(data, f"SELECT digest, seq, {column} FROM payloads"):
        other = value + 1 if column == "seq" else flipped(value)
        edit(data, (f"UPDATE payloads SET {column} = ? WHERE digest = ?", (other, digest)))

        report = check(data)

        assert seq in told(report, "payload"), (column, seq)
        now = other if column == "digest" else digest
        edit(data, (f"UPDATE payloads SET {column} = ? WHERE digest = ?", (value, now)))
    assert check(data).ok


@pytest.mark.slow
def test_a_missing_payload_is_named_unless_it_was_erased(data):
    """The one that an event says was erased is missing in the untouched log already."""
    erased = ask(data, "SELECT seq FROM events WHERE type = 'payload.erased'")
    assert len(erased) == 1
    for digest, seq in ask(data, "SELECT digest, seq FROM payloads"):
        (row,) = ask(data, "SELECT * FROM payloads WHERE digest = ?", digest)
        edit(data, ("DELETE FROM payloads WHERE digest = ?", (digest,)))

        assert told(check(data), "payload") == {seq}
        edit(data, ("INSERT INTO payloads VALUES (?,?,?,?)", row))


def test_a_payload_that_came_back_after_its_erasure_is_named(data):
    """Erased for good means gone."""
    first = next(
        decode_envelope(seq, body)
        for seq, body in ask(data, "SELECT seq, body FROM events WHERE type = 'job.submitted'")
    )
    prompt = json.loads(bytes(first.data))["prompt"]
    edit(
        data,
        (
            "INSERT INTO payloads(digest, seq, salt, data) VALUES (?,?,?,?)",
            (prompt["digest"], first.seq, b"salt", b"data"),
        ),
    )

    whats = [finding.what for finding in check(data).findings]

    assert any("erased" in what for what in whats)


def test_a_payload_that_no_event_names_is_named(data):
    """Nothing can be smuggled in beside the log."""
    edit(data, ("INSERT INTO payloads VALUES (?,?,?,?)", ("ee" * 32, 3, b"s", b"d")))

    assert kinds(check(data)) == {"payload"}


@pytest.mark.parametrize("column", ["salt", "file", "digest", "seq", "size"])
def test_a_changed_artifact_row_is_named(data, column):
    """Each column of each artifact's row."""
    for digest, seq, value in ask(data, f"SELECT digest, seq, {column} FROM artifacts"):
        other = value + 1 if column == "seq" else flipped(value)
        edit(data, (f"UPDATE artifacts SET {column} = ? WHERE digest = ?", (other, digest)))

        assert seq in told(check(data), "artifact"), (column, seq)
        now = other if column == "digest" else digest
        edit(data, (f"UPDATE artifacts SET {column} = ? WHERE digest = ?", (value, now)))
    assert check(data).ok


def test_a_missing_artifact_row_is_named_unless_it_was_erased(data):
    """One of them was erased by an event, and is not missed."""
    rows = ask(data, "SELECT digest, seq FROM artifacts")
    assert len(rows) < ask(data, "SELECT count(*) FROM events WHERE type = 'artifact.stored'")[0][0]

    edit(data, "DELETE FROM artifacts")

    assert told(check(data), "artifact") == {seq for _, seq in rows}


@pytest.mark.parametrize("damage", ["changed", "longer", "shorter", "missing", "folder"])
def test_a_damaged_artifact_file_is_named(data, damage):
    """Its bytes are what the event says, or the event is accused of nothing and the file is."""
    for seq, name in ask(data, "SELECT seq, file FROM artifacts"):
        path = next(p for p in (data / "artifacts").rglob(name) if p.is_file())
        content = path.read_bytes()
        path.unlink()
        if damage == "folder":
            path.mkdir()
        elif damage != "missing":
            changed = {
                "changed": flipped(content),
                "longer": content + b"x",
                "shorter": content[:-1],
            }
            path.write_bytes(changed[damage])

        assert told(check(data), "artifact") == {seq}
        if damage == "folder":
            path.rmdir()
        path.write_bytes(content)
    assert check(data).ok


def test_without_the_folder_the_files_are_not_looked_at(data):
    """Rows are checked, contents are not."""
    shutil.rmtree(data / "artifacts")

    assert verify(data / "log.db", None).ok
    assert "artifact" in kinds(check(data))


@pytest.mark.parametrize(
    "column",
    [
        "job_id",
        "created_at_ns",
        "owner",
        "agent",
        "priority",
        "status",
        "epoch",
        "last_seq",
        "quarantined",
        "workspace_epoch",
        "submitted_seq",
    ],
)
def test_an_edited_row_of_a_job_is_named(data, column):
    """Each column of the list of jobs is folded anew and compared."""
    rowid, value = ask(data, f"SELECT submitted_seq, {column} FROM jobs LIMIT 1")[0]
    other = value + 100_000 if column == "submitted_seq" else flipped(value)
    edit(data, (f"UPDATE jobs SET {column} = ? WHERE submitted_seq = ?", (other, rowid)))

    report = check(data)

    assert kinds(report) == {"projection"}
    assert rowid in told(report, "projection")


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM jobs WHERE submitted_seq = (SELECT min(submitted_seq) FROM jobs)",
        "INSERT INTO jobs SELECT 99999, 'job_x', created_at_ns, owner, agent, priority, status,"
        " epoch, last_seq, quarantined, workspace_epoch FROM jobs LIMIT 1",
        "UPDATE job_labels SET value = 'other' WHERE name = 'team'",
        "DELETE FROM job_labels",
        "INSERT INTO job_labels VALUES ('a', 'b', 99999)",
        "UPDATE idempotency SET job_id = 'job_x'",
        "UPDATE idempotency SET key = 'other'",
        "DELETE FROM idempotency",
        "INSERT INTO idempotency VALUES ('k', 'job_x')",
        "UPDATE service_state SET state = replace(state, '\"capacity\":4', '\"capacity\":5')",
        "UPDATE service_state SET state = 'nonsense'",
        "UPDATE service_state SET state = '[]'",
        "DELETE FROM service_state",
        "UPDATE applied SET seq = seq - 1",
    ],
)
def test_an_edited_projection_is_named(data, statement):
    """The list, its labels, the keys, the service's state and their point in the log."""
    edit(data, statement)

    assert kinds(check(data)) == {"projection"}


def test_projections_past_the_head_are_a_cut(data):
    """They have seen an event that is not there."""
    edit(data, "UPDATE applied SET seq = seq + 1")

    assert kinds(check(data)) == {"cut"}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE tiles SET root = zeroblob(32)",
        "UPDATE tiles SET root = 'text'",
        "DELETE FROM tiles",
        "UPDATE tiles SET level = 1",
    ],
)
def test_an_edited_or_missing_tile_is_named(data, statement):
    """Tiles are worked out anew from the leaves."""
    edit(data, statement)

    assert "tile" in kinds(check(data))


def test_a_tile_past_the_end_is_a_cut(data):
    """A tile is written with its last event only."""
    edit(data, "INSERT INTO tiles SELECT 0, 1, root FROM tiles")

    assert kinds(check(data)) == {"cut"}


@pytest.mark.parametrize(
    ("events", "epoch"),
    [
        ((e.JobErrored(cause="internal"), e.JobCancelled()), 0),
        ((e.AgentEnded(exit=e.ExitStatus()),), 0),
        ((e.ServiceStopped(),), 0),
        ((make.start(),), 7),
    ],
    ids=["second_ending", "ended_before_begun", "service_event", "epoch"],
)
def test_an_illegal_transition_is_named(tmp_path, events, epoch):
    """A whole, unedited log in which a bug wrote what may not follow."""

    async def run():
        clock, ids = make.sources()
        async with SqliteEventLog.open(
            tmp_path / "log.db", ids=ids, clock_ns=clock, session="s", die=make.die
        ) as log:
            story = make.Story(log, ids, tmp_path / "artifacts")
            job = await story.submit("x")
            return (await story.say(job, *events, epoch=epoch))[-1].seq

    seq = trio.run(run)

    report = check(tmp_path)

    assert kinds(report) == {"illegal"}
    assert told(report, "illegal") == {seq}


def test_a_log_of_a_newer_version_is_refused(data):
    """What this version can not read it does not judge."""
    edit(data, "UPDATE meta SET schema = 1000")

    with pytest.raises(LogTooNew):
        check(data)


def test_another_logs_name_is_named(data):
    """The log's id is in its first event."""
    edit(data, "UPDATE meta SET log_id = 'log_other'")

    assert kinds(check(data)) == {"meta"}


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.95])
def test_a_torn_copy_is_torn_and_not_accused_of_edits(data, keep):
    """A file cut in the middle is another outcome than an edited log."""
    db = data / "log.db"
    edit_free = db.read_bytes()
    db.write_bytes(edit_free[: int(len(edit_free) * keep) // 512 * 512 + 100])

    report = check(data)

    assert report.torn
    assert not report.ok
    assert "file" in kinds(report)


def test_overwritten_pages_are_torn(data):
    """Zeros in the middle, as a sparse copy leaves them."""
    db = data / "log.db"
    content = bytearray(db.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 8 * 4096] = bytes(8 * 4096)
    db.write_bytes(bytes(content))

    assert check(data).torn


@pytest.mark.parametrize("content", [b"", b"not a database" * 100])
def test_what_is_no_log_is_torn(tmp_path, content):
    """An empty file or something else entirely is answered, not raised."""
    (tmp_path / "log.db").write_bytes(content)

    assert check(tmp_path).torn


def test_findings_are_bounded():
    """A wholly damaged log does not fill the memory with accusations."""
    findings = Findings()
    for seq in range(FINDINGS_MAX + 5):
        findings.add("body", seq, "x")

    assert len(findings.all()) == FINDINGS_MAX + 1
    assert findings.all()[-1].what == "5 more findings are not listed"


def test_a_root_is_read_as_it_is_printed():
    """SIZE:HASH, and nothing else."""
    assert parse_root("7:" + "ab" * 32 + "\n") == (7, bytes.fromhex("ab" * 32))
    for text in ("", "7", ":", "x:" + "ab" * 32, "-1:" + "ab" * 32, "7:ab", "7:zz"):
        with pytest.raises(ValueError, match=r"SIZE:HASH|hexadecimal"):
            parse_root(text)


def test_every_finding_says_what_to_do(data):
    """A remedy is part of each."""
    edit(data, "DELETE FROM events WHERE seq = 9")

    assert all(finding.remedy for finding in check(data).findings)
