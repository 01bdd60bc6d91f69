"""Writes the history of this version that every later version must replay to the same states.

Run it once, before a release that changes the log: ``python tests/old_logs/make.py VERSION``
writes VERSION.jsonl and VERSION.states.json beside itself. A released history is never rewritten.
"""

import base64
import hashlib
import json
import random
import sqlite3
import sys
import tempfile
from pathlib import Path

import attrs
import trio

from storage import events as e
from storage.codec import payload, salted_digest
from storage.event_log import Append, Fact, StoredArtifact
from storage.ids import SERVICE_STREAM, IdSource, job_stream
from storage.job_state import fold
from storage.replay import state_bytes
from storage.sqlite_log import SqliteEventLog

HERE = Path(__file__).parent
FIRST_NS = 1_760_000_000_000_000_000
SECOND_NS = 1_000_000_000


class Clock:
    """A clock that moves a second whenever it is read."""

    def __init__(self, now_ns=FIRST_NS):
        self.now_ns = now_ns

    def __call__(self):
        self.now_ns += SECOND_NS
        return self.now_ns


class Story:
    """Appends to a log, remembering each stream's version and epoch."""

    def __init__(self, log, ids, artifacts):
        self.log = log
        self.ids = ids
        self.artifacts = artifacts
        self.versions = {}
        self.epochs = {}
        self.beside = {}
        self.stored = {}

    def text(self, text):
        """Answer the reference of a text whose bytes go with the next append."""
        made = payload(text.encode(), self.ids.salt())
        self.beside[made.digest] = made
        return made.ref

    def artifact(self, name, data):
        """Answer the event of a file that was stored."""
        salt, file = self.ids.salt(), hashlib.sha256(data).hexdigest()
        path = self.artifacts / file[:2] / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        digest = salted_digest(salt, data)
        self.stored[digest] = StoredArtifact(digest=digest, salt=salt, file=file, size=len(data))
        return e.ArtifactStored(name=name, digest=digest, size=len(data))

    async def say(self, stream, *events, by="service", epoch=None, n=None, request_id=None):
        """Append the events to a stream in one request."""
        facts = []
        for event in events:
            self.epochs[stream] = self.epochs.get(stream, 0) + isinstance(event, e.JobStarted)
            facts.append(
                Fact(
                    event=event,
                    epoch=self.epochs[stream] if epoch is None else epoch,
                    n=n,
                    payloads=tuple(self._named(event, self.beside)),
                    artifacts=tuple(self._named(event, self.stored)),
                )
            )
        version = self.versions.get(stream, 0)
        request = Append(
            stream=stream,
            expected_version=version,
            facts=tuple(facts),
            by=by,
            request_id=request_id,
        )
        self.versions[stream] = version + len(facts)
        return await self.log.append(request)

    def _named(self, event, rows):
        values = (getattr(event, name) for name in event.__struct_fields__)
        digests = [getattr(v, "digest", v) for v in values]
        return [rows.pop(d) for d in digests if isinstance(d, str) and d in rows]

    async def submit(self, prompt, **fields):
        """Submit a job and answer its stream."""
        stream = job_stream(self.ids.new_job())
        await self.say(stream, self.submission(prompt, **fields), by="alice", request_id="req_1")
        return stream

    def submission(self, prompt, **fields):
        """Answer the first event of a job."""
        return e.JobSubmitted(
            agent=fields.pop("agent", "echo"),
            prompt=self.text(prompt),
            max_budget_microusd=5_000_000,
            timeout_ms=2_700_000,
            workspace=fields.pop("workspace", e.WorkspaceRequest()),
            **fields,
        )

    async def begin(self, stream):
        """Start, prepare and begin a run."""
        await self.say(stream, start())
        await self.say(stream, e.WorkspacePrepared(kind="scratch", strategy="empty"))
        await self.say(
            stream,
            e.ProcessSpawned(keeper="keeper_1", pid=4711, start_time=99, boot_id="boot-1"),
            e.AgentStarted(backend="echo"),
        )


def start():
    """Answer the event of a run that has its slot."""
    return e.JobStarted(agent_digest="a1" * 32, containment="subreaper", confined=True)


def service_started(log_id):
    """Answer the event of a service's start."""
    return e.ServiceStarted(
        version="0.1.0",
        config_digest="c0" * 32,
        capacity=10,
        queue_depth=100,
        containment="subreaper",
        boot_id="boot-1",
        log_id=log_id,
        confined=True,
    )


