"""What was seen to end when the processes of a run were ended."""

import attrs


@attrs.frozen(kw_only=True)
class Reaped:
    """What was seen to end since the last report; ``pids`` is bounded, ``seen`` counts all."""

    pids: tuple[tuple[int, str], ...] = ()
    seen: int = 0
    left: int = 0
    duration_ms: int = 0

    def plus(self, other: "Reaped") -> "Reaped":
        """Answer both reports as one; ``left`` is that of the later, the other."""
        return Reaped(
            pids=self.pids + other.pids,
            seen=self.seen + other.seen,
            left=other.left,
            duration_ms=self.duration_ms + other.duration_ms,
        )
