"""How one actor speaks to another: tell, ask, and the reply of an ask."""

from collections.abc import Callable
from typing import Generic, TypeVar

import trio

from actors.kernel.errors import ActorGone
from actors.kernel.mailbox import Mailbox

M = TypeVar("M")
R = TypeVar("R")


class Reply(Generic[R]):
    """The place for one answer; it is set once, by whoever handles the message."""

    def __init__(self) -> None:
        self._done = trio.Event()
        self._value: R | None = None
        self._error: Exception | None = None

    def set(self, value: R) -> None:
        """Answer with a value; a second answer is a bug."""
        assert not self._done.is_set(), "a message is answered once"
        self._value = value
        self._done.set()

    def fail(self, error: Exception) -> None:
        """Answer with an error that the asker's ``wait`` raises."""
        assert not self._done.is_set(), "a message is answered once"
        self._error = error
        self._done.set()

    @property
    def answered(self) -> bool:
        """Whether an answer was given."""
        return self._done.is_set()

    async def wait(self) -> R:
        """Wait for the answer. Cancelling the wait does not take the message back."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set() was called with an R


class Ref(Generic[M]):
    """The address of an actor; holding it keeps nothing alive."""

    def __init__(self, mailbox: Mailbox[M]) -> None:
        self._mailbox = mailbox

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._mailbox.actor

    async def tell(self, message: M) -> None:
        """Wait for room and put a message; raises ActorGone."""
        await self._mailbox.put(message)

    def tell_nowait(self, message: M) -> None:
        """Put a message at once; raises MailboxFull or ActorGone."""
        self._mailbox.put_nowait(message)

    async def ask(self, make: Callable[[Reply[R]], M]) -> R:
        """Put a message that carries a reply and wait for the answer; raises what it raises."""
        reply: Reply[R] = Reply()
        await self._mailbox.put(make(reply))
        return await reply.wait()


def drop(message: object, actor: str) -> None:
    """Fail the reply of a message that nobody will handle, so that no asker waits for ever."""
    reply = getattr(message, "reply", None)
    if isinstance(reply, Reply) and not reply.answered:
        reply.fail(ActorGone(actor))
