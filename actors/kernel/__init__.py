"""The actor kernel: mailboxes, references, the actor loop and supervision on trio."""

from actors.kernel.actor import Actor
from actors.kernel.errors import ActorGone, KernelError, MailboxFull, RestartLimit
from actors.kernel.mailbox import Mailbox
from actors.kernel.ref import Ref, Reply
from actors.kernel.status import StartedOnce
from actors.kernel.supervision import ChildSpec, Supervision, open_supervision

__all__ = [
    "Actor",
    "ActorGone",
    "ChildSpec",
    "KernelError",
    "Mailbox",
    "MailboxFull",
    "Ref",
    "Reply",
    "RestartLimit",
    "StartedOnce",
    "Supervision",
    "open_supervision",
]
