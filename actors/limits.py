"""Every limit of the runtime in one frozen value; milliseconds and bytes."""

import attrs


@attrs.frozen(kw_only=True)
class Limits:
    """Limits, with the defaults of the configuration reference.

    ``capacity`` jobs of the service run at once; ``queue_depth`` counts running and queued
    together. ``capture_deadline_ms`` and ``reap_deadline_ms`` bound the shielded work of an
    ending. ``drain_ms`` 0 kills at once.
    """

    capacity: int = 10
    queue_depth: int = 100
    grace_ms: int = 5_000
    keep_finished_ms: int = 3_600_000
    output_bytes_max: int = 256 * 1024 * 1024
    drain_ms: int = 30_000
    low_water_bytes: int = 256 * 1024 * 1024
    prepare_deadline_ms: int = 600_000
    capture_deadline_ms: int = 120_000
    reap_deadline_ms: int = 10_000
    unbegun_starts_max: int = 3
    unknown_deadline_ms: int = 60_000
    mailbox_max: int = 256
    appends_pending_max: int = 1_024
    owned_total: int = 64
