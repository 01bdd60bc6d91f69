"""The loop of an actor: one message at a time, until it is cancelled or says that it is done."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from actors.kernel.mailbox import Mailbox
from actors.kernel.ref import Ref, drop

M = TypeVar("M")


class Actor(ABC, Generic[M]):
    """Handles its messages in order; an exception in :meth:`receive` ends it (a crash)."""

    def __init__(self, name: str, messages_max: int) -> None:
        self.name = name
        self._mailbox: Mailbox[M] = Mailbox(name, messages_max)
        self.ref: Ref[M] = Ref(self._mailbox)

    @abstractmethod
    async def receive(self, message: M) -> bool:
        """Handle one message; answer False to end the actor."""

    async def run(self) -> None:
        """Handle messages until done, cancelled or crashed; then refuse and fail what is left."""
        handling: M | None = None
        try:
            going = True
            while going:
                handling = await self._mailbox.get()
                going = await self.receive(handling)
                handling = None
        finally:
            if handling is not None:
                drop(handling, self.name)
            for message in self._mailbox.close():
                drop(message, self.name)
