"""What an audit found, as values: each kind of damage with what to do about it."""

from typing import Final, Literal, get_args

import attrs

FindingKind = Literal[
    "body",
    "leaf",
    "column",
    "moved",
    "missing",
    "time",
    "tile",
    "root",
    "cut",
    "chain",
    "illegal",
    "payload",
    "artifact",
    "projection",
    "meta",
    "file",
    "more",
]

FINDINGS_MAX: Final = 1_000

_RESTORE: Final = (
    "Keep this copy as evidence, restore the newest backup that verifies, and compare both with"
    " a root noted earlier."
)
_REBUILD: Final = (
    "The events are not touched: stop the service and drop the projection's tables; the next"
    " start folds them anew."
)
REMEDIES: Final[dict[FindingKind, str]] = {
    "body": _RESTORE,
    "leaf": _RESTORE,
    "column": _RESTORE,
    "moved": _RESTORE,
    "missing": _RESTORE,
    "time": _RESTORE,
    "tile": _RESTORE,
    "root": _RESTORE,
    "cut": _RESTORE,
    "chain": _RESTORE,
    "illegal": (
        "The event is as it was written. If no other finding explains it, report a bug of the"
        " version that wrote it."
    ),
    "payload": "Restore the row of this digest from a backup; the event proves which is right.",
    "artifact": "Restore the row or the file from a backup; the event proves which is right.",
    "projection": _REBUILD,
    "meta": _RESTORE,
    "file": "The copy is torn, not edited: make one with `watchkeeper backup` and verify that.",
    "more": "Mend what is listed, then verify again.",
}
assert set(REMEDIES) == set(get_args(FindingKind)), "every kind has its remedy"


@attrs.frozen(kw_only=True)
class Finding:
    """One contradiction; ``seq`` is the event it is about, None where it is about none."""

    kind: FindingKind
    seq: int | None
    what: str
    remedy: str


class Findings:
    """Findings as they come, at most ``FINDINGS_MAX``; then one that says there are more."""

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._more = 0

    def add(self, kind: FindingKind, seq: int | None, what: str) -> None:
        """Remember a finding, or count it when there are too many."""
        if len(self._found) >= FINDINGS_MAX:
            self._more += 1
            return
        self._found.append(Finding(kind=kind, seq=seq, what=what, remedy=REMEDIES[kind]))

    def all(self) -> tuple[Finding, ...]:
        """Answer the findings in the order of discovery."""
        if not self._more:
            return tuple(self._found)
        what = f"{self._more} more findings are not listed"
        more = Finding(kind="more", seq=None, what=what, remedy=REMEDIES["more"])
        return (*self._found, more)
