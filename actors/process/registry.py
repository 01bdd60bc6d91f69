"""Which processes of the service are its keepers."""

import attrs
import trio


@attrs.frozen
class KeeperRegistry:
    """The keepers of this service that were not reaped yet.

    ``forking`` is held while one is started: who holds it knows that every child of the service
    that is not in ``pids`` is none of its keepers.
    """

    pids: set[int] = attrs.field(factory=set)
    forking: trio.Lock = attrs.field(factory=trio.Lock)
