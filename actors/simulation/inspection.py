"""The whole check of a memory store at the end of a history, from its bytes alone."""

from collections.abc import Iterator

from actors.testing import World
from storage import events as e
from storage.codec import leaf_hash, recorded, salted_digest
from storage.event_log import Recorded
from storage.ids import SERVICE_STREAM, JobId, job_of_stream
from storage.job_state import JobState, fold
from storage.merkle import TILE_LEAVES, perfect_root
from storage.projections import JobRow, evolve_row, fold_service
from storage.testing import MemoryStore
from storage.verify_streams import refs_of


def contradictions(store: MemoryStore, world: World, live: dict[JobId, JobState]) -> Iterator[str]:
    """Answer all that does not agree: bytes, tree, streams, folds, projections, what lies beside."""
    records = [recorded(body, leaf, seq) for seq, *_, body, leaf in store.events]
    if records != store.records:
        yield "the bytes do not decode to the events that were given out"
    yield from _tree(store)
    yield from _streams(store, records, live)
    yield from _projections(store, records)
    yield from _beside(store, world, records)


def _tree(store: MemoryStore) -> Iterator[str]:
    leaves = [leaf for *_, leaf in store.events]
    if leaves != [leaf_hash(body) for *_, body, _ in store.events]:
        yield "a leaf is not the hash of its body"
    whole = len(leaves) // TILE_LEAVES
    roots = [perfect_root(leaves[n * TILE_LEAVES : (n + 1) * TILE_LEAVES]) for n in range(whole)]
    if [(level, index, root) for level, index, root in store.tiles if level == 0] != [
        (0, n, root) for n, root in enumerate(roots)
    ]:
        yield "the tiles are not those of the leaves"
    if list(store.tip.frontier.open[0]) != leaves[whole * TILE_LEAVES :]:
        yield "the frontier is not what follows the last tile"


def _streams(
    store: MemoryStore, records: list[Recorded], live: dict[JobId, JobState]
) -> Iterator[str]:
    streams: dict[str, list[Recorded]] = {}
    for record in records:
        stream = streams.setdefault(record.stream, [])
        before = stream[-1].leaf if stream else None
        if (record.version, record.prev_leaf) != (len(stream) + 1, before):
            yield f"seq {record.seq} does not follow its stream"
        stream.append(record)
    if streams != store.streams:
        yield "the index of streams is not that of the events"
    states = {
        job_of_stream(name): fold(held) for name, held in streams.items() if name != SERVICE_STREAM
    }
    if states != live:
        yield "the replay of a job is not what was seen live"


def _projections(store: MemoryStore, records: list[Recorded]) -> Iterator[str]:
    rows: dict[str, JobRow] = {}
    keys: dict[str, str] = {}
    for record in records:
        job = job_of_stream(record.stream)
        if job is None:
            continue
        row = evolve_row(rows.get(job), record)
        if row is not None:
            rows[job] = row
        if isinstance(record.event, e.JobSubmitted) and record.event.idempotency is not None:
            if record.event.idempotency.key in keys:
                yield f"{job} has a key that another job has"
            keys[record.event.idempotency.key] = job
    if rows != store.rows:
        yield "the rows of jobs are not those of the events"
    if keys != store.keys:
        yield "the idempotency keys are not those of the events"
    if _differs(store, records):
        yield "the state of the service is not the fold of the events"


def _differs(store: MemoryStore, records: list[Recorded]) -> bool:
    folded, kept = fold_service(records), store.tip.service
    counts = ("ready", "draining", "active", "queued", "quarantined", "finished", "capacity")
    return any(getattr(folded, name) != getattr(kept, name) for name in counts)


def _beside(store: MemoryStore, world: World, records: list[Recorded]) -> Iterator[str]:
    for record in records:
        for digest in refs_of(record.event):
            payload = store.payloads.get(digest)
            if payload is None:
                yield f"seq {record.seq} refers to bytes that are not there"
            elif salted_digest(payload.salt, payload.data) != digest:
                yield f"seq {record.seq} refers to bytes that were changed"
        if isinstance(record.event, e.ArtifactStored):
            row = store.artifacts.get(record.event.digest)
            data = world.files.get(row.file) if row else None
            if row is None or data is None or salted_digest(row.salt, data) != row.digest:
                yield f"seq {record.seq} refers to a file that is not there"
