"""Supervision of long-lived children: restart, restart limit, and stop in reverse order."""

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

import attrs
import trio

from actors.kernel.errors import RestartLimit

Restart = Literal["permanent", "transient", "temporary"]


@attrs.frozen(kw_only=True)
class ChildSpec:
    """How to run a child and what to do when it ends.

    ``permanent`` is always restarted, ``transient`` only after a crash, ``temporary`` never
    (its crash ends the supervision). At most ``restarts_max`` restarts in ``within_s`` seconds of
    trio's clock; one more raises RestartLimit and ends the supervision.
    """

    name: str
    run: Callable[[], Awaitable[None]]
    restart: Restart = "transient"
    restarts_max: int = 3
    within_s: float = 5.0


@attrs.define
class _Child:
    spec: ChildSpec
    scope: trio.CancelScope
    ended: trio.Event


class Supervision:
    """Children that are stopped, each waited for, in the reverse order of their start."""

    def __init__(
        self, nursery: trio.Nursery, on_crash: Callable[[str, Exception], None] | None = None
    ) -> None:
        self._nursery = nursery
        self._on_crash = on_crash
        self._children: list[_Child] = []

    def start(self, spec: ChildSpec) -> None:
        """Start a child; names are unique among living children."""
        assert all(c.spec.name != spec.name for c in self._children), "names are unique"
        child = _Child(spec, trio.CancelScope(), trio.Event())
        self._children.append(child)
        self._nursery.start_soon(self._keep, child, name=spec.name)

    async def stop(self) -> None:
        """Cancel and wait for the children, newest first; runs to its end even if cancelled."""
        with trio.CancelScope(shield=True):
            while self._children:
                child = self._children[-1]
                child.scope.cancel()
                await child.ended.wait()

    async def _keep(self, child: _Child) -> None:
        crashes: deque[float] = deque()
        try:
            with child.scope:
                while await self._run_once(child.spec):
                    now = trio.current_time()
                    crashes.append(now)
                    while crashes[0] < now - child.spec.within_s:
                        crashes.popleft()
                    if len(crashes) > child.spec.restarts_max:
                        raise RestartLimit(
                            child.spec.name, child.spec.restarts_max, child.spec.within_s
                        )
                    await trio.lowlevel.checkpoint()
        finally:
            self._children.remove(child)
            child.ended.set()

    async def _run_once(self, spec: ChildSpec) -> bool:
        """Answer whether the child is to be restarted."""
        try:
            await spec.run()
        except Exception as error:
            if spec.restart == "temporary":
                raise
            if self._on_crash is not None:
                self._on_crash(spec.name, error)
            return True
        return spec.restart == "permanent"


@asynccontextmanager
async def open_supervision(
    on_crash: Callable[[str, Exception], None] | None = None,
) -> AsyncGenerator[Supervision, None]:
    """Open a supervision; leaving the block, however it is left, stops all children in order."""
    async with trio.open_nursery() as nursery:
        supervision = Supervision(nursery, on_crash)
        try:
            yield supervision
        finally:
            await supervision.stop()
