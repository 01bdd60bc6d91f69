"""What the kernel itself can raise."""


class KernelError(Exception):
    """Any expected error of mailboxes and actors."""


class MailboxFull(KernelError):
    """A message was not taken: the mailbox holds its maximum."""

    def __init__(self, actor: str, messages_max: int) -> None:
        super().__init__(f"the mailbox of {actor} holds its {messages_max} messages; try again")
        self.actor = actor
        self.messages_max = messages_max


class ActorGone(KernelError):
    """The actor has ended, or ended before it answered."""

    def __init__(self, actor: str) -> None:
        super().__init__(f"{actor} has ended")
        self.actor = actor


class RestartLimit(KernelError):
    """A child crashed more often than its supervision allows."""

    def __init__(self, child: str, restarts_max: int, within_s: float) -> None:
        super().__init__(f"{child} crashed more than {restarts_max} times in {within_s:g} s")
        self.child = child
        self.restarts_max = restarts_max
        self.within_s = within_s
