"""Keepers started ahead, so that the start of a job does not pay for the start of Python."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import trio

from actors.process.registry import KeeperRegistry
from actors.process.runner import KeeperLost, KeeperProcess, run_keeper

_RETRY_S: Final = 1.0


class KeeperPool:
    """Hands out keepers; the tasks of all of them live in the pool's nursery."""

    def __init__(self, nursery: trio.Nursery, *, size: int, mechanism: str) -> None:
        assert size >= 0, "a pool of 0 starts every keeper when it is asked for"
        self._nursery = nursery
        self._size = size
        self._mechanism = mechanism
        self._idle: list[KeeperProcess] = []
        self.registry = KeeperRegistry()
        self._wanted = trio.Event()

    @property
    def idle(self) -> int:
        """How many keepers wait for a job."""
        return len(self._idle)

    async def acquire(self) -> KeeperProcess:
        """Answer a keeper, a warm one when there is one; raises OSError or KeeperLost.

        It is the caller's from here: the caller closes it.
        """
        while self._idle:
            keeper = self._idle.pop(0)
            self._wanted.set()
            if not keeper.lost:
                await trio.lowlevel.checkpoint()
                return keeper
        return await self._start()

    async def refill(self) -> None:
        """Keep ``size`` keepers warm until cancelled; a failed start is tried again later."""
        while True:
            self._wanted = trio.Event()
            self._idle = [keeper for keeper in self._idle if not keeper.lost]
            try:
                while len(self._idle) < self._size:
                    self._idle.append(await self._start())
            except (OSError, KeeperLost):
                await trio.sleep(_RETRY_S)
            else:
                await self._wanted.wait()

    async def _start(self) -> KeeperProcess:
        started: KeeperProcess = await self._nursery.start(
            run_keeper, self.registry, self._mechanism
        )
        return started


@asynccontextmanager
async def open_keeper_pool(
    *, size: int = 2, mechanism: str = "subreaper"
) -> AsyncGenerator[KeeperPool, None]:
    """Run a pool; on the way out every keeper and all that it holds is ended and reaped."""
    async with trio.open_nursery() as nursery:
        pool = KeeperPool(nursery, size=size, mechanism=mechanism)
        if size:
            nursery.start_soon(pool.refill)
        yield pool
        nursery.cancel_scope.cancel()
