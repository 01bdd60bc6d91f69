"""Hostile agents under each mechanism, ended in each way: what is left, and how long it took.

``python tests/actors/process/hostile_campaign.py --trials N`` prints a table (Markdown) and every
cell that is not clean; the exit code is 1 when one of ``pidns`` is not. A cell is a behaviour of
hostile.py, an ending and a mechanism. One process after the other: a worker with a host runs
``normal``, ``cancel`` and ``timeout``; for ``service-kill`` a service of its own is killed.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from pathlib import Path

import attrs
import trio

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from actors.host import RunSpec  # noqa: E402
from actors.limits import Limits  # noqa: E402
from actors.local_host import open_local_host  # noqa: E402
from actors.process.containment import try_out  # noqa: E402
from actors.process.keeper import MECHANISMS  # noqa: E402
from actors.process.process_table import process_table, send_signal  # noqa: E402
from actors.process.sweep import marks_of_log, sweep_marked  # noqa: E402
from storage import events as e  # noqa: E402
from storage.ids import IdSource  # noqa: E402

HOSTILE = Path(__file__).with_name("hostile.py")
BEHAVIOURS = (
    "double_fork",
    "own_sessions",
    "nohup",
    "ignores_term_and_int",
    "blocks_all_signals",
    "stops_itself",
    "holds_stdout",
    "forks_500",
    "forks_while_killed",
    "another_name",
    "clears_environment",
    "closes_files",
    "exits_while_forking",
    "floods_both_pipes",
    "prints_and_never_exits",
    "kills_its_parent",
)
IN_HOST = ("normal", "cancel", "timeout")
ENDINGS = (*IN_HOST, "service-kill")
TIMEOUT_MS = 800
GONE_S = 1.0
READY_S = 30.0
SETTLE_S = 10.0
WARM_S = 0.5
ANY = sys.maxsize


@attrs.frozen(kw_only=True)
class Cell:
    mechanism: str
    behaviour: str
    ending: str


@attrs.frozen(kw_only=True)
class Trial:
    """What one trial left; ``after_restart`` is what was left once the next start had swept."""

    mechanism: str
    behaviour: str
    ending: str
    survivors: int = 0
    after_restart: int = 0
    zombies: int = 0
    files: int = 0
    ms: float = 0.0

    @property
    def clean(self):
        return self.survivors == self.zombies == self.files == 0


def marked(mark):
    """The living processes with the mark in their command line."""
    found = []
    for process in process_table().values():
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            # The services of the campaign name the mark as well.
            ours = HOSTILE.with_name("hostile_campaign.py").name.encode() in line
            if mark.encode() in line and not ours and not process.dead:
                found.append(process)
    return found


def new_mark():
    return f"98765.{uuid.uuid4().int % 10**9:09d}"


def spec_of(ids, behaviour, ending, mark, ready):
    then = "leave" if ending == "normal" and behaviour != "prints_and_never_exits" else "stay"
    return RunSpec(
        job=ids.new_job(),
        epoch=1,
        agent="hostile",
        backend="command",
        argv=(sys.executable, "-I", "-S", str(HOSTILE), behaviour, mark, str(ready), then),
        prompt="",
        workspace=e.WorkspaceRequest(),
        timeout_ms=TIMEOUT_MS if ending == "timeout" else 60_000,
        max_budget_microusd=1_000_000,
        grace_ms=0,
        output_bytes_max=64 * 1024 * 1024,
    )


async def appear(ready):
    with trio.fail_after(READY_S):
        while not ready.exists():
            await trio.sleep(0.002)


# --- the worker: all endings but the death of the service ------------------------------------


def own_zombies():
    me = os.getpid()
    return sum(process.dead for process in process_table().values() if process.ppid == me)


def links():
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(path.readlink()))
    return found


def open_files():
    """How many, without those of the trash, which is emptied in its own time."""
    return sum("/trash" not in link for link in links())


async def settled(files, zombies):
    """The files and zombies above those counted before; the trash is emptied in the meantime."""
    with trio.move_on_after(SETTLE_S):
        while open_files() > files or own_zombies() > zombies:
            await trio.sleep(0.005)
    if open_files() > files:
        print(f"open: {sorted(links())}", file=sys.stderr)
    return max(0, open_files() - files), max(0, own_zombies() - zombies)


async def trial_in_host(host, ids, cell, folder, before):
    mark = new_mark()
    ready = folder / f"ready.{mark}"
    run = host.open_run(spec_of(ids, cell.behaviour, cell.ending, mark, ready))
    await run.offer()
    await run.release()
    if cell.ending != "timeout":
        await appear(ready)
    if cell.ending == "timeout" or (
        cell.ending == "normal" and cell.behaviour != "prints_and_never_exits"
    ):
        await run.outcome()
    decided = time.monotonic()
    reaped = await run.end(grace_ms=0)
    ms = (time.monotonic() - decided) * 1000
    survivors = marked(mark)
    await run.capture()
    await run.remove()
    await run.close()
    files, zombies = await settled(*before)
    return Trial(
        **attrs.asdict(cell),
        survivors=max(len(survivors), reaped.left),
        zombies=zombies,
        files=files,
        ms=ms,
    )


async def work(mechanism, data, cells):
    ids = IdSource()
    async with open_local_host(
        data, log_id=f"log-{uuid.uuid4().hex[:8]}", limits=Limits(), pool_size=0, mode=mechanism
    ) as host:
        # The first of all opens what stays open.
        warm = Cell(mechanism=mechanism, behaviour="nohup", ending="cancel")
        await trial_in_host(host, ids, warm, data, (ANY, ANY))
        await trio.sleep(WARM_S)
        before = open_files(), own_zombies()
        for behaviour, ending in cells:
            cell = Cell(mechanism=mechanism, behaviour=behaviour, ending=ending)
            trial = await trial_in_host(host, ids, cell, data, before)
            print(json.dumps(attrs.asdict(trial)), flush=True)


def trials_in_host(mechanism, cells, deadline):
    """Run cells in a worker, whose orphans are its own; stops at the deadline."""
    if not cells:
        return
    with tempfile.TemporaryDirectory() as folder:
        words = [json.dumps([(cell.behaviour, cell.ending) for cell in cells])]
        with subprocess.Popen(
            [sys.executable, __file__, "worker", mechanism, f"{folder}/data", *words],
            stdout=subprocess.PIPE,
            text=True,
        ) as worker:
            for line in worker.stdout:
                yield Trial(**json.loads(line))
                if time.monotonic() > deadline:
                    worker.terminate()
                    return
        assert worker.returncode == 0, f"the worker ended with {worker.returncode}"


# --- the death of the service ------------------------------------------------------------------


async def serve(mechanism, data, log_id, behaviour, mark, ready):
    async with open_local_host(data, log_id=log_id, pool_size=0, mode=mechanism) as host:
        run = host.open_run(spec_of(IdSource(), behaviour, "service-kill", mark, ready))
        await run.offer()
        await run.release()
        await trio.sleep_forever()


def trial_of_service(cell):
    mark, log_id = new_mark(), f"log-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        words = [cell.mechanism, f"{folder}/data", log_id, cell.behaviour, mark, str(ready)]
        service = subprocess.Popen([sys.executable, __file__, "service", *words])
        deadline = time.monotonic() + READY_S
        while not ready.exists():
            assert time.monotonic() < deadline, cell
            assert service.poll() is None, cell
            time.sleep(0.002)
        killed = time.monotonic()
        service.send_signal(signal.SIGKILL)
        service.wait()
        while (left := marked(mark)) and time.monotonic() < killed + GONE_S:
            time.sleep(0.002)
        ms = (time.monotonic() - killed) * 1000
        trio.run(_restart, log_id)
        after = marked(mark)
        for process in after:
            send_signal(process, signal.SIGKILL)
    return Trial(
        **attrs.asdict(cell), survivors=len(left), after_restart=len(after), zombies=0, ms=ms
    )


async def _restart(log_id):
    found = await marks_of_log(log_id)
    await sweep_marked(found, keep=frozenset(), deadline_ms=5_000)


# --- the campaign --------------------------------------------------------------------------------


def mechanisms_here():
    """The mechanisms that work here, and why the others do not."""
    reasons = {name: try_out(name, Path(tempfile.gettempdir())) for name in MECHANISMS}
    return [name for name, why in reasons.items() if why is None], {
        name: why for name, why in reasons.items() if why is not None
    }


def run_campaign(trials, *, seconds=float("inf"), seed=1):
    """Run so many trials of every cell, in an order of the seed; stop when the time is over."""
    deadline = time.monotonic() + seconds
    chance = random.Random(seed)
    mechanisms, _ = mechanisms_here()
    done = []
    share = (seconds / (2 * len(mechanisms))) if seconds != float("inf") else seconds
    for mechanism in mechanisms:
        cells = [
            Cell(mechanism=mechanism, behaviour=behaviour, ending=ending)
            for behaviour in BEHAVIOURS
            for ending in ENDINGS
            for _ in range(trials)
        ]
        chance.shuffle(cells)
        in_host = [cell for cell in cells if cell.ending in IN_HOST]
        done += trials_in_host(mechanism, in_host, min(deadline, time.monotonic() + share))
        until = min(deadline, time.monotonic() + share)
        for cell in cells:
            if cell.ending not in IN_HOST and time.monotonic() < until:
                done.append(trial_of_service(cell))
    return done


def quantile(values, part):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def table(done):
    """The rows of the table, and the cells that are not clean."""
    groups = defaultdict(list)
    for trial in done:
        load = "500 forks" if trial.behaviour == "forks_500" else "all others"
        groups[trial.mechanism, trial.ending, load].append(trial)
    lines = [
        "| mechanism | ending | behaviours | trials | survivors | after restart | zombies "
        "| open files | p50 ms | p99 ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (mechanism, ending, load), some in sorted(groups.items()):
        counts = [
            sum(getattr(trial, name) for trial in some)
            for name in ("survivors", "after_restart", "zombies", "files")
        ]
        if ending != "service-kill":
            counts[1] = "-"
        times = [f"{quantile([t.ms for t in some], part):.0f}" for part in (0.5, 0.99)]
        row = [mechanism, ending, load, len(some), *counts, *times]
        lines.append(f"| {' | '.join(map(str, row))} |")
    unclean = defaultdict(list)
    for trial in done:
        if not trial.clean:
            unclean[trial.mechanism, trial.ending, trial.behaviour].append(trial)
    for key, some in sorted(unclean.items()):
        first = attrs.asdict(some[0])
        facts = {k: first[k] for k in ("survivors", "after_restart", "zombies", "files")}
        lines.append(f"not clean: {' '.join(key)}: {len(some)} trials, the first {facts}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    done = run_campaign(options.trials, seconds=options.seconds)
    for name, why in mechanisms_here()[1].items():
        print(f"{name} does not work here: {why}")
    print("\n".join(table(done)))
    return int(any(not trial.clean for trial in done if trial.mechanism == "pidns"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        trio.run(work, sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
    elif sys.argv[1:2] == ["service"]:
        _, _, mechanism, data, *words, ready = sys.argv
        trio.run(serve, mechanism, Path(data), *words, Path(ready))
    else:
        sys.exit(main())
