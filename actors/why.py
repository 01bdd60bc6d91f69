"""What a job waits for, in words for people."""

from typing import Final

from storage.job_state import JobState

_WAITS_FOR: Final = {
    "started": "its workspace to be prepared",
    "begun": "its agent to finish",
    "ended": "its processes to be reaped and its work to be stored",
    "interrupted": "its work to be stored after an interruption",
}


def waits_for(state: JobState, *, waiting: bool, draining: bool, paused: bool, slots: str) -> str:
    """Answer what keeps a job from its end; ``waiting``: it is in the queue of this service.

    ``slots`` says how many are taken, for example ``3 of 10``.
    """
    if state.terminal:
        return "nothing: it is over"
    if not waiting:
        return _WAITS_FOR.get(state.phase, "the next start of the service")
    if draining:
        return "the next start: the service is stopping"
    if paused:
        return "room on the disk of the log"
    return f"a slot: {slots} are taken"
