"""A task status that may be reported twice."""

import trio


class StartedOnce(trio.TaskStatus[None]):
    """Passes the first call on and swallows the rest, so that a crash can always report."""

    def __init__(self, status: trio.TaskStatus[None]) -> None:
        self._status: trio.TaskStatus[None] | None = status

    def started(self, value: None = None) -> None:
        """Report the start, once."""
        status, self._status = self._status, None
        if status is not None:
            status.started(value)
