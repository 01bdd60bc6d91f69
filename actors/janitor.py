"""The janitor: what is done for a job after its terminal event."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import trio

from actors.host import Host, HostError, Run
from actors.stream import JobStream
from storage import events as e
from storage.errors import AppendRefused

CLEAN_S: Final = 60.0
QUARANTINE_RETRY_S: Final = 5.0


async def clean(stream: JobStream, run: Run, *, remove: bool) -> None:
    """Remove the workspace of a run that is over, say so, and let go of the run.

    ``remove`` False leaves the workspace to the next start. Shielded, with a deadline of a minute; what is not done by then is done by the next start.
    """
    with trio.CancelScope(shield=True), trio.move_on_after(CLEAN_S):
        try:
            if remove:
                await run.remove()
            if remove and stream.state.terminal and stream.state.workspace is not None:
                await stream.append([e.WorkspaceRemoved()])
        except (HostError, AppendRefused):
            # The folder stays for the sweep of the next start; the log does not say it is gone.
            pass
        finally:
            with suppress(HostError):
                await run.close()


async def release_quarantined(
    stream: JobStream, host: Host, on_released: Callable[[], Awaitable[None]]
) -> None:
    """Reap what a job left behind until nothing is left, then free its slot; waits for long."""
    while stream.state.slot_quarantined:
        state = stream.state
        reaped = await host.reap(state.job_id, state.epoch, state.keeper)
        if reaped.left == 0:
            await stream.append_surely([reaped, e.SlotReleased()])
            await on_released()
            return
        await trio.sleep(QUARANTINE_RETRY_S)
