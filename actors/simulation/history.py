"""One history: clients and faults, drawn step by step from a seed, against the real runtime."""

import hashlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import trio

from actors.errors import ActorsError, KeyReused
from actors.kernel import KernelError
from actors.limits import Limits
from actors.simulation.chance import ScriptedBug, draw_script, source
from actors.simulation.inspection import contradictions
from actors.simulation.judge import Judge
from actors.testing import Crashed, Harness, RunKey, open_world
from storage.batch import Batch
from storage.errors import AppendRefused, DiskFull, JobUnknown, LogBusy, OutcomeUnknown
from storage.event_log import Append
from storage.events import event_type
from storage.ids import SERVICE_STREAM, JobId

STEPS_MIN: Final = 60
STEPS_MAX: Final = 160
REQUEST_S: Final = 3_600.0
DRAINED_S: Final = 30.0
FINALE_S: Final = 6 * 3_600.0
EXPECTED: Final = (ActorsError, KernelError, AppendRefused, JobUnknown)
NS: Final = 1_000_000_000


class History:
    """Plays ``steps`` steps of a seed (None: as many as the seed says) and ends in a finale.

    In the finale all faults are over: what was accepted must end, and nothing may be left.
    ``crash_at`` makes it a calm history, in which the only fault but those of the runs is one
    crash, at the boundary of that number (from 1; 0: none): before an append is taken, before
    and after its commit, before and after each act on the host. ``again_after`` adds a second
    crash, so many boundaries after the first (0: none): a small number is one in recovery.
    """

    def __init__(
        self, seed: int, steps: int | None, crash_at: int | None = None, again_after: int = 0
    ) -> None:
        chance = source(seed, "limits")
        self.seed = seed
        self.steps = chance.randint(STEPS_MIN, STEPS_MAX) if steps is None else steps
        self.faults: Counter[str] = Counter()
        self.crashed_at: Counter[str] = Counter()
        self.boundaries = 0
        self.acknowledged: dict[JobId, int] = {}
        self.keys: dict[str, tuple[str, JobId]] = {}
        self._limits = Limits(
            capacity=chance.choice((1, 2, 3, 5)),
            queue_depth=chance.choice((4, 20, 100)),
            grace_ms=2_000,
            drain_ms=chance.choice((0, 1_000, 10_000)),
            capture_deadline_ms=10_000,
            reap_deadline_ms=1_000,
            prepare_deadline_ms=20_000,
            unknown_deadline_ms=30_000,
            mailbox_max=chance.choice((1, 8, 256)),
        )
        self._chance = source(seed, "steps")
        # Each history has some of the faults: a frequent one would hide what another one shows.
        share = 0.7 if crash_at is None else 0.0
        self._weights = [
            weight if action in _CLIENTS or chance.random() < share else 0
            for action, weight in _WEIGHTED.items()
        ]
        self._armed: int | None = crash_at or None
        self._again_after = again_after
        self._refusals = source(seed, "refusals")
        self._full_share = 1.0
        self._full_until = 0.0
        self._full_with: AppendRefused = DiskFull()
        self._over = False
        self._asking = 0
        self._scope = trio.CancelScope()
        self.harness: Harness
        self.judge: Judge

    # --- the play ------------------------------------------------------------------------------

    async def play(self) -> None:
        """Run the history; the judge then has the verdict."""
        async with open_world(
            lambda spec: draw_script(self.seed, spec, self.faults),
            limits=self._limits,
            boundary=self._at_verb,
            random_bytes=source(self.seed, "ids").randbytes,
            started=False,
        ) as harness:
            self.harness = harness
            self.judge = Judge(harness.world, self._limits, self._scope.cancel)
            harness.refuse = self._refuse
            harness.store.before.append(lambda batch: self._at_commit("before", batch))
            harness.store.after.append(self.judge.committed)
            harness.store.after.append(lambda batch: self._at_commit("after", batch))
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._keep_running)
                    async with trio.open_nursery() as clients:
                        for _ in range(self.steps):
                            await self._step(clients)
                    await self._finale()
                    nursery.cancel_scope.cancel()
            if self.judge.verdict is None:
                self._inspect()

    async def _step(self, clients: trio.Nursery) -> None:
        chance = self._chance
        await trio.sleep(chance.choice((0.0, 0.0, 0.0, 0.01, 0.1, 0.5, 1.0, 2.0)))
        action = chance.choices(list(_WEIGHTED), weights=self._weights)[0]
        action(self, clients, random.Random(chance.getrandbits(64)))  # noqa: S311  not secret
        self._check_crashes()

    async def _keep_running(self) -> None:
        """Start the service again whenever it is gone, as its unit would."""
        chance = source(self.seed, "restarts")
        while True:
            await self.harness.start()
            await self.harness.alive.gone.wait()
            await trio.sleep(chance.choices((0.0, 0.1, 1.0, 10.0), weights=(8, 6, 3, 1))[0])

    async def _finale(self) -> None:
        """Let all faults be over, wait for the ends, stop, and start once more to sweep."""
        self._over = True
        self._armed = None
        self._full_until = 0.0
        harness = self.harness
        with trio.move_on_after(FINALE_S) as scope:
            await harness.until(self._all_over)
            # The janitor, and a service that is on its way up.
            await trio.sleep(300)
            await self._up()
            await harness.crash()
            await self._up()
        states = self.judge.states.values()
        waiting = [f"{s.job_id} is {s.phase}" for s in states if not s.terminal]
        waiting += [f"{s.job_id} keeps its slot" for s in states if s.slot_quarantined]
        self.judge.demand(not scope.cancelled_caught, f"not over in the end: {waiting}")

    async def _up(self) -> None:
        await self.harness.until(lambda: self._is_up)

    @property
    def _is_up(self) -> bool:
        service = self.harness.service
        if service is None or service.crashed or service.gone.is_set():
            return False
        return service.ready.is_set()

    def _all_over(self) -> bool:
        states = self.judge.states.values()
        return all(state.terminal and not state.slot_quarantined for state in states)

    def _inspect(self) -> None:
        """Judge what is left when everything is over."""
        judge, harness = self.judge, self.harness
        self._check_crashes()
        world = harness.world
        judge.demand(not world.trees, f"processes survive: {list(world.trees)}")
        judge.demand(not world.workspaces, f"workspaces survive: {list(world.workspaces)}")
        judge.demand(self._asking == 0, f"{self._asking} requests were never answered")
        for job, seq in self.acknowledged.items():
            state = judge.states.get(job)
            known = state is not None and state.submitted_seq == seq
            judge.demand(known, f"{job} was acknowledged and is lost")
        judge.ledger()
        for broken in contradictions(harness.store, world, judge.states):
            judge.demand(False, broken)

    def _check_crashes(self) -> None:
        for name, error in self.harness.crashes:
            known = isinstance(error, ScriptedBug)
            self.judge.demand(known, f"{name} crashed: {error!r}")

    def digest(self) -> str:
        """Answer SHA-256 over the bodies of all events, in hex."""
        digest = hashlib.sha256()
        for *_, body, _leaf in self.harness.store.events:
            digest.update(body)
        return digest.hexdigest()

    # --- the clients ---------------------------------------------------------------------------

    async def _ask(self, request: Callable[[], Awaitable[object]]) -> None:
        """Send a request and take whatever a client may be answered."""
        if not self._is_up:
            self.faults["client.refused_connection"] += 1
            return
        self._asking += 1
        try:
            with trio.move_on_after(REQUEST_S) as scope:
                await request()
            self.judge.demand(not scope.cancelled_caught, "a request was never answered")
        except EXPECTED as error:
            self.faults[f"client.{type(error).__name__}"] += 1
        finally:
            self._asking -= 1

    def submit(self, clients: trio.Nursery, chance: random.Random) -> None:
        """Submit one job, or some at once."""
        for _ in range(chance.choice((1, 1, 1, 1, 2, 5))):
            clients.start_soon(self._submit, random.Random(chance.getrandbits(64)), None)  # noqa: S311

    def submit_with_key(self, clients: trio.Nursery, chance: random.Random) -> None:
        """Submit with an idempotency key: new, or again, and now and then with another body."""
        key = f"key-{chance.randrange(12)}"
        for _ in range(chance.choice((1, 2, 6))):
            clients.start_soon(self._submit, random.Random(chance.getrandbits(64)), key)  # noqa: S311

    async def _submit(self, chance: random.Random, key: str | None) -> None:
        prompt = f"prompt {key}" if chance.random() < 0.9 else "another"
        # Any: the values of the request's fields.
        fields: dict[str, Any] = {
            "priority": chance.choice((0, 0, 0, 5, -5)),
            "max_attempts": chance.choice((1, 1, 2, 3)),
            "timeout_ms": chance.choice((500, 5_000, 60_000)),
        }
        retries = chance.choice((0, 0, 3)) if key else 0

        async def request() -> None:
            try:
                answer = await self.harness.submit(prompt, idempotency_key=key, **fields)
            except KeyReused as error:
                held = self.keys.get(key or "")
                broken = f"{key} is said to be reused for its own body"
                self.judge.demand(held is None or held != (prompt, error.job_id), broken)
                raise
            self.acknowledged[answer.job_id] = answer.seq
            if key is not None:
                held = self.keys.setdefault(key, (prompt, answer.job_id))
                self.judge.demand(held == (prompt, answer.job_id), f"{key} made a second job")

        for _ in range(retries + 1):
            await self._ask(request)
            if retries:
                await trio.sleep(chance.choice((0.0, 0.5, 5.0)))

    def submit_and_cancel(self, clients: trio.Nursery, chance: random.Random) -> None:
        """Submit a job and cancel it in its first moments."""
        clients.start_soon(self._submit_and_cancel, chance)

    async def _submit_and_cancel(self, chance: random.Random) -> None:
        known = set(self.acknowledged)
        await self._submit(chance, None)
        await trio.sleep(chance.choice((0.0, 0.0, 0.05, 0.3, 1.0)))
        for job in [job for job in self.acknowledged if job not in known][:1]:
            await self._cancel(job)

    def cancel(self, clients: trio.Nursery, chance: random.Random) -> None:
        """Cancel some job, perhaps twice at once."""
        if self.judge.states:
            job = self._some_job(chance)
            for _ in range(chance.choice((1, 1, 3))):
                clients.start_soon(self._cancel, job)

    def _some_job(self, chance: random.Random) -> JobId:
        """Answer one of the jobs, more often one that is not over."""
        jobs = list(self.judge.states)
        open_ = [job for job in jobs if not self.judge.states[job].terminal]
        return chance.choice(open_ if open_ and chance.random() < 0.8 else jobs)

    async def _cancel(self, job: JobId) -> None:
        async def request() -> None:
            answer = await self.harness.cancel(job)
            state = self.judge.states[job]
            if answer == "terminal":
                self.judge.demand(state.terminal, f"{job} is said to be over")
            else:
                asked = state.cancel_requested_by is not None
                self.judge.demand(asked, f"the cancel of {job} was accepted and is lost")

        self.judge.cancels_under_way[job] += 1
        try:
            await self._ask(request)
        finally:
            self.judge.cancels_under_way[job] -= 1
            if not self.judge.cancels_under_way[job]:
                del self.judge.cancels_under_way[job]

    def message(self, clients: trio.Nursery, chance: random.Random) -> None:
        """Say something to the agent of some job."""
        if self.judge.states:
            job = self._some_job(chance)
            clients.start_soon(self._ask, lambda: self.harness.message(job, "hello"))

    def explain(self, clients: trio.Nursery, chance: random.Random) -> None:
        """Ask why a job is in its state."""
        if self.judge.states:
            job = self._some_job(chance)
            clients.start_soon(self._ask, lambda: self.harness.why(job))

    # --- the faults ------------------------------------------------------------------------------

    def _at_verb(self, verb: str, key: RunKey | None) -> None:
        if verb == "release.done":
            assert key is not None, "an agent belongs to a run"
            self.judge.released(key)
        if verb == "close.done":
            assert key is not None, "what is closed is a run"
            self.judge.closed(key)
        done = verb.endswith(".done")
        self._boundary("after act" if done else "before act", (verb.removesuffix(".done"),))

    def _at_commit(self, when: str, batch: Batch) -> None:
        # Of a batch, each type once, in its order.
        self._boundary(f"{when} commit", dict.fromkeys(record.type for record in batch.records))

    def _boundary(self, stage: str, names: Iterable[str]) -> None:
        """Crash here, if a crash is due at this boundary."""
        self.boundaries += not self._over
        if self._armed is None or self.harness.service is None:
            return
        self._armed -= 1
        if self._armed <= 0:
            self._armed, self._again_after = self._again_after or None, 0
            recovers = "" if self.harness.service.ready.is_set() else " in recovery"
            self.faults[f"crash{recovers}: {stage}"] += 1
            self.crashed_at.update(f"{name}: {stage}" for name in names)
            self.harness.crash_now()
            raise Crashed

    def _refuse(self, request: Append) -> AppendRefused | None:
        types = dict.fromkeys(event_type(fact.event) for fact in request.facts)
        self._boundary("before append", types)
        if trio.current_time() >= self._full_until:
            return None
        if request.stream == SERVICE_STREAM and self._full_with.code == "busy":
            return None
        if self._refusals.random() >= self._full_share:
            return None
        self.faults[f"log.{self._full_with.code}"] += 1
        self.judge.unsettle()
        return self._full_with

    def crash(self, _clients: trio.Nursery, _chance: random.Random) -> None:
        """Let the service be gone now."""
        if self._is_up:
            self.faults["crash: at once"] += 1
            self.harness.crash_now()

    def arm(self, _clients: trio.Nursery, chance: random.Random) -> None:
        """Let the service be gone at one of the next boundaries, also one in recovery."""
        self._armed = chance.choice((1, 2, 3, 5, 8, 13, 21))

    def crash_into_recovery(self, clients: trio.Nursery, chance: random.Random) -> None:
        """Let it be gone now, and again while it recovers."""
        self.crash(clients, chance)
        self._armed = chance.randint(1, 8)

    def fill_disk(self, _clients: trio.Nursery, chance: random.Random) -> None:
        """Let the log refuse for a while."""
        self._full_with = chance.choice((DiskFull(), DiskFull(), LogBusy(1)))
        self._full_share = chance.choice((1.0, 0.5))
        self._full_until = trio.current_time() + chance.choice((0.1, 2.0, 15.0))
        self.judge.unsettle(self._full_until - trio.current_time() + 3)

    def lower_disk(self, _clients: trio.Nursery, chance: random.Random) -> None:
        """Let the disk be below or above its low-water mark."""
        self.harness.disk_low = not self.harness.disk_low and chance.random() < 0.4

    def slow_log(self, _clients: trio.Nursery, chance: random.Random) -> None:
        """Let commits take their time for a while."""
        if self._is_up:
            self.faults["log.slow"] += 1
            seconds = chance.choice((0.05, 1.0, 8.0))
            self.harness.log.slow_until = trio.current_time() + seconds
            self.judge.unsettle(seconds + 3)

    def lose_commit(self, _clients: trio.Nursery, chance: random.Random) -> None:
        """Let the outcome of the next commit be unknown: written, or not."""
        if self._is_up:
            written = chance.random() < 0.5
            self.faults[f"log.unknown, {'written' if written else 'lost'}"] += 1
            self.harness.log.fail_next(OutcomeUnknown("fsync failed"), written=written)

    def jump_clock(self, _clients: trio.Nursery, chance: random.Random) -> None:
        """Let the wall clock jump, in either direction."""
        self.faults["clock.jump"] += 1
        self.harness.jump_ns += chance.choice((-3_600, -1, 1, 3_600)) * NS

    def drain(self, clients: trio.Nursery, _chance: random.Random) -> None:
        """Stop the service in order; its unit starts it again."""
        if self._is_up and not self.harness.supervisor.draining:
            self.faults["service.drain"] += 1
            clients.start_soon(self._drain)

    async def _drain(self) -> None:
        limit_s = self._limits.drain_ms / 1000 + DRAINED_S
        with trio.move_on_after(limit_s) as scope:
            await self.harness.stop()
        self.judge.demand(not scope.cancelled_caught, f"a drain takes more than {limit_s:g} s")

    def wait(self, _clients: trio.Nursery, _chance: random.Random) -> None:
        """Let nothing happen."""


_Action = Callable[[History, trio.Nursery, random.Random], None]
_WEIGHTED: Final[dict[_Action, int]] = {
    History.submit: 26,
    History.submit_with_key: 7,
    History.submit_and_cancel: 5,
    History.cancel: 10,
    History.message: 5,
    History.explain: 2,
    History.crash: 2,
    History.arm: 5,
    History.crash_into_recovery: 1,
    History.fill_disk: 2,
    History.lower_disk: 3,
    History.slow_log: 3,
    History.lose_commit: 2,
    History.jump_clock: 2,
    History.drain: 2,
    History.wait: 10,
}
_CLIENTS: Final = frozenset(
    {
        History.submit,
        History.submit_with_key,
        History.submit_and_cancel,
        History.cancel,
        History.message,
        History.explain,
        History.wait,
    }
)
"""What every history has; the others are faults."""
