"""Ends what a lost keeper, or a service that was killed, left of a run.

Processes are found by the mark in their environment, by their descent from a marked one or from
the recorded keeper, and, where the service is itself a subreaper, as children that are nobody's.
A pid alone is never enough to be signalled.
"""

import ctypes
import os
import time
from signal import SIGKILL, SIGSTOP
from typing import Final

import attrs
import trio

from actors.process.identity import Mark, ProcessIdentity, current_boot_id, environment_of
from actors.process.keeper import (
    PIDS_REPORTED_MAX,
    Process,
    descendants,
    how_ended,
    process_table,
    read_process,
    send_signal,
)
from actors.process.reaped import Reaped
from actors.process.registry import KeeperRegistry

_PR_SET_CHILD_SUBREAPER: Final = 36
_PAUSE_S: Final = 0.005
_FREEZE_PASSES_MAX: Final = 64


def become_subreaper() -> None:
    """Let orphans of lost keepers become children of this process, where they can be found."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


async def sweep_run(
    mark: Mark,
    *,
    keeper: ProcessIdentity | None = None,
    registry: KeeperRegistry | None = None,
    deadline_ms: int,
) -> Reaped:
    """Kill every process of a run that can be found, until none is, and answer what was seen.

    ``keeper`` ends with its descendants, if it is still the recorded process. ``registry`` (that
    of a service that is a subreaper) adds the orphans that re-parented to the service.
    """
    search = _Search(mark=mark, keeper=keeper, registry=registry)
    if registry is None:
        return await trio.to_thread.run_sync(_sweep, search, deadline_ms)
    async with registry.forking:
        return await trio.to_thread.run_sync(_sweep, search, deadline_ms)


async def sweep_tree(keeper: ProcessIdentity, *, deadline_ms: int) -> Reaped:
    """Kill a recorded process with all that descends from it."""
    search = _Search(mark=None, keeper=keeper, registry=None)
    return await trio.to_thread.run_sync(_sweep, search, deadline_ms)


async def marks_of_log(log_id: str) -> frozenset[Mark]:
    """Answer the runs of this log of which a process is there, by the marks they carry."""
    return frozenset(await trio.to_thread.run_sync(_marks_of_log, log_id))


async def sweep_marked(
    found: frozenset[Mark], *, keep: frozenset[tuple[str, int]], deadline_ms: int
) -> list[Reaped]:
    """Kill every process that carries one of the marks and belongs to no run in ``keep``."""
    return [
        await sweep_run(mark, deadline_ms=deadline_ms)
        for mark in sorted(found, key=str)
        if (mark.job, mark.epoch) not in keep
    ]


@attrs.frozen(kw_only=True)
class _Search:
    mark: Mark | None
    keeper: ProcessIdentity | None
    registry: KeeperRegistry | None

    def find(self) -> list[Process]:
        """Answer all that is to be ended now, the living and our own zombies."""
        table = process_table()
        me = os.getpid()
        above = _ancestors(me, table)
        roots = {pid for pid in table.keys() - above if self._is_marked(pid)}
        if self.keeper is not None and self._is_keeper(table.get(self.keeper.pid)):
            roots.add(self.keeper.pid)
        roots |= self._orphans(table, me)
        assert not roots & above, "the service never ends itself"
        below = descendants(roots, table)
        return [*(table[pid] for pid in roots), *below]

    def ours_to_reap(self, process: Process) -> bool:
        """Answer whether it is a child of ours that nobody waits for; the keeper's owner does."""
        is_keeper = self.keeper is not None and process.pid == self.keeper.pid
        return process.ppid == os.getpid() and not is_keeper

    def _is_marked(self, pid: int) -> bool:
        return self.mark is not None and self.mark.marks(environment_of(pid))

    def _is_keeper(self, process: Process | None) -> bool:
        return (
            process is not None
            and self.keeper is not None
            and process.start_time == self.keeper.start_time
            and self.keeper.boot_id == current_boot_id()
        )

    def _orphans(self, table: dict[int, Process], me: int) -> set[int]:
        # Every child that we start is a keeper; each process of a job is in a session of its own
        # keeper's making, so that other children of this process (a test's) are not taken.
        if self.registry is None:
            return set()
        session = table[me].session
        return {
            process.pid
            for process in table.values()
            if process.ppid == me
            and process.pid not in self.registry.pids
            and process.session != session
        }


def _sweep(search: _Search, deadline_ms: int) -> Reaped:
    started = time.monotonic()
    deadline = started + deadline_ms / 1000
    ended: dict[tuple[int, int], str] = {}
    stopped: set[tuple[int, int]] = set()
    left = 0
    while True:
        found = search.find()
        for process in found:
            ended.setdefault((process.pid, process.start_time), "gone")
        _reap_own(found, search, ended)
        left = sum(not _is_over(process, search) for process in found)
        if left == 0 or time.monotonic() > deadline:
            break
        fresh = [p for p in found if (p.pid, p.start_time) not in stopped and not p.dead]
        for process in fresh:
            stopped.add((process.pid, process.start_time))
            send_signal(process, SIGSTOP)
        if fresh and len(stopped) < _FREEZE_PASSES_MAX * len(found):
            continue  # A process that is stopped can not fork; look again before the kill.
        for process in found:
            send_signal(process, SIGKILL)
        time.sleep(_PAUSE_S)
    pids = tuple((pid, how) for (pid, _), how in list(ended.items())[:PIDS_REPORTED_MAX])
    elapsed_ms = int((time.monotonic() - started) * 1000)
    return Reaped(pids=pids, seen=len(ended), left=left, duration_ms=elapsed_ms)


def _is_over(process: Process, search: _Search) -> bool:
    now = read_process(process.pid)
    if now is None or now.start_time != process.start_time:
        return True
    return now.dead and not search.ours_to_reap(now)


def _reap_own(found: list[Process], search: _Search, ended: dict[tuple[int, int], str]) -> None:
    for process in found:
        if process.dead and search.ours_to_reap(process):
            try:
                pid, status = os.waitpid(process.pid, os.WNOHANG)
            except ChildProcessError:
                continue
            if pid:
                ended[process.pid, process.start_time] = how_ended(status)


def _ancestors(pid: int, table: dict[int, Process]) -> set[int]:
    above = set()
    while pid in table:
        above.add(pid)
        pid = table[pid].ppid
    return above | {0, 1}


def _marks_of_log(log_id: str) -> set[Mark]:
    table = process_table()
    above = _ancestors(os.getpid(), table)
    found = set()
    for pid in table.keys() - above:
        variables = dict(
            item.decode("utf-8", "replace").split("=", 1)
            for item in environment_of(pid)
            if item.startswith(b"WATCHKEEPER_") and b"=" in item
        )
        job, epoch = variables.get("WATCHKEEPER_JOB_ID"), variables.get("WATCHKEEPER_EPOCH", "")
        if job and epoch.isdigit() and variables.get("WATCHKEEPER_LOG_ID") == log_id:
            found.add(Mark(job=job, epoch=int(epoch), log_id=log_id))
    return found
