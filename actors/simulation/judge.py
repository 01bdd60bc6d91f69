"""The judge of a history: what must be true after every commit, and of the world then.

It keeps its own books from the committed records, and believes nothing that the service holds
in memory. The first thing that is not true is kept as the verdict.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable

import attrs
import trio

from actors.limits import Limits
from actors.testing import RunKey, World
from storage import events as e
from storage.batch import Batch
from storage.errors import IllegalTransition
from storage.event_log import Recorded
from storage.ids import JobId, job_of_stream
from storage.job_state import JobState, evolve

SETTLE_S = 3.0


@attrs.define
class _Life:
    """What the judge notes of one job."""

    begun: set[int] = attrs.field(factory=set)
    started: set[int] = attrs.field(factory=set)
    facts: set[tuple[int, int]] = attrs.field(factory=set)
    terminals: int = 0
    tokens: int = 0
    waits_since_s: float = 0.0


class Judge:
    """Watches the commits of all incarnations of the service in one world."""

    def __init__(self, world: World, limits: Limits, on_violation: Callable[[], None]) -> None:
        self._world = world
        self._limits = limits
        self._on_violation = on_violation
        self._lives: dict[JobId, _Life] = defaultdict(_Life)
        self._seq = 0
        self._at_ns = 0
        self._ready = False
        self.states: dict[JobId, JobState] = {}
        self.events: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.verdict: str | None = None
        self.unsettled_until = 0.0
        self.cancels_under_way: Counter[JobId] = Counter()

    def demand(self, true: bool, broken: str) -> None:
        """Note the first thing that is not true, and end the history."""
        if not true and self.verdict is None:
            self.verdict = broken
            self._on_violation()

    def unsettle(self, seconds: float = SETTLE_S) -> None:
        """Say that the log is slow or full: for a while the order of starts is not judged."""
        self.unsettled_until = max(self.unsettled_until, trio.current_time() + seconds)

    # --- after every commit ------------------------------------------------------------------

    def committed(self, batch: Batch) -> None:
        """Judge a batch that was written."""
        for record in batch.records:
            self._judge(record)
        running = [s for s in self.states.values() if s.status == "running"]
        taken = len(running) + sum(s.slot_quarantined for s in self.states.values())
        self.demand(taken <= self._limits.capacity, f"{taken} slots are taken")
        service = batch.service
        self.demand(service.active == len(running), "the running jobs are not counted right")

    def _judge(self, record: Recorded) -> None:
        self.events[record.type] += 1
        self.demand(record.seq == self._seq + 1, f"seq {record.seq} follows {self._seq}")
        self.demand(record.recorded_at_ns >= self._at_ns, f"time goes back at seq {record.seq}")
        self._seq, self._at_ns = int(record.seq), record.recorded_at_ns
        job = job_of_stream(record.stream)
        if job is None:
            self._judge_service(record.event)
            return
        before = self.states.get(job)
        try:
            self.states[job] = evolve(before, record)
        except IllegalTransition as error:
            self.demand(False, str(error))
            return
        self._judge_event(job, record, before)

    def _judge_service(self, event: e.AnyEvent) -> None:
        if isinstance(event, e.ServiceStarted):
            self._ready = False
        if isinstance(event, e.ServiceReady):
            self._ready = True
            for job, state in self.states.items():
                if state.status == "queued":
                    self._lives[job].waits_since_s = trio.current_time()

    def closed(self, key: RunKey) -> None:
        """Note that a run was let go of: if its job was put back, it waits from now on."""
        state = self.states.get(key[0])
        if state is not None and state.status == "queued" and state.epoch == key[1]:
            self._lives[key[0]].waits_since_s = trio.current_time()

    def _judge_event(self, job: JobId, record: Recorded, before: JobState | None) -> None:
        life = self._lives[job]
        name = f"{record.type} of {job} at seq {record.seq}"
        if record.n is not None:
            self.demand((record.epoch, record.n) not in life.facts, f"{name}: a fact twice")
            life.facts.add((record.epoch, record.n))
        event = record.event
        if isinstance(event, e.JobSubmitted):
            life.waits_since_s = trio.current_time()
        elif isinstance(event, (e.JobStarted, e.AgentStarted)):
            assert before is not None, "a submitted job"
            self._judge_start(record, before, name)
        elif isinstance(event, e.TERMINAL):
            self._judge_end((job, record.epoch), event, name)
        elif isinstance(event, (e.UsageRecorded, e.UsageLate)):
            life.tokens += event.input_tokens
        else:
            self._judge_host(record, before, name)

    def _judge_start(self, record: Recorded, before: JobState, name: str) -> None:
        life = self._lives[before.job_id]
        first = isinstance(record.event, e.JobStarted)
        epochs = life.started if first else life.begun
        self.demand(record.epoch not in epochs, f"{name}: a run is doubled")
        epochs.add(record.epoch)
        self.demand(before.cancel_requested_by is None, f"{name}: after a cancel")
        self.demand(before.ended is None, f"{name}: after a verdict")
        if first:
            self._judge_order(before, name)

    def _judge_end(self, key: RunKey, event: e.TerminalEvent, name: str) -> None:
        job, epoch = key
        life = self._lives[job]
        life.terminals += 1
        self.demand(life.terminals == 1, f"{name}: a second end")
        cause = self.states[job].cause
        self.causes[cause or "completed"] += 1
        if event.artifacts == "complete":
            self.demand(self._has_artifact(key), f"{name}: nothing is stored")
        elif epoch in life.begun and cause != "outcome_unknown" and event.artifacts == "incomplete":
            self._judge_captured(key, name, incomplete=True)
        if not event.left:
            self._judge_gone(key, f"{name}: its processes live")

    def _judge_host(self, record: Recorded, before: JobState | None, name: str) -> None:
        """Compare what an event says of the world with the world."""
        assert before is not None, "a submitted job"
        key = (before.job_id, record.epoch)
        match record.event:
            case e.JobRequeued():
                # It keeps its slot until its run is let go of.
                self._lives[before.job_id].waits_since_s = math.inf
                self._judge_gone(key, f"{name}: the run before it is alive")
                if record.epoch in self._lives[before.job_id].begun:
                    self._judge_captured(key, name)
            case e.RunInterrupted(why="service_died" | "service_stopped"):
                if not before.reaped_left:
                    self._judge_gone(key, f"{name}: it was not reaped")
            case e.WorkspaceRemoved():
                there = key in self._world.workspaces
                self.demand(not there, f"{name}: the workspace is there")
            case e.SlotReleased():
                self._judge_gone(key, f"{name}: processes are left")
            case _:
                pass

    def _judge_gone(self, key: RunKey, broken: str) -> None:
        tree = self._world.trees.get(key)
        living = [role for role in tree.roles.values() if role != "keeper"] if tree else []
        self.demand(not living, broken)

    def _has_artifact(self, key: RunKey) -> bool:
        job, epoch = key
        return any(a.epoch == epoch for a in self.states[job].artifacts)

    def _judge_captured(self, key: RunKey, name: str, *, incomplete: bool = False) -> None:
        """Demand what a run made, unless its own script kept it from being captured."""
        script = self._world.scripts[key].capture
        kept = script in ("fails", "hangs") or (incomplete and script == "incomplete")
        self.demand(kept or self._has_artifact(key), f"{name}: its work was not captured")

    def _judge_order(self, starting: JobState, name: str) -> None:
        """No job that waits for longer than this instant would have been before this one."""
        if trio.current_time() <= self.unsettled_until:
            return
        for job, state in self.states.items():
            waits = state.status == "queued" and job != starting.job_id
            first = waits and _place(state) < _place(starting)
            if first and self._lives[job].waits_since_s < trio.current_time():
                self.demand(job in self.cancels_under_way, f"{name}: {job} was before it")

    # --- at the host -----------------------------------------------------------------------------

    def released(self, key: RunKey) -> None:
        """Judge the start of an agent, when it has happened."""
        job, epoch = key
        name = f"agent of {job} epoch {epoch}"
        state = self.states.get(job)
        self.demand(self._world.released[key] == 1, f"{name}: started twice")
        begun = state is not None and state.epoch == epoch and state.phase != "started"
        self.demand(begun, f"{name}: started before its event was committed")
        others = [k for k in self._world.trees if k[0] == job and k != key]
        self.demand(not others, f"{name}: an older run is alive")

    # --- at the end ----------------------------------------------------------------------------

    def ledger(self) -> None:
        """Compare the sums of usage with the events, and the runs with the releases."""
        for job, state in self.states.items():
            life = self._lives[job]
            self.demand(state.terminal, f"{job} never ended: it is {state.phase}")
            self.demand(
                state.usage.input_tokens == life.tokens, f"{job}: the ledger does not add up"
            )
            self.demand(state.attempts == len(life.begun), f"{job}: attempts are miscounted")
            self.demand(state.attempts <= state.submitted.max_attempts, f"{job}: too many attempts")
        for job, epoch in self._world.released:
            self.demand(epoch in self._lives[job].begun, f"{job} epoch {epoch}: not in the log")


def _place(state: JobState) -> tuple[int, int]:
    return (-state.submitted.priority, state.submitted_seq)
