"""A bounded mailbox over a trio memory channel."""

import math
from typing import Generic, TypeVar

import trio

from actors.kernel.errors import ActorGone, MailboxFull

M = TypeVar("M")


class Mailbox(Generic[M]):
    """Holds at most ``messages_max`` messages for one actor, in the order they were put."""

    def __init__(self, actor: str, messages_max: int) -> None:
        assert 0 < messages_max < math.inf, "every mailbox has a written limit"
        self.actor = actor
        self.messages_max = messages_max
        self._send, self._receive = trio.open_memory_channel[M](messages_max)

    async def put(self, message: M) -> None:
        """Wait for room and put a message; raises ActorGone. Cancelled: nothing was put."""
        try:
            await self._send.send(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ActorGone(self.actor) from error

    def put_nowait(self, message: M) -> None:
        """Put a message at once; raises MailboxFull or ActorGone."""
        try:
            self._send.send_nowait(message)
        except trio.WouldBlock as error:
            raise MailboxFull(self.actor, self.messages_max) from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ActorGone(self.actor) from error

    async def get(self) -> M:
        """Wait for the oldest message; for the actor alone. Cancelled: no message was taken."""
        return await self._receive.receive()

    def close(self) -> list[M]:
        """Refuse further messages and answer those that nobody took. Safe to call twice."""
        left: list[M] = []
        try:
            while True:
                left.append(self._receive.receive_nowait())
        except (trio.WouldBlock, trio.ClosedResourceError, trio.EndOfChannel):
            pass
        self._send.close()
        self._receive.close()
        return left
