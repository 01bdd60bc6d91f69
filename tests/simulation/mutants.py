"""Break the product on purpose and see how many seeds the simulation needs to notice.

``python tests/simulation/mutants.py [SEEDS] [NAME]``: each mutant is one replaced text in a
copy of the packages. Exits 1 when one survives all seeds, or when its text is not there any more.
"""

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = """
import sys
from actors.simulation import SimulationFailed, simulate
for seed in range(int(sys.argv[1])):
    try:
        simulate(seed)
    except SimulationFailed as failed:
        print(seed + 1, failed.reason.strip().splitlines()[-1][:110])
        break
"""

MUTANTS: dict[str, tuple[str, str, str]] = {
    "a second writer cancels": (
        "actors/supervisor.py",
        "        if job in self._held:\n",
        "        if job in self._held and not self._held[job].state.terminal:\n"
        "            stale = JobStream(self._log, self._ids, await self._state(job))\n"
        "            return await stream_cancel(stale, command)\n        if False:\n",
    ),
    "cancels of a queued job do not wait": (
        "actors/supervisor.py",
        "        while job in self._cancelling:\n            await self._cancelling[job].wait()\n",
        "        if job in self._cancelling:\n            return 'accepted'\n",
    ),
    "the last of the queue starts first": (
        "actors/admission.py",
        "entry = self._order.pop(0)",
        "entry = self._order.pop()",
    ),
    "one slot too many": (
        "actors/supervisor.py",
        "() < self._limits.capacity",
        "() <= self._limits.capacity",
    ),
    "unknown runs hold no slot": (
        "actors/supervisor.py",
        "len(self._quarantined) + len(self._unknown)",
        "len(self._quarantined)",
    ),
    "quarantined jobs hold no slot": (
        "actors/supervisor.py",
        "running + len(self._quarantined)",
        "running",
    ),
    "quarantine ends with the service": (
        "actors/recovery.py",
        "    found.quarantined = await _quarantined(log, ids)\n",
        "",
    ),
    "recovery does not reap": (
        "actors/recovery.py",
        "    reaped = await host.reap(state.job_id, state.epoch, state.keeper)\n    await",
        '    reaped = e.ProcessReaped(phase="recovery")\n    await',
    ),
    "recovery does not sweep": ("actors/recovery.py", "    await host.sweep(keep)\n", ""),
    "recovery sweeps what it is to capture": (
        "actors/recovery.py",
        "await host.sweep(keep)",
        "await host.sweep(frozenset())",
    ),
    "recovery forgets who waits": (
        "actors/recovery.py",
        '        case "queue":\n            found.queued.append(stream)\n',
        '        case "queue":\n            pass\n',
    ),
    "a begun run is simply queued again": (
        "actors/recovery.py",
        '        case "begun":\n            return "interrupt"\n',
        '        case "begun":\n            return "requeue"\n',
    ),
    "facts are recorded as they come": (
        "actors/job.py",
        "        if fact.epoch == state.epoch and fact.n > seen:\n",
        "        if True:\n",
    ),
    "the agent starts before its event": (
        "actors/job.py",
        "            begun: list[e.JobEvent] = [",
        "            await run.release()\n            begun: list[e.JobEvent] = [",
    ),
    "a run begins after its cancel": (
        "actors/job.py",
        "self.stream.append_surely(begun, unless_cancelled=True)",
        "self.stream.append_surely(begun)",
    ),
    "the tree is not ended": (
        "actors/job.py",
        "            reaped = await run.end(grace_ms=grace_ms)\n",
        '            reaped = e.ProcessReaped(phase="agent")\n',
    ),
    "the workspace goes before its work is stored": (
        "actors/job.py",
        "            await self.stream.append_surely(facts)\n            facts = []\n",
        "            facts = []\n",
    ),
    "attempts are not counted": (
        "actors/job.py",
        "        and state.attempts < state.submitted.max_attempts\n",
        "",
    ),
    "processes are left before a requeue": (
        "actors/job.py",
        "if requeues(self.stream.state) and not left:",
        "if requeues(self.stream.state):",
    ),
    "a terminal event is given up when the disk is full": (
        "actors/stream.py",
        "                if self.giving_up:\n",
        "                if True:\n",
    ),
    "a refused cancel loses its job": (
        "actors/supervisor.py",
        "            queue.add(entry)\n            self._wake.set()\n            raise\n",
        "            raise\n",
    ),
    "a refused start loses its job": (
        "actors/supervisor.py",
        '        if finished in ("requeued", "not_started"):\n',
        '        if finished == "requeued":\n',
    ),
    "the janitor removes nothing": (
        "actors/janitor.py",
        "                await run.remove()\n",
        "                pass\n",
    ),
    "a slot is released with processes in it": (
        "actors/janitor.py",
        "        if reaped.left == 0:\n",
        "        if True:\n",
    ),
    "a drain does not kill": (
        "actors/supervisor.py",
        "                slot.actor.stop()\n",
        "                pass\n",
    ),
}


def main(seeds: int, only: str | None) -> int:
    """Run each mutant; answer whether one survived."""
    names = [name for name in MUTANTS if only is None or only in name]
    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(lambda name: _try(name, seeds), names))
    for name, verdict in zip(names, verdicts, strict=True):
        print(f"{verdict or 'SURVIVED':>6}  <- {name}")
    return int(not all(verdicts))


def _try(name: str, seeds: int) -> str:
    path, old, new = MUTANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        for package in ("actors", "storage"):
            shutil.copytree(ROOT / package, Path(folder) / package)
        file = Path(folder) / path
        text = file.read_text()
        assert old in text, f"mutant {name!r} has no place any more"
        file.write_text(text.replace(old, new, 1))
        done = subprocess.run(
            [sys.executable, "-c", SNIPPET, str(seeds)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        if done.returncode:
            return "crash of the mutant: " + done.stderr.strip().splitlines()[-1][:100]
        return done.stdout.strip()


if __name__ == "__main__":
    argv = [*sys.argv[1:], None, None]
    sys.exit(main(int(argv[0] or 60), argv[1]))