async def tell_service(story):
    """A start, its tokens and a change of limits."""
    await story.say(SERVICE_STREAM, service_started(story.log.log_id))
    await story.say(SERVICE_STREAM, e.ServiceReady(recovered=0))
    token = e.TokenCreated(name="alice", scopes=["read", "run"], digest="7e" * 32)
    await story.say(SERVICE_STREAM, token, by="admin")
    await story.say(SERVICE_STREAM, e.TokenRevoked(name="bob"), by="admin")
    await story.say(
        SERVICE_STREAM,
        e.ServiceConfigured(capacity=4, queue_depth=50, config_digest="c1" * 32),
    )


async def tell_success(story):
    """A job with all that a good run can have, and the owned job that ends with it."""
    job = await story.submit(
        "make it better",
        agent="coder",
        model="sonnet",
        metadata=story.text('{"ticket":7}'),
        webhook=story.text("https://example.org/hook"),
        labels={"team": "core", "env": "test"},
        workspace=e.WorkspaceRequest(repo="https://example.org/r.git", ref="main", kind="clone"),
        priority=5,
        session_id="session-1",
        idempotency=e.IdempotencyRef(key="1d" * 32, body="b0" * 32),
    )
    await story.say(job, start())
    await story.say(
        job,
        e.WorkspacePrepared(
            kind="clone",
            strategy="overlay",
            repo="https://example.org/r.git",
            ref="main",
            base_commit="5" * 40,
            stale=True,
            stale_why="the remote did not answer",
        ),
    )
    await story.say(
        job,
        e.ProcessSpawned(keeper="keeper_2", pid=4712, start_time=100, boot_id="boot-1"),
        e.AgentStarted(backend="claude"),
    )
    owned = await story.submit("help", owner=job.removeprefix("job/"), kind="tool")
    await story.begin(owned)
    await tell_agent(story, job)
    await story.say(owned, e.ProcessReaped(phase="agent"), e.JobCancelled(detail="owner_ended"))
    diff = story.artifact("diff", b"diff --git a/x b/x\n")
    files = story.artifact("files", b"[]")
    await story.say(job, diff, files)
    await story.say(job, e.ProcessReaped(phase="capture"))
    await story.say(job, e.JobCompleted(artifacts="complete"))
    await story.say(job, e.WorkspaceRemoved())
    await story.say(job, e.WebhookDelivered(attempt=2))
    await story.say(job, e.ArtifactErased(digest=files.digest), by="alice")
    return job


async def tell_agent(story, job):
    """What an agent does, from its first turn to its end."""
    await story.say(job, e.SessionBound(session_id="session-1", agent_session="x-1"), n=0)
    await story.say(job, e.AgentTurnFinished(turn=1, text=story.text("I read the code")), n=1)
    call = e.AgentToolCalled(
        name="Bash", arguments=story.text("ls"), outcome="denied", duration_ms=12
    )
    await story.say(job, call, n=2)
    usage = e.UsageRecorded(
        input_tokens=1000, output_tokens=50, cost_microusd=4_200, model="sonnet"
    )
    await story.say(job, usage, n=3)
    await story.say(job, e.AgentMessaged(text=story.text("hurry")), by="alice")
    out = e.OutputRecorded(stream="stdout", offset=0, size=5, tail=story.text("hello"))
    err = e.OutputRecorded(stream="stderr", offset=2, size=4, tail=story.text("warn"))
    await story.say(job, out, n=4)
    await story.say(job, err, n=5)
    ended = e.AgentEnded(exit=e.ExitStatus(code=0), result=story.text("done"))
    await story.say(job, ended, n=6)
    reaped = e.ProcessReaped(
        phase="agent",
        pids=[e.ReapedProcess(pid=4712, how="exit 0"), e.ReapedProcess(pid=4713, how="signal 9")],
        seen=2,
        duration_ms=7,
    )
    await story.say(job, reaped)


async def tell_interrupted(story):
    """A run that a crash interrupted, requeued, and failed by the second run."""
    job = await story.submit("again", max_attempts=2, webhook=story.text("https://example.org/"))
    await story.begin(job)
    await story.say(job, e.RunInterrupted(why="service_killed"))
    await story.say(job, e.ProcessReaped(phase="recovery", left=0, seen=1))
    await story.say(job, story.artifact("diff", b"half a diff\n"), e.WorkspaceRemoved())
    await story.say(job, e.JobRequeued(why="interrupted"))
    await story.begin(job)
    late = e.UsageLate(
        input_tokens=9, cost_microusd=1, source="lower_bound", complete=False, model="sonnet"
    )
    await story.say(job, late, epoch=1)
    error = story.text("exit code 3")
    await story.say(job, e.AgentEnded(exit=e.ExitStatus(code=3), cause="agent_exit", error=error))
    await story.say(job, e.JobFailed(cause="agent_exit", artifacts="incomplete"))
    await story.say(job, e.WebhookGivenUp(attempts=5, why="status 500"))


async def tell_other_endings(story):
    """Cancelled while queued and while running, an unbegun start, a timeout with survivors."""
    queued = await story.submit("never mind")
    await story.say(queued, e.JobCancelRequested(), e.JobCancelled(), by="alice")
    running = await story.submit("stop")
    await story.begin(running)
    await story.say(running, e.JobCancelRequested(), by="bob")
    await story.say(running, e.ProcessReaped(phase="agent", seen=1), e.JobCancelled())
    unbegun = await story.submit("no repository")
    await story.say(unbegun, start())
    await story.say(unbegun, e.JobRequeued(why="not_begun"))
    await story.say(unbegun, start())
    await story.say(
        unbegun,
        e.JobErrored(cause="workspace_failed", detail="clone", error=story.text("no such ref")),
    )
    slow = await story.submit(
        "sleep",
        parent=e.Lineage(
            job=unbegun.removeprefix("job/"), how="retry", seq=3, leaf="0f" * 32, commit="6" * 40
        ),
    )
    await story.begin(slow)
    await story.say(slow, e.AgentEnded(exit=e.ExitStatus(signal=9), cause="timed_out"))
    await story.say(slow, e.ProcessReaped(phase="agent", seen=3, left=1))
    await story.say(slow, e.JobTimedOut(left=1, artifacts="complete"))
    await story.say(slow, e.ProcessReaped(phase="recovery", seen=1))
    await story.say(slow, e.SlotReleased())


async def tell(story):
    """All of it: every event type, every status, and jobs that are not over."""
    await tell_service(story)
    erased = await tell_success(story)
    await tell_interrupted(story)
    await tell_other_endings(story)
    running = await story.submit("still at it")
    await story.begin(running)
    await story.submit("waiting")
    records = await story.log.read(erased)
    gone = e.PayloadErased(digests=[records[0].event.prompt.digest])
    await story.say(erased, gone, by="alice")
    await story.say(SERVICE_STREAM, e.ServiceDraining(drain_ms=30_000))
    await story.say(SERVICE_STREAM, e.ServiceStopped())


def sources(seed=0):
    """Answer a clock and ids that are the same at every run."""
    clock = Clock()
    return clock, IdSource(clock, random.Random(seed).randbytes)


def die(why):
    """End the process, as a service would; never happens here."""
    raise SystemExit(why)


async def collect(log):
    """Answer the states that a history folds to, by stream."""
    streams = {}
    for record in await log.read_all():
        streams.setdefault(record.stream, []).append(record)
    states = {
        stream: json.loads(state_bytes(fold(history)))
        for stream, history in sorted(streams.items())
        if stream != SERVICE_STREAM
    }
    states[SERVICE_STREAM] = attrs.asdict(log.service_state)
    return states


def rows_of(db):
    """Answer each event's row as JSON, with what lies beside it."""
    with sqlite3.connect(db) as connection:
        payloads, artifacts = {}, {}
        for digest, seq, salt, data in connection.execute("SELECT * FROM payloads"):
            row = {"digest": digest, "salt": salt.hex(), "data": base64.b64encode(data).decode()}
            payloads.setdefault(seq, []).append(row)
        for digest, seq, salt, file, size in connection.execute("SELECT * FROM artifacts"):
            row = {"digest": digest, "salt": salt.hex(), "file": file, "size": size}
            artifacts.setdefault(seq, []).append(row)
        rows = connection.execute("SELECT seq, body, leaf FROM events ORDER BY seq").fetchall()
    connection.close()
    return [
        {
            "body": body.decode(),
            "leaf": leaf.hex(),
            "payloads": payloads.get(seq, []),
            "artifacts": artifacts.get(seq, []),
        }
        for seq, body, leaf in rows
    ]


async def make(version, folder):
    """Write the two files of a version into a folder."""
    clock, ids = sources()
    with tempfile.TemporaryDirectory() as scratch:
        db = Path(scratch) / "log.db"
        async with SqliteEventLog.open(
            db, ids=ids, clock_ns=clock, session="ses_1", die=die
        ) as log:
            await tell(Story(log, ids, Path(scratch) / "artifacts"))
            states = await collect(log)
        lines = rows_of(db)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (folder / f"{version}.jsonl").write_text(text, encoding="utf-8")
    (folder / f"{version}.states.json").write_text(
        json.dumps(states, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    trio.run(make, sys.argv[1], HERE)
